"""A Python author's client from before anything was added to the contract: one session, some turns, close.

    python client.py <target> <scenario>

Its `kakeya.v1` is made from proto/frozen by the test, which puts it first on the path. Requests come and answers are
printed in protobuf's JSON form, as with its TypeScript sibling.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc

TIMEOUT_SECONDS = 30.0


class OneSession:
    """A session's calls, each with a deadline."""

    def __init__(self, stub: Any, create: dict[str, Any]) -> None:
        self._stub = stub
        request = ParseDict(create, pb.CreateSessionRequest())
        self._session_id = stub.CreateSession(request, timeout=TIMEOUT_SECONDS).session_id

    def append(self, fields: dict[str, Any]) -> Any:
        request = ParseDict(fields, pb.AppendTokensRequest(session_id=self._session_id))
        return self._stub.AppendTokens(request, timeout=TIMEOUT_SECONDS)

    def generate(self, fields: dict[str, Any]) -> Any:
        request = ParseDict(fields, pb.GenerateRequest(session_id=self._session_id))
        return self._stub.Generate(request, timeout=TIMEOUT_SECONDS)

    def info(self) -> Any:
        request = pb.GetSessionInfoRequest(session_id=self._session_id)
        return self._stub.GetSessionInfo(request, timeout=TIMEOUT_SECONDS)

    def close(self) -> Any:
        request = pb.CloseSessionRequest(session_id=self._session_id)
        return self._stub.CloseSession(request, timeout=TIMEOUT_SECONDS)


def main(target: str, scenario: dict[str, Any]) -> None:
    """Play the scenario and print what came back."""
    with grpc.insecure_channel(target) as channel:
        session = OneSession(runtime_pb2_grpc.RuntimeServiceStub(channel), scenario["create"])
        turns = [take(session, turn) for turn in scenario["turns"]]
        closed = session.close()
        afterwards = {
            "AppendTokens": status_of(lambda: session.append({"tokenIds": [1]})),
            "Generate": status_of(lambda: list(session.generate({"maxTokens": 1}))),
            "CloseSession": status_of(session.close),
            "GetSessionInfo": status_of(session.info),
        }
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["RuntimeService"].methods]
    print(json.dumps({"methods": methods, "turns": turns, "closed": written(closed), "afterwards": afterwards}))


def take(session: OneSession, turn: dict[str, Any]) -> dict[str, Any]:
    """Append, generate, and ask how the session is. Breaks the stream off after `leaveAfter` frames."""
    appended = session.append(turn["append"])
    stream = session.generate(turn["generate"])
    frames = []
    for frame in stream:
        frames.append(written(frame))
        if len(frames) == turn.get("leaveAfter"):
            stream.cancel()
            break
    return {"appended": written(appended), "frames": frames, "info": written(session.info())}


def status_of(call: Callable[[], Any]) -> int:
    """The status code a call ends with; 0 is OK."""
    try:
        call()
    except grpc.RpcError as error:
        return int(error.code().value[0])
    return 0


def written(message: Message) -> dict[str, Any]:
    return MessageToDict(message, always_print_fields_with_no_presence=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
