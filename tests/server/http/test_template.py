"""Chat templates in a process of their own: rendered as transformers renders them, within limits, and locked in."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest

from inference_engine.errors import Draining, InvalidArgument, ModelError
from inference_engine.server.http import template as template_module
from inference_engine.server.http.chat_text import load_chat_text
from inference_engine.server.http.error_replies import RenderLimit
from inference_engine.server.http.render_process import write_frame
from inference_engine.server.http.template import ChatTemplate
from kakeya import TokenizerError
from kakeya.tokenization import end_of_turn_ids, load_tokenizer, tokens_for_chat
from tests.tiny_folder import TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.hostile

MESSAGES = (
    {"role": "system", "content": "Be <brief> & “kind”."},
    {"role": "user", "content": "Hello\n  you"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Again"},
)
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
DROPS_USERS = "{% for m in messages if m.role != 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
# What templates of known models do.
IDIOMS = {
    "loops": "{%- for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}{{ m.content }}\n{%- endfor %}",
    "namespace": "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.role %}{% endfor %}{{n.s}}",
    "json": "{{ messages | tojson }}{{ {'b': 1, 'a': 'ü<'} | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "variables": "{{ eos_token }}{{ bos_token is defined }}{{ tools is none }}{{ add_generation_prompt }}",
    "strings": "{{ messages[0].content.split('<')[0].strip() | upper }}{{ messages[1:] | length }}{{ dict(a=1).a }}",
    "macros": "{% macro turn(m) -%}[{{ m.role }}]{%- endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "dates": "{{ strftime_now('%Y') }}",
}


@pytest.fixture
def make() -> Iterator[Callable[..., ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(template: str, **limits: Any) -> ChatTemplate:
        made.append(ChatTemplate(template, {"eos_token": "<|im_end|>"}, **limits))
        return made[-1]

    yield make
    for template in made:
        template.close()


@pytest.mark.parametrize("template", [TEMPLATE, *IDIOMS.values()], ids=["tiny", *IDIOMS])
def test_a_template_gives_what_transformers_makes_of_it(make: Callable[..., ChatTemplate], template: str) -> None:
    for prompt in (True, False):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        rendered = tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=prompt)
        assert make(template).render(MESSAGES, add_generation_prompt=prompt) == rendered


def test_what_a_template_refuses_is_the_callers_and_the_next_conversation_is_rendered(
    make: Callable[..., ChatTemplate],
) -> None:
    template = make("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}fine")
    with pytest.raises(InvalidArgument, match="rejects them: one at a time"):
        template.render(MESSAGES)
    assert template.render(MESSAGES[:1]) == "fine"


ESCAPES: list[str] = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__['os'] }}",
    "{{ namespace(__class__=1) }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{% include '/etc/passwd' %}",
    "{{ dict.__subclasses__() }}",
]


def test_a_template_reaches_nothing_but_its_values(
    make: Callable[..., ChatTemplate], subtests: pytest.Subtests
) -> None:
    for escape in ESCAPES:
        with subtests.test(escape), pytest.raises(InvalidArgument, match="rejects them"):
            make(escape).render(MESSAGES)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_ended_and_the_next_conversation_is_rendered(
    make: Callable[..., ChatTemplate],
) -> None:
    template = make("{% if messages|length > 1 %}" + ENDLESS + "{% endif %}fine", max_seconds=1.0)
    with pytest.raises(RenderLimit, match="exceeded the limit of 1 s"):
        template.render(MESSAGES)
    assert template.render(MESSAGES[:1]) == "fine"


@pytest.mark.parametrize(
    ("greedy", "complaint"),
    [
        ("{{ 'x' * 9999999999 }}", "too much memory"),
        ("{{ '%9999999999d' % 1 }}", "too much memory"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{{ messages }}{% endfor %}{% endfor %}", "longer than"),
    ],
    ids=["repeat", "pad", "loop"],
)
def test_a_template_that_takes_too_much_is_refused(
    make: Callable[..., ChatTemplate], greedy: str, complaint: str
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        make(greedy).render(MESSAGES)


def test_a_template_with_wrong_syntax_is_the_models_fault(make: Callable[..., ChatTemplate]) -> None:
    with pytest.raises(ModelError, match="cannot be used"):
        make("{% for m in messages %}").render(MESSAGES)


def test_a_template_that_was_closed_starts_when_it_is_reported_to(make: Callable[..., ChatTemplate]) -> None:
    template = make("fine")
    assert template.render(MESSAGES) == "fine"
    for _ in range(2):
        template.close()
        with pytest.raises(Draining):
            template.render(MESSAGES)
    template.start()
    assert template.render(MESSAGES) == "fine"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Those that were started."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_closing_ends_what_is_being_rendered_and_no_process_starts_again(
    make: Callable[..., ChatTemplate], processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make(ENDLESS, max_seconds=60.0)
    template.start()
    is_asked = threading.Event()
    write = write_frame

    def written(stream: IO[bytes], body: bytes) -> None:
        write(stream, body)
        is_asked.set()

    monkeypatch.setattr(template_module, "write_frame", written)
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(template.render, MESSAGES)
        assert is_asked.wait(60.0)
        template.close()
        # Not RenderLimit: its time was not over.
        assert isinstance(rendering.exception(60.0), Draining)
    (process,) = processes
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        ({"chat_template.json": json.dumps({"chat_template": TEMPLATE})}, ""),
        ({"additional_chat_templates/chat.jinja": TEMPLATE}, ""),
        ({"additional_chat_templates/chat.jinja": TEMPLATE, "additional_chat_templates/rag.jinja": "{{ no }}"}, ""),
        (
            {"additional_chat_templates/rag.jinja": TEMPLATE, "additional_chat_templates/tool_use.jinja": TEMPLATE},
            "the chat templates are named rag, tool_use, and none is the default",
        ),
        ({"chat_template.jinja": PARTS}, "the model's chat template drops the (user|assistant)'s messages"),
        ({"chat_template.jinja": DROPS_USERS}, "template drops the user's messages; leave http_bind unset"),
    ],
)
def test_the_template_of_a_folder_is_found_wherever_it_is_or_refused(
    files: dict[str, str], refusal: str, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if refusal:
        with pytest.raises(ModelError, match=refusal):
            load_chat_text(tmp_path, name="tiny")
        return
    with closing(load_chat_text(tmp_path, name="tiny")) as chat:
        assert chat.end_ids == (tokenizer.eos_token_id,)
        ids = chat.prompt_ids([{"role": "user", "content": "Hello"}])
        assert "Hello" in tokenizer.decode(ids)


NO_NAMES = r"tokenizer_config\.json: chat_template is neither a text nor a list"
ODD_FILES = [
    ("tokenizer_config.json", {"chat_template": 7}, NO_NAMES),
    ("tokenizer_config.json", {"chat_template": [{"name": "a"}, 3]}, NO_NAMES),
    ("tokenizer_config.json", {"chat_template": [{"name": "a", "more": 1}]}, NO_NAMES),
    ("tokenizer_config.json", {"chat_template": [{"name": None, "template": None}]}, NO_NAMES),
    ("chat_template.json", [], r"chat_template\.json holds no object"),
    ("special_tokens_map.json", [], r"special_tokens_map\.json holds no object"),
    *(
        ("tokenizer_config.json", {"added_tokens_decoder": added}, "does not name tokens by their ids")
        for added in (["x"], {"5": None}, {"5": {"special": True}}, {"x": {"content": "<|im_end|>"}})
    ),
    ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, "is 5, .* makes it"),
    # A name without a token is none, and gives no further id.
    *(("tokenizer_config.json", {"eos_token": odd, "pad_token": "<pad>"}, "") for odd in ("<none>", 3, ["<|im_end|>"])),
]


@pytest.mark.parametrize(("name", "content", "refusal"), ODD_FILES)
def test_the_door_and_the_sdk_read_the_same_of_odd_files(name: str, content: Any, refusal: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / name
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | content if isinstance(content, dict) else content))
    if refusal:
        with pytest.raises(TokenizerError, match=refusal):
            load_tokenizer(tmp_path)
        with pytest.raises(ModelError, match=refusal):
            load_chat_text(tmp_path, name="tiny")
        return
    messages = [{"role": "user", "content": "<pad> and <none>"}]
    with closing(load_chat_text(tmp_path, name="tiny")) as chat:
        tokenizer = load_tokenizer(tmp_path)
        assert chat.prompt_ids(messages).tolist() == tokens_for_chat(messages, tokenizer)
        assert chat.end_ids == end_of_turn_ids(tokenizer)


def test_closing_while_the_process_loads_ends_it(
    make: Callable[..., ChatTemplate], processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make("fine")
    write = write_frame
    closing: list[threading.Thread] = []

    def close_after(stream: IO[bytes], body: bytes) -> None:
        write(stream, body)
        closing.append(threading.Thread(target=template.close))
        closing[-1].start()
        processes[-1].wait(60.0)

    monkeypatch.setattr(template_module, "write_frame", close_after)
    with pytest.raises(Draining):
        template.render(MESSAGES)
    for thread in closing:
        thread.join(60.0)
    (process,) = processes
    assert process.returncode is not None
