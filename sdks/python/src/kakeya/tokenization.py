"""Chat messages to token ids, on the client's side, as fits a history that only grows.

A chat template renders a whole conversation. Rendered again one turn later, earlier turns can come out differently:
reasoning is stripped, whitespace trimmed, tool calls re-ordered; and text the model wrote, encoded again, need not give
the ids it sampled. A session keeps what was really said. So a conversation is rendered once, when it starts, and from
then on only what is new is appended:

    session.append(tokens_for_chat([system, user], tokenizer))
    turn = session.generate(256).result()
    session.append(tokens_for_next_turn([user], tokenizer, after=turn.token_ids))

The second function finds what is new by rendering `user, assistant, <the new messages>` with a marker for the
assistant's words and taking what follows it: the end of the assistant's turn, the new turns, the head of the next.

Special tokens come from the template alone: text in a message that reads like one (`<|im_end|>`) is encoded as text,
unless `allow_special_tokens` asks for what the tokenizer would make of it.

`load_tokenizer` needs `pip install kakeya[tokenization]`, and for a folder without tokenizer.json transformers; the
rest takes any tokenizer that is a `ChatTokenizer`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from kakeya._chat_template import NoDefaultTemplate, chosen_template, templates_in
from kakeya._checks import flag, token_ids
from kakeya._errors import InvalidMessages, TemplateError, TokenizerError
from kakeya._openai_messages import from_openai_messages
from kakeya._reply_text import ReplyText, StopStrings
from kakeya._special_text import Conversation, Respelled, SpecialTextError, SpecialTokens

__all__ = [
    "ChatTokenizer",
    "ReplyText",
    "StopStrings",
    "end_of_turn_ids",
    "from_openai_messages",
    "load_tokenizer",
    "tokens_for_chat",
    "tokens_for_next_turn",
]

Message = Mapping[str, Any]

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_USER = "The quick brown fox"
# Words that no template trims, escapes or takes for markup; two, so that nothing can depend on what they say.
_MARKERS = ("Kqzwxjvbm", "Vhgtfyprd")
_DISTINCT = 24  # characters: no template says so much that a message says, too


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer: those that `load_tokenizer` gives and transformers' own have it."""

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def load_tokenizer(path: str | os.PathLike[str]) -> ChatTokenizer:
    """The tokenizer in a local folder. Never asks a network and runs no code from the folder. Raises TokenizerError."""
    try:
        folder = Path(path).expanduser()
    except RuntimeError as error:
        raise TokenizerError(f"{path}: there is no such home folder; give the path in full") from error
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder; give the one that holds tokenizer.json")
    if not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        raise TokenizerError(f"{folder} holds no tokenizer: no tokenizer.json, and none in another format")
    try:
        return _loaded(folder)
    except ImportError as error:
        raise TokenizerError(
            f"loading this tokenizer needs {error.name}: pip install 'kakeya[tokenization]'"
            + (" transformers, since the folder has no tokenizer.json" if error.name == "transformers" else "")
        ) from error
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{folder} holds no tokenizer that can be loaded: {error}") from error


def _loaded(folder: Path) -> ChatTokenizer:
    if (folder / _TOKENIZER_FILES[0]).is_file():
        from kakeya._folder_tokenizer import FolderTokenizer

        return FolderTokenizer.of(folder)
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    # Where processors of pictures have it, AutoTokenizer does not look.
    tokenizer.chat_template = tokenizer.chat_template or templates_in(folder)
    return cast("ChatTokenizer", tokenizer)


def tokens_for_chat(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    allow_special_tokens: bool = False,
    **template_options: Any,
) -> list[int]:
    """The ids of a conversation that starts a session, up to where the assistant is to speak.

    `tools` and `template_options` go to the chat template. Text in messages, tools and options that reads like a
    special token is encoded as text; with `allow_special_tokens` it becomes the token, as if the template wrote it.

    Raises TemplateError if the template refuses, or if markup and messages cannot be kept apart; TokenizerError if the
    tokenizer fails in itself.
    """
    _require_messages(messages)
    writer = Writer(tokenizer, {"tools": tools, **template_options}, allow_special_tokens)
    text, encode = writer.write(messages, add_generation_prompt)
    return encode(text)


def tokens_for_next_turn(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    after: Sequence[int],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    allow_special_tokens: bool = False,
    **template_options: Any,
) -> list[int]:
    """The ids to append for the next turn: what ends the assistant's, then `messages`, then the head of its next one.

    `messages` are the new ones only (user, tool, …). `after` are the tokens generated last, end token included if the
    model came to it: what they already have of the turn's end is not repeated, and if they were cut short (length
    limit, cancel) the missing end is put in. Nothing of the history is rendered again. Special tokens come from the
    template alone, as in `tokens_for_chat`.

    Raises TemplateError if the template gives no such ids: it drops or alters the assistant's words, ends a turn
    differently when another follows, or refuses the roles; or markup and messages cannot be kept apart.
    """
    _require_new(messages)
    generated = token_ids(after, "after")
    options = {"tools": tools, **template_options}
    writer = Writer(tokenizer, options, allow_special_tokens)
    one, other = (
        Spoken({"role": "assistant", "content": writer.said(marker)}, marker) for marker in markers([messages, options])
    )
    return ids_after(writer, one, other, messages, generated, add_generation_prompt)


def ids_after(
    writer: Writer,
    one: Spoken,
    other: Spoken,
    messages: Sequence[Message],
    generated: Sequence[int],
    add_generation_prompt: bool,
) -> list[int]:
    """The ids that follow what the assistant spoke, but for those that were generated. one, other: the same turn with
    other words. Raises TemplateError as `tokens_for_next_turn`."""
    start: list[Message] = [{"role": "user", "content": writer.said(_USER)}]
    longer = [*start, {"role": "assistant", "content": writer.said(_USER)}, *start]
    end, turn = _after_assistant(writer, start, one, messages, add_generation_prompt)
    if (end, turn) != _after_assistant(writer, longer, other, messages, add_generation_prompt):
        raise TemplateError(
            "the chat template renders what follows an assistant's turn differently depending on what came before it, "
            "so the next turn cannot be had without rendering the history again; put the ids together yourself"
        )
    # A template that ends no last turn leaves the end token to the first place of the next.
    longest = max(len(end), 1)
    present = next((n for n in range(longest, 0, -1) if list(generated[-n:]) == turn[:n]), 0)
    return turn[present:]


def end_of_turn_ids(tokenizer: ChatTokenizer, **template_options: Any) -> tuple[int, ...]:
    """Ids that end an assistant's turn, for a session's `eos_token_ids`: the tokenizer's own and the template's.

    A session that names none has those of its server's model. These are for a tokenizer or a template of your own.
    """
    ids = own_ends(tokenizer)
    writer = Writer(tokenizer, template_options, False)
    question: list[Message] = [{"role": "user", "content": writer.said(_USER)}]
    marker = markers(template_options)[0]
    spoken = Spoken({"role": "assistant", "content": writer.said(marker)}, marker)
    end = _rendered_after(writer, question, spoken, [], False)[1]
    # A turn that ends in plain text has no token of its own for it.
    if end and end[0] in tokenizer.added_tokens_decoder:
        ids.append(end[0])
    return tuple(dict.fromkeys(ids))


def own_ends(tokenizer: ChatTokenizer) -> list[int]:
    """The ends of a text, of a turn and of a message, by the names of tokenizer_config.json."""
    named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "eot", "eom")]
    flat = [at for one in named for at in (one if isinstance(one, (list, tuple)) else [one])]
    return list(dict.fromkeys(at for at in flat if at is not None))


def markers(given: Any) -> list[str]:
    """Two words that are in no text of what is given, however it is nested."""
    texts = list(_texts(given))
    runs = [[len(run) for text in texts for run in re.findall(f"{word}(x*)", text)] for word in _MARKERS]
    return [
        word + "x" * max((length + 1 for length in found), default=0)
        for word, found in zip(_MARKERS, runs, strict=True)
    ]


def _texts(value: Any) -> Iterator[str]:
    """Every text within messages and options, names of fields too."""
    yield from map(str, _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield name
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _require_new(messages: Sequence[Message]) -> None:
    _require_messages(messages)
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            raise InvalidMessages(
                f"messages[{index}].role",
                "is assistant; what the model said is in the history already, pass only what is new",
            )


def _require_messages(messages: Sequence[Message]) -> None:
    # Iterated more than once.
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidMessages("messages", f"must be a list of at least one message, got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidMessages(f"messages[{index}]", f"must be a mapping, got {type(message).__name__}")
        if (problem := next(filter(None, map(_no_text, _leaves(message))), None)) is not None:
            raise InvalidMessages(f"messages[{index}]", problem)


def _no_text(value: object) -> str | None:
    """Why no tokenizer takes `value` for text, or None."""
    if isinstance(value, (bytes, bytearray)):
        return "holds bytes; decode them"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return f"holds {value[error.start]!a}, no character: half of a pair, or of bytes that are not UTF-8"
    return None


class Writer:
    """Writes conversations as one template's text, and knows how to encode it."""

    def __init__(self, tokenizer: ChatTokenizer, options: Mapping[str, Any], allow_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._options = options = with_template(tokenizer, options)
        given = options.get("chat_template")
        is_allowed = flag(allow_special_tokens, "allow_special_tokens")
        self._special = None if is_allowed else special_tokens(tokenizer, given)

    def write(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, Callable[[str], list[int]]]:
        """The text, in which special tokens of messages are not spelled out, and what encodes it or its beginning."""
        tokenizer, special = self._tokenizer, self._special
        plain = partial(_encode, tokenizer)
        if special is None:
            text = render(tokenizer, messages, add_generation_prompt, self._options)
            return text, self._requiring_words(messages, text, add_generation_prompt, plain)
        try:
            conversation = Conversation(special, messages, self._options)
            text = render(tokenizer, conversation.messages, add_generation_prompt, conversation.options)
            if conversation.is_doubtful:
                messages, options = conversation.broken()
                conversation.check_broken(text, render(tokenizer, messages, add_generation_prompt, options))
        except SpecialTextError as error:
            raise _not_apart(error) from None

        def encode(part: str) -> list[int]:
            try:
                return conversation.encode(part, plain, lambda: _respelled(tokenizer, special))
            except SpecialTextError as error:
                raise _not_apart(error) from None

        return text, self._requiring_words(conversation.messages, text, add_generation_prompt, encode)

    def said(self, words: str) -> Any:
        """Content that the template shows: the words, or a list of parts where it takes nothing else."""
        in_parts = [{"type": "text", "text": words}]
        return words if self._shows(words) or not self._shows(words, in_parts) else in_parts

    def without_text_end(self, text: str, ids: Sequence[int]) -> str:
        """What follows an assistant's words, without the end of a text that templates of Phi put behind a conversation.

        Only behind another token, which ends the turn: else it is the turn's end itself.
        """
        added = self._tokenizer.added_tokens_decoder
        if len(ids) < 2 or ids[-1] not in own_ends(self._tokenizer) or added.keys().isdisjoint(ids[:-1]):
            return text
        last = added.get(ids[-1])
        return text.removesuffix(getattr(last, "content", str(last)))

    def _shows(self, words: str, content: Any = None) -> bool:
        message = {"role": "user", "content": words if content is None else content}
        try:
            return words in render(self._tokenizer, [message], False, self._options)
        except TemplateError:
            return False

    def _requiring_words(
        self, messages: Sequence[Message], text: str, add_generation_prompt: bool, encode: Callable[[str], list[int]]
    ) -> Callable[[str], list[int]]:
        def encode_what_has_them(part: str) -> list[int]:
            ids = encode(part)
            if part == text:
                self._require_words(messages, text, add_generation_prompt)
            return ids

        return encode_what_has_them

    def _require_words(self, messages: Sequence[Message], text: str, add_generation_prompt: bool) -> None:
        """What is said to the model has to be in the rendering: the text itself if it is long enough to be there by no
        accident, or else a marker in its place. The model's own earlier words may be left out, as its reasoning is."""
        marker = markers([messages, self._options])[0].lower()
        marked = {
            index: {**message, "content": f"{marker}{index}z"}
            for index, message in enumerate(messages)
            if message.get("role") != "assistant"
            and isinstance(content := message.get("content"), str)
            and (said := content.strip())
            and (len(said) < _DISTINCT or said not in text)
        }

        def rendered_with(some: Mapping[int, Message]) -> str:
            changed = [some.get(index, message) for index, message in enumerate(messages)]
            return render(self._tokenizer, changed, add_generation_prompt, self._options).lower()

        together = rendered_with(marked) if marked else ""
        for index, message in marked.items():
            # A template can depend on what others say.
            if message["content"] not in together and message["content"] not in rendered_with({index: message}):
                raise TemplateError(
                    f"the chat template drops the words of messages[{index}]; if it wants content as a list of parts, "
                    'give [{"type": "text", "text": "…"}]'
                )


def with_template(tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with a template where the tokenizer has several and none that is the default."""
    templates = getattr(tokenizer, "chat_template", None)
    is_chosen = options.get("chat_template") is not None or (options.get("tools") and "tool_use" in (templates or ()))
    if not isinstance(templates, Mapping) or is_chosen:
        return options
    try:
        return {**options, "chat_template": chosen_template(templates)}
    except NoDefaultTemplate as error:
        raise TemplateError(f"{error}; choose one: chat_template={error.names[0]!r}") from None


def _not_apart(error: SpecialTextError) -> TemplateError:
    return TemplateError(f"{error}; take that out of the messages, or pass allow_special_tokens=True")


def special_tokens(tokenizer: ChatTokenizer, given: str | None) -> SpecialTokens:
    """given: a template instead of the tokenizer's own, or the name of one of them."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return SpecialTokens.of(
        (
            (token_id, getattr(token, "content", str(token)), bool(getattr(token, "special", False)))
            for token_id, token in tokenizer.added_tokens_decoder.items()
        ),
        end_ids=own_ends(tokenizer),
        template="".join([*(template.values() if isinstance(template, Mapping) else [str(template)]), given or ""]),
        unknown_id=getattr(tokenizer, "unk_token_id", None),
    )


# Making one takes a second for a large vocabulary. Only conversations that hold text of special tokens need it.
_RESPELLED: WeakKeyDictionary[ChatTokenizer, tuple[SpecialTokens, Respelled]] = WeakKeyDictionary()


def _respelled(tokenizer: ChatTokenizer, special: SpecialTokens) -> Respelled:
    held = _RESPELLED.get(tokenizer)
    if held is not None and held[0] == special:
        return held[1]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SpecialTextError(
            "the messages hold the text of a special token, and this tokenizer has no tokenizer.json"
        )
    made = Respelled(backend.to_str(), special)
    _RESPELLED[tokenizer] = special, made
    return made


@dataclass(frozen=True, slots=True)
class Spoken:
    """An assistant's message with a word that stands in it once. Its turn's end is behind that word and `closing`."""

    message: Message
    marker: str
    closing: str = ""


def _after_assistant(
    writer: Writer,
    before: Sequence[Message],
    spoken: Spoken,
    messages: Sequence[Message],
    add_generation_prompt: bool,
) -> tuple[list[int], list[int]]:
    """Ids that follow the assistant's words: the end of its turn alone, and everything up to its next turn."""
    end_text, end = _rendered_after(writer, before, spoken, [], False)
    turn_text, turn = _rendered_after(writer, before, spoken, messages, add_generation_prompt)
    if not turn_text.startswith(end_text) and spoken.closing:
        return [], turn  # a call's result can belong to the turn of the call
    if not turn_text.startswith(end_text) and turn_text.startswith(writer.without_text_end(end_text, end)):
        return end[:-1], turn
    if not turn_text.startswith(end_text):
        raise TemplateError(
            f"the chat template ends an assistant's turn with {end_text!r} when it is the last, but goes on with "
            f"{turn_text[: len(end_text) + 20]!r} when another follows, so no ids can be appended that fit both"
        )
    return end, turn


def _rendered_after(
    writer: Writer,
    before: Sequence[Message],
    spoken: Spoken,
    messages: Sequence[Message],
    add_generation_prompt: bool,
) -> tuple[str, list[int]]:
    """What the template puts after what the assistant spoke, as text and as ids."""
    marker = spoken.marker
    text, encode = writer.write([*before, spoken.message, *messages], add_generation_prompt)
    if text.count(marker) != 1:
        raise TemplateError(
            f"the chat template shows the assistant's words {text.count(marker)} times instead of once, so the place "
            "after them cannot be found"
        )
    cut = text.index(marker) + len(marker)
    if not text.startswith(spoken.closing, cut):
        raise TemplateError(
            f"the chat template ends a call with {text[cut : cut + len(spoken.closing)]!r} instead of "
            f"{spoken.closing!r}, so the place after it cannot be found"
        )
    cut += len(spoken.closing)
    # Encoded in its place: on its own, some tokenizers put a space before it.
    head, whole = encode(text[:cut]), encode(text)
    if whole[: len(head)] != head:
        raise TemplateError(
            f"the tokenizer joins the assistant's words with {text[cut : cut + 10]!r}, which the chat template puts "
            "after them, so the turn's end has no ids of its own"
        )
    return text[cut:], whole[len(head) :]


def render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
) -> str:
    conversation = [dict(message) for message in messages]
    try:
        apply = _keeping_none(tokenizer) if _holds_none(conversation) else tokenizer.apply_chat_template
        text = apply(conversation, tokenize=False, add_generation_prompt=add_generation_prompt, **options)
    except _template_failures() as error:
        roles = ", ".join(str(message.get("role")) for message in conversation)
        raise TemplateError(f"the chat template refuses messages of the roles {roles}: {error}") from error
    for message in conversation:
        parts = message.get("content")
        # As jinja writes a list that a template takes for text.
        if isinstance(parts, list) and parts and str(parts) in str(text):
            raise TemplateError(
                "content is a list of parts, and the chat template takes it for text; from_openai_messages joins them"
            )
    return str(text)


def _holds_none(conversation: Sequence[Message]) -> bool:
    return any(value is None for message in conversation for value in message.values())


def _keeping_none(tokenizer: ChatTokenizer) -> Callable[..., Any]:
    """`apply_chat_template` for templates that ask whether content is none: transformers' own drops what is."""
    find = getattr(tokenizer, "get_chat_template", None)
    if find is None:
        return tokenizer.apply_chat_template

    def apply(conversation: Any, *, tokenize: bool, **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        template = find(options.pop("chat_template", None), options.get("tools"))
        known = {**getattr(tokenizer, "special_tokens_map", {}), **options}
        (text,), _ = render_jinja_template(conversations=[conversation], chat_template=template, **known)
        return str(text)

    return apply


def _template_failures() -> tuple[type[Exception], ...]:
    """What running a template can raise: jinja's errors, and those of the expressions in it."""
    failures: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    try:
        from jinja2 import TemplateError as JinjaError
    except ImportError:
        return failures
    return (*failures, JinjaError)


def _encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    if (problem := _no_text(text)) is not None:
        raise TokenizerError(f"what the chat template makes of the messages {problem}")
    try:
        # The template has written all special tokens; the tokenizer must not add its own.
        return [int(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    except BaseException as error:
        # A panic of the tokenizers' library, which is no Exception and would pass by whatever handles those.
        if isinstance(error, Exception) or type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"the tokenizer failed on a text of {len(text)} characters: {error}") from error
