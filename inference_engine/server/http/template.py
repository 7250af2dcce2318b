"""A model's chat template, rendered by a process of its own with limits on time, memory and size."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference_engine.errors import InvalidArgument, ModelError
from inference_engine.server.http import render_process
from inference_engine.server.http.render_process import read_frame, write_frame

# Rendering takes about a millisecond, starting the process a tenth of a second, or longer on a busy machine.
MAX_SECONDS = 5.0
MAX_START_SECONDS = 60.0
MAX_CHARACTERS = 2**22
MAX_BYTES = 2**29

Message = Mapping[str, str]


class ChatTemplate:
    """Not thread-safe. The process starts when it is needed, and again after it was ended."""

    def __init__(
        self,
        template: str,
        variables: Mapping[str, str],
        *,
        max_seconds: float = MAX_SECONDS,
        max_characters: int = MAX_CHARACTERS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`variables` are seen by the template beside the messages: the model's special tokens."""
        self._start = {
            "template": template,
            "variables": dict(variables),
            "max_characters": max_characters,
            "max_bytes": max_bytes,
        }
        self._max_seconds = max_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's text. Raises InvalidArgument if the template refuses it or a limit is passed.

        Blocks, for at most `max_seconds` and the start of a process.
        """
        asked = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        answer = self._ask(self._started(), asked, self._max_seconds)
        if answer is None:
            raise InvalidArgument(
                "messages",
                f"the model's chat template did not end within {self._max_seconds:g} s and its memory; send less",
            )
        if "refused" in answer:
            raise InvalidArgument("messages", f"the model's chat template refuses them: {answer['refused']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        """Raises ModelError for a template that does not compile."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # Isolated: neither the caller's folder nor PYTHON… variables decide what it imports, and Ctrl-C is not for it.
        self._process = subprocess.Popen(
            (sys.executable, "-I", str(Path(render_process.__file__))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        answer = self._ask(self._process, self._start, MAX_START_SECONDS)
        if answer is None or "refused" in answer:
            self.close()
            why = "its process ended" if answer is None else answer["refused"]
            raise ModelError(f"the model's chat template cannot be used: {why}")
        return self._process

    def _ask(
        self, process: subprocess.Popen[bytes], message: Mapping[str, Any], max_seconds: float
    ) -> dict[str, Any] | None:
        """The answer; None if none came in time, and then the process is gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        expiry = threading.Timer(max_seconds, process.kill)
        expiry.start()
        try:
            write_frame(process.stdin, json.dumps(message).encode())
            frame = read_frame(process.stdout)
        except BrokenPipeError:
            frame = None
        finally:
            expiry.cancel()
        if frame is None:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(frame)
        return answer
