"""Tools over each API: called in the model's own format, answered, and read by the next turn of the same session."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inference_engine.config import child_environment
from inference_engine.types import TokenBytes
from kakeya import Client
from kakeya.tools import ToolCall, ToolResult, Tools
from tests.conformance.tool_families import FAMILIES
from tests.further import further, further_test
from tests.gateway.conftest import gateway_for
from tests.server_thread import server_thread
from tests.tiny import VOCABULARY
from tests.tiny_folder import CHARACTERS, END, tiny_tokenizer
from tests.tiny_native import served_engine

# Little: a token is a character here, and the model has few positions.
PARAMETERS = {"type": "object", "properties": {"town": {"enum": ["Brno", "Oslo"]}}, "required": ["town"]}
WEATHER = {"name": "weather", "parameters": PARAMETERS}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}}}
QUESTION: Any = {"role": "user", "content": "Brno?"}
ANSWER = "It rains."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of characters, with a template that has tools and calls."""
    made = tiny_tokenizer()
    made.chat_template = "\n".join(FAMILIES["hermes"]["template"])
    return made


@pytest.fixture(scope="module")
def target(tokenizer: Any) -> Iterator[str]:
    others = range(len(CHARACTERS), VOCABULARY)
    names = (*(each.encode() for each in CHARACTERS), *(f"<{at}>".encode() for at in others))
    tokens = TokenBytes(tokens=names, specials=tuple(others))
    ends = (tokenizer.convert_tokens_to_ids(END),)
    engine = served_engine(windowed=False, end_ids=ends, read_tokens=lambda: tokens)
    with server_thread(engine) as target:
        yield target
    engine.close()


@pytest.fixture
def url(target: str, runtime: Client, tokenizer: Any) -> Iterator[str]:
    with gateway_for(target, tokenizer=tokenizer) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def called(runtime: Client, tokenizer: Any) -> tuple[ToolCall, list[int]]:
    """What a session with the SDK's tools calls, and the ids it goes on with once it was answered."""
    tools = Tools([WEATHER], tokenizer)
    with runtime.create_session() as session:
        session.append(tools.tokens_for_chat([QUESTION]))
        said = session.generate(200, constraint=tools.constraint("weather")).result().token_ids
        (call,) = tools.read(said).calls
        session.append(tools.tokens_for_next_turn([ToolResult(call, ANSWER)], after=said))
        return call, [token_id for piece in session.history() for token_id in piece.token_ids]


def begins(runtime: Client, ids: list[int]) -> None:
    """The one session of the gateway has this history, whatever was generated after it."""
    (session,) = runtime.sessions()
    history = [token_id for piece in runtime.session(session.id).history() for token_id in piece.token_ids]
    assert history[: len(ids)] == ids


def post(http: httpx2.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_chat_completions_call_tools_and_read_their_results(
    http: httpx2.Client, runtime: Client, tokenizer: Any
) -> None:
    call, ids = called(runtime, tokenizer)
    tools = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    choice = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"tools": tools, "max_tokens": 200, "tool_choice": choice}
    reply = post(http, "/v1/chat/completions", messages=[QUESTION], **asked)["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    (made,) = reply["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == (call.name, call.arguments)
    result = {"role": "tool", "tool_call_id": made["id"], "content": ANSWER}
    messages = [QUESTION, reply["message"], result]
    post(http, "/v1/chat/completions", messages=messages, tools=tools, tool_choice="none", max_tokens=4)
    begins(runtime, ids)


def test_messages_call_tools_and_read_their_results(http: httpx2.Client, runtime: Client, tokenizer: Any) -> None:
    call, ids = called(runtime, tokenizer)
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    asked: Any = {"tools": tools, "max_tokens": 200, "tool_choice": {"type": "tool", "name": "weather"}}
    reply = post(http, "/v1/messages", messages=[QUESTION], **asked)
    assert reply["stop_reason"] == "tool_use"
    (made,) = reply["content"]
    assert (made["type"], made["name"], made["input"]) == ("tool_use", call.name, call.arguments)
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": [{"type": "text", "text": ANSWER}]}
    messages = [QUESTION, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    post(http, "/v1/messages", messages=messages, tools=tools, tool_choice={"type": "none"}, max_tokens=4)
    begins(runtime, ids)


@pytest.mark.parametrize("by", ["the id of the response", further("its items"), further("references to its items")])
def test_responses_call_tools_and_read_their_results(
    http: httpx2.Client, runtime: Client, tokenizer: Any, by: str
) -> None:
    call, ids = called(runtime, tokenizer)
    tools = [{"type": "function", **WEATHER}]
    asked: Any = {"tools": tools, "max_output_tokens": 200, "tool_choice": {"type": "function", "name": "weather"}}
    reply = post(http, "/v1/responses", input=[QUESTION], **asked)
    (made,) = reply["output"]
    assert (made["type"], made["name"], json.loads(made["arguments"])) == ("function_call", call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": ANSWER}
    item = {"type": "item_reference", "id": made["id"]} if by.startswith("references") else made
    more: Any = {"tools": tools, "tool_choice": "none", "max_output_tokens": 4}
    if by == "the id of the response":
        post(http, "/v1/responses", input=[result], previous_response_id=reply["id"], **more)
    else:
        post(http, "/v1/responses", input=[QUESTION, item, result], **more)
    begins(runtime, ids)


def test_streams_have_calls_piece_by_piece(url: str, http: httpx2.Client, runtime: Client, tokenizer: Any) -> None:
    call, _ = called(runtime, tokenizer)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = [{"type": "function", "function": WEATHER}]
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        asked: Any = {"model": "tiny", "messages": [QUESTION], "max_tokens": 200}
        with client.chat.completions.stream(**asked, tools=tools, tool_choice=choice) as stream:
            made = stream.get_final_completion().choices[0].message.tool_calls or []
        assert [json.loads(each.function.arguments) for each in made] == [call.arguments]
        flat: Any = [{"type": "function", **WEATHER}]
        asked = {"model": "tiny", "input": [QUESTION], "max_output_tokens": 200}
        named: Any = {"type": "function", "name": "weather"}
        with client.responses.stream(**asked, tools=flat, tool_choice=named) as events:
            deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
            item = events.get_final_response().output[0]
    assert item.type == "function_call"
    assert "".join(deltas) == item.arguments
    assert json.loads(item.arguments) == call.arguments
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 200, "stream": True}
    custom = [{"name": "weather", "input_schema": PARAMETERS}]
    body |= {"tools": custom, "tool_choice": {"type": "tool", "name": "weather"}}
    lines = [line for line in http.post("/v1/messages", json=body).text.splitlines() if line.startswith("data: ")]
    sent = [json.loads(line.removeprefix("data: ")) for line in lines]
    pieces = [each["delta"]["partial_json"] for each in sent if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == call.arguments
    blocks = [each["content_block"]["type"] for each in sent if each["type"] == "content_block_start"]
    assert blocks == ["tool_use"]


def test_a_call_that_is_cut_is_not_made_and_results_of_other_calls_are_refused(http: httpx2.Client) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    asked: Any = {"tools": tools, "max_tokens": 20, "tool_choice": "required"}
    reply = post(http, "/v1/chat/completions", messages=[QUESTION], **asked)["choices"][0]
    assert (reply["finish_reason"], reply["message"].get("tool_calls")) == ("length", None)
    on = [QUESTION, reply["message"], QUESTION]
    post(http, "/v1/chat/completions", messages=on, **asked)
    made = post(http, "/v1/chat/completions", messages=[QUESTION], **asked | {"max_tokens": 200})["choices"][0]
    other = {"role": "tool", "tool_call_id": "another", "content": ANSWER}
    refused = http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [QUESTION, made["message"], other], "tools": tools},
    )
    assert refused.status_code == 400
    assert "is the result of" in refused.json()["error"]["message"]
    body = {"model": "tiny", "messages": [QUESTION], "response_format": {"type": "json_object"}, **asked}
    both = http.post("/v1/chat/completions", json=body)
    assert both.status_code == 400


def test_a_result_without_a_call_before_it_is_refused(http: httpx2.Client) -> None:
    """In a conversation that is sent whole. A template would show it as if a person had said it."""
    other = {"role": "tool", "tool_call_id": "another", "content": ANSWER}
    call = {"id": "another", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call]}
    block = {"type": "tool_result", "tool_use_id": "another", "content": ANSWER}
    output = {"type": "function_call_output", "call_id": "another", "output": ANSWER}
    for path, body in (
        ("/v1/chat/completions", {"messages": [QUESTION, other]}),
        ("/v1/chat/completions", {"messages": [QUESTION, other, calling, other]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 4}),
        ("/v1/responses", {"input": [QUESTION, output]}),
    ):
        refused = http.post(path, json={"model": "tiny", **body})
        assert refused.status_code == 400, refused.text
        assert "'another'" in refused.json()["error"]["message"]


def test_a_template_without_tools_needs_a_format(target: str, runtime: Client) -> None:
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 200, "tool_choice": "required"}
    body |= {"tools": [{"type": "function", "function": TIME}]}
    with gateway_for(target) as url:
        refused = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert "--tool-format" in refused.json()["error"]["message"]
    with gateway_for(target, tool_format="hermes") as url:
        reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


@further_test
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_ai_sdk_calls_tools_and_goes_on_with_the_session(url: str, api: str) -> None:
    program = Path(__file__).parent / "clients" / "tools.mjs"
    words = ["node", str(program), api, f"{url}/v1", "tiny"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=child_environment())
    assert done.returncode == 0, done.stderr
    for said in map(json.loads, done.stdout.splitlines()):
        assert said["toolName"] == "weather"
        assert said["output"] == f"{said['input']['town']} is wet."
        assert said["cached"] >= said["before"] - 1


@further_test
@pytest.mark.parametrize("settings", [{}, {"use_responses_api": True}], ids=["chat", "responses"])
def test_langchain_calls_tools_and_goes_on_with_the_session(url: str, settings: dict[str, Any]) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    made: dict[str, Any] = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_tokens": 80}
    model = ChatOpenAI(**made, max_retries=0, **settings)
    tools: list[Any] = [{"type": "function", "function": WEATHER | {"description": ""}}]
    messages: list[Any] = [HumanMessage(QUESTION["content"])]
    first: Any = model.bind_tools(tools, tool_choice="weather").invoke(messages)
    (call,) = first.tool_calls
    assert call["args"]["town"] in ("Brno", "Oslo")
    messages += [first, ToolMessage(ANSWER, tool_call_id=call["id"])]
    second: Any = model.bind_tools(tools, tool_choice="none").invoke(messages)
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= first.usage_metadata["total_tokens"] - 1


@further_test
def test_anthropics_client_calls_tools_and_goes_on_with_the_session(url: str) -> None:
    import anthropic

    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    messages: list[Any] = [QUESTION]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "max_tokens": 80, "tools": tools}
        with client.messages.stream(**asked, messages=messages, tool_choice={"type": "any"}) as stream:
            first = stream.get_final_message()
        (use,) = first.content
        assert use.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": ANSWER}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    assert (second.usage.cache_read_input_tokens or 0) >= first.usage.input_tokens + first.usage.output_tokens - 1
