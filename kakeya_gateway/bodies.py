"""What requests of all APIs hold, checked: a field that is not known is refused by name, or, if it is null, skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kakeya import Constraint, JsonSchema
from kakeya.tokenization import from_openai_messages

Json = dict[str, Any]

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"}
_SAMPLING |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}


class Refused(Exception):
    """A request that gets no answer. param: the field that is wrong; code: what OpenAI calls the situation."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None, retry: float = 0
    ) -> None:
        super().__init__(f"{param}: {message}" if param else message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_seconds = retry  # 0: it would be refused again


class Ask(NamedTuple):
    """What one turn is to be, whatever the API. after: the kept answer that the messages follow."""

    model: str
    messages: Sequence[Json]  # as chat templates take them
    max_tokens: int | None
    options: Mapping[str, Any]  # of `AsyncSession.generate`
    stops: Sequence[str] = ()
    tools: Sequence[Json] = ()  # their definitions
    choice: str = "auto"  # of tools, as `Tools.constraint` takes it
    is_parallel: bool = True  # may several be called at once?
    after: str | None = None
    is_kept: bool = False
    budget: int | None = None  # tokens of reasoning; None: as many as come
    budget_at: str = ""  # the field that says so


def as_chat(messages: Sequence[Json], *, is_whole: bool = True, param: str = "messages") -> list[Json]:
    """Messages of chat completions as templates take them. Raises InvalidMessages, and Refused for a result without a
    call before it. is_whole: they follow no answer that is kept. param: the field that has them.
    """
    shown, called = from_openai_messages(messages), set[str]()
    for one in shown if is_whole else ():
        called |= {call["id"] for call in one.get("tool_calls", ())}
        if one["role"] == "tool" and one["tool_call_id"] not in called:
            raise Refused(
                f"{one['tool_call_id']!r} is the result of a tool call that no earlier one makes", param=param
            )
    return shown


class Body(BaseModel):
    """An object of a request. harmless: fields that change no answer, such as those for a provider's records."""

    model_config = ConfigDict(extra="forbid", strict=True)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None and name not in cls.harmless}


class Part(Body):
    """Text in a message."""

    harmless = frozenset({"annotations", "cache_control", "citations", "logprobs"})
    type: Literal["text", "input_text", "output_text"]
    text: str

    def as_chat(self) -> Json:
        return {"type": "text", "text": self.text}


def in_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


Parts = Annotated[list[Part], BeforeValidator(in_parts)]


class Tool(Body):
    """A function that can be called. A call is held to its schema in any case."""

    harmless = frozenset({"strict", "cache_control", "eager_input_streaming"})
    type: Literal["function", "custom"] = "function"
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field({}, validation_alias=AliasChoices("parameters", "input_schema"))

    def definition(self) -> Json:
        return self.model_dump(include={"name", "description", "parameters"})


class Format(Body):
    """What the text of an answer has to fit. One API has the schema inside, the others beside its type."""

    harmless = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"] = "json_schema"
    json_schema: Format | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")

    def constraint(self, path: str) -> Constraint | None:
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.type == "json_object" else (self.json_schema or self).content
        if schema is None:
            raise Refused("has no schema", param=path)
        return JsonSchema(schema)


class Sampled(Body):
    """What decides how tokens are drawn. Ranges are the server's to check, and without a temperature it is greedy."""

    model: str
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None

    def options(self, form: Format | None, path: str, **others: Any) -> Json:
        """As `AsyncSession.generate` takes them. form: of the answer; it stands at `path`."""
        drawn = self.model_dump(include=_SAMPLING, exclude_none=True)
        return drawn | others | {"constraint": None if form is None else form.constraint(path)}
