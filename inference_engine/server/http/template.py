"""A model's chat template and tokenizer, run by a process of its own with limits on time, memory and size."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inference_engine.errors import Draining, InvalidArgument, ModelError
from inference_engine.server.http import render_process
from inference_engine.server.http.error_replies import RenderLimit
from inference_engine.server.http.render_process import read_frame, write_frame
from inference_engine.session.history import TokenIds
from kakeya import _special_text

# Rendering takes about a millisecond, starting the process a tenth of a second, or longer on a busy machine.
MAX_SECONDS = 5.0
MAX_START_SECONDS = 60.0
# Loading a large tokenizer takes a second or two.
MAX_LOAD_SECONDS = 30.0
MAX_CHARACTERS = 2**22
# While template and tokenizer are loaded, and beyond what they hold after that.
MAX_LOAD_BYTES = 2**31
MAX_BYTES = 2**29
# The longest known templates have some 30,000.
MAX_TEMPLATE_CHARACTERS = 2**20

Message = Mapping[str, str]


class PromptTooLong(Exception):
    """The rendered messages have at least `at_least` ids, more than the limit."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


class ChatTemplate:
    """One call at a time, `close` from any thread. The process starts on demand, and again after it has ended."""

    def __init__(
        self,
        template: str,
        variables: Mapping[str, str],
        *,
        tokenizer: Mapping[str, Any] | None = None,
        max_seconds: float = MAX_SECONDS,
        max_characters: int = MAX_CHARACTERS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`variables` are seen by the template beside the messages: the model's special tokens.

        tokenizer: as `render_process` has it, for `encode`. Raises ModelError for a template of absurd length.
        """
        if len(template) > MAX_TEMPLATE_CHARACTERS:
            raise ModelError(
                f"the model's chat template has {len(template)} characters, more than the limit of "
                f"{MAX_TEMPLATE_CHARACTERS}; use a shorter one"
            )
        # A path, because importing its package in the process would take half a second more.
        path = None if tokenizer is None else _special_text.__file__
        self._start = {"max_load_bytes": MAX_LOAD_BYTES, "max_bytes": max_bytes, "special_text": path}
        self._load = {
            "template": template,
            "variables": dict(variables),
            "max_characters": max_characters,
            "tokenizer": tokenizer,
        }
        self._max_seconds = max_seconds
        self._talking = threading.RLock()  # to the process, through its pipes
        self._changing = threading.Lock()  # guards what follows; never held while waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's text.

        Raises InvalidArgument if the template refuses it, RenderLimit if it takes too long, Draining once this is
        closed. Blocks, for at most `max_seconds` and the start of a process.
        """
        asked = _asked(messages, add_generation_prompt=add_generation_prompt, encode="no")
        return str(self._answer(asked)["text"])

    def encode(
        self, messages: Sequence[Message], most_ids: int | None, *, allow_special_tokens: bool = False
    ) -> TokenIds:
        """The ids of the conversation up to the assistant's turn.

        Special ones come from the template alone, or with `allow_special_tokens` from the messages, too. Raises as
        `render`; PromptTooLong for more than `most_ids`; RuntimeError if the tokenizer fails in itself.
        """
        encode = "together" if allow_special_tokens else "apart"
        answer = self._answer(_asked(messages, add_generation_prompt=True, encode=encode, most_ids=most_ids))
        if "too_long" in answer:
            raise PromptTooLong(answer["too_long"])
        ids: TokenIds = answer["ids"]
        return ids

    def start(self) -> None:
        """Start the process, also after `close`. Raises ModelError for what cannot be loaded within the limits."""
        with self._talking:
            with self._changing:
                self._is_closed = False
            self._started()

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        with self._talking:
            answer = self._ask(self._started(), asked, self._max_seconds)
            if answer is None:
                # Restarted now, so that the next call need not wait. An error will be raised again there.
                with contextlib.suppress(ModelError):
                    self._started()
                raise RenderLimit(self._max_seconds)
            if "failed" in answer:
                self._end_process()
        if "failed" in answer:
            raise RuntimeError(f"the model's tokenizer failed: {answer['failed']}")
        if "refused" in answer:
            raise InvalidArgument("messages", f"the model's chat template rejects them: {answer['refused']}")
        return answer

    def close(self) -> None:
        """End the process, for good unless `start` is called. A call that waits for it raises Draining. Idempotent."""
        with self._changing:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        with self._talking:
            self._end_process()

    def _end_process(self) -> None:
        with self._changing:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        """Raises ModelError for a template that does not compile, Draining once this is closed."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end_process()
        with self._changing:
            if self._is_closed:
                raise Draining
            # Isolated: the current folder and PYTHON… variables do not affect its imports, and Ctrl-C does not reach
            # it.
            process = self._process = subprocess.Popen(
                (sys.executable, "-I", str(Path(render_process.__file__))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A panic of the tokenizers' library would print its input.
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        if self._ask(process, self._start, MAX_START_SECONDS) is None:
            raise ModelError(f"the process that renders chat templates did not start within {MAX_START_SECONDS:g} s")
        answer = self._ask(process, self._load, MAX_LOAD_SECONDS)
        if answer is None or "refused" in answer:
            self._end_process()
            limits = f"loading them took more than {MAX_LOAD_SECONDS:g} s or {MAX_LOAD_BYTES} bytes of memory"
            why = limits if answer is None else answer["refused"]
            raise ModelError(f"the model's chat template or tokenizer cannot be used: {why}")
        return process

    def _ask(
        self, process: subprocess.Popen[bytes], message: Mapping[str, Any], max_seconds: float
    ) -> dict[str, Any] | None:
        """The answer, ids as TokenIds; None if none came in time, and then the process is gone.

        Raises Draining once this is closed.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        expiry = threading.Timer(max_seconds, process.kill)
        expiry.start()
        answer: dict[str, Any] = {}
        try:
            write_frame(process.stdin, json.dumps(message).encode())
            frame = read_frame(process.stdout)
            if frame is not None:
                answer = json.loads(frame)
            if "ids" in answer and (frame := read_frame(process.stdout)) is not None:
                answer["ids"] = np.frombuffer(frame, dtype=np.uint32)
        except BrokenPipeError:
            frame = None
        finally:
            expiry.cancel()
        if frame is None:
            self._end_process()
            with self._changing:
                if self._is_closed:  # `close` has ended the process, not the timer
                    raise Draining
            return None
        return answer


def _asked(
    messages: Sequence[Message], *, add_generation_prompt: bool, encode: str, most_ids: int | None = None
) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "encode": encode,
        "most_ids": most_ids,
    }
