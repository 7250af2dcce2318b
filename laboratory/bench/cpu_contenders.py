"""The contenders of `cpu.py`, each in a process of its own: a line of JSON is a request, the next its answer.

    python laboratory/bench/cpu_contenders.py llama '{"threads": 2, "file": "model.gguf"}'
    {"decode": {"length": 128, "count": 24}}     asked
    [11.4, 11.3, ...]                            answered: milliseconds

llama.cpp and OpenVINO run in environments of their own, which have nothing of ours: this file imports what a contender
needs when it starts. There is no drafter and no server. Every id is the likeliest one.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

POSITIONS = 8192
PREFIX = 64  # tokens before those of an append or a prefill
_KEPT = 2048  # histories longer than this are not computed again for each round
_ROWS = 64  # of logits compared at once


def history(count: int) -> list[int]:
    return [200 + 37 * place % 20_000 for place in range(count)]


def steps(times: Sequence[float]) -> list[float]:
    """Milliseconds between one id and the next."""
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(times)]


class Contender(ABC):
    """A model, loaded. Histories that are decoded stay, so a decode at 8,000 is at 8,009 in the next round."""

    @abstractmethod
    def decode(self, length: int, count: int) -> list[float]:
        """Milliseconds of each of `count` decode steps after a history of `length` tokens."""

    def together(self, sessions: int, length: int, count: int) -> list[float]:
        """Milliseconds of each of `count` steps that decode one token of each session."""
        raise NotImplementedError

    @abstractmethod
    def first_id(self, count: int) -> float:
        """Milliseconds from `count` tokens, appended to PREFIX, to the id that follows them."""

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """Of every token but the last, [len - 1, V]."""
        raise NotImplementedError

    def memory(self) -> dict[str, float]:
        """MiB that this process holds: resident, and what of it no file holds."""
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        sizes = {words[0]: int(words[1]) / 1024 for line in lines[1:] if (words := line.split())}
        return {"resident": sizes["Rss:"], "in no file": sizes["Anonymous:"]}

    def write_logits(self, texts: Sequence[Sequence[int]], file: str) -> int:
        """As the reference of `divergence`."""
        import numpy as np

        rows = np.concatenate([self.logits(text) for text in texts])
        np.save(file, rows)
        return len(rows)

    def divergence(self, texts: Sequence[Sequence[int]], file: str) -> dict[str, float]:
        """Of this contender's next-token distributions from those in the file; means over all tokens, in float64."""
        import numpy as np

        rows = np.load(file, mmap_mode="r")
        totals, first = np.zeros(3), 0
        for text in texts:
            found = self.logits(text)
            for start in range(0, len(found), _ROWS):
                ours = _log_softmax(found[start : start + _ROWS])
                theirs = _log_softmax(rows[first + start : first + start + len(ours)])
                place, following = np.arange(len(ours)), np.array(text[start + 1 : start + 1 + len(ours)])
                totals += (
                    (np.exp(theirs) * (theirs - ours)).sum(),
                    (theirs.argmax(-1) == ours.argmax(-1)).sum(),
                    (theirs - ours)[place, following].sum(),
                )
            first += len(found)
        kl, same, loss = (float(total) for total in totals / first)
        return {"kl": kl, "same": same, "loss": loss}


def _log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


# -- ours -------------------------------------------------------------------------------------------------------------


class Ours(Contender):
    """The engine, as a server has it."""

    def __init__(self, threads: int, backend: str, numerics: str, strategy: str, model: str = "") -> None:
        """model: a file or a name in place of the settings' own."""
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from inference_engine.config import (
            EngineConfig,
            ModelConfig,
            configure_threads_environment,
            forbid_model_hub,
            resolve,
        )

        configure_threads_environment()
        forbid_model_hub()

        from inference_engine.compose import open_backend
        from inference_engine.engine import Engine
        from inference_engine.kv.strategies import parse_strategy

        flags = {"threads": threads, "backend": backend, "numerics": numerics, **({"model": model} if model else {})}
        self._engine = Engine(
            open_backend(resolve(ModelConfig, flags)), EngineConfig(kv_bytes=2**31, share_prefixes="off")
        )
        self._strategy = parse_strategy(strategy)
        self._kept: dict[int, str] = {}

    def decode(self, length: int, count: int) -> list[float]:
        session = self._kept.pop(length, None) or self._open(length)
        found = steps(self._times(session, 1 + count))
        if length > _KEPT:
            self._kept[length] = session
        else:
            self._engine.close_session(session)
        return found

    def together(self, sessions: int, length: int, count: int) -> list[float]:
        from inference_engine.types import GenerateParams

        opened = [self._open(length) for _ in range(sessions)]
        # Generates begin and end one by one: their first and last tokens do not count.
        params = GenerateParams(max_tokens=count + 5)
        rows: list[list[float]] = [[] for _ in opened]
        streams = [
            self._engine.generate(session, params, listener=_stamps(row))
            for session, row in zip(opened, rows, strict=True)
        ]
        for stream in streams:
            list(stream)
        for session in opened:
            self._engine.close_session(session)
        return steps([max(times) for times in zip(*rows, strict=True)])[2:-2]

    def first_id(self, count: int) -> float:
        session = self._open(PREFIX)
        began = time.perf_counter()
        self._engine.append(session, history(count))
        ended = self._times(session, 1)[0]
        self._engine.close_session(session)
        return 1000 * (ended - began)

    def logits(self, token_ids: Sequence[int]) -> Floats:
        import numpy as np

        session = self._engine.create_session(strategy=self._strategy).session_id
        self._engine.append(session, token_ids[:1])
        parts: list[Floats] = []
        list(self._engine.score(session, token_ids[1:], lambda _, logits: parts.append(logits.numpy().copy())))
        self._engine.close_session(session)
        return np.concatenate(parts)

    def _open(self, length: int) -> str:
        """A session whose history is computed, but for its last id."""
        session = self._engine.create_session(strategy=self._strategy).session_id
        self._engine.append(session, history(length))
        self._times(session, 1)
        return session

    def _times(self, session: str, count: int) -> list[float]:
        from inference_engine.types import GenerateParams

        times: list[float] = []
        list(self._engine.generate(session, GenerateParams(max_tokens=count), listener=_stamps(times)))
        return times


def _stamps(times: list[float]) -> Callable[[object], None]:
    """A listener that notes when each token is committed; the thread that reads them may be late."""
    from inference_engine.types import TokenCommitted

    def note(event: object) -> None:
        if isinstance(event, TokenCommitted):
            times.append(time.perf_counter())

    return note


# -- llama.cpp --------------------------------------------------------------------------------------------------------


class Llama(Contender):
    """llama.cpp by its C interface: flash attention, K/V in float16."""

    def __init__(self, threads: int, file: str) -> None:
        import numpy as np

        self._np = np
        self._lib = llama_cpp()
        self._threads = threads
        self._model = self._lib.llama_model_load_from_file(file.encode(), self._lib.llama_model_default_params())
        self._vocabulary = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        self._batch = self._lib.llama_batch_init(512, 0, 1)
        self._single = self._context(POSITIONS, 1)
        self._several: dict[int, Any] = {}
        self._computed = 0  # entries of the only sequence of `_single` that belong to `history`
        self._saved = ""
        self._is_cuttable = not (
            self._lib.llama_model_is_recurrent(self._model) or self._lib.llama_model_is_hybrid(self._model)
        )
        self._states: dict[int, Any] = {}  # of histories, where none can be cut

    def save_history(self, length: int, file: str) -> int:
        """Compute it once. Entries of another file of the same model cost a decode step as much."""
        self._reach(length)
        none = (self._lib.llama_token * 1)()
        return int(self._lib.llama_state_seq_save_file(self._single, file.encode(), 0, none, 0))

    def load_history(self, file: str) -> bool:
        self._saved = file
        return True

    def decode(self, length: int, count: int) -> list[float]:
        self._reach(length)
        times, token_id = [], history(1)[0]
        for place in range(count + 1):
            token_id = self._run(self._single, [token_id], [length + place], [0], wanted=1)[0]
            times.append(time.perf_counter())
        self._cut(length)
        return steps(times)

    def together(self, sessions: int, length: int, count: int) -> list[float]:
        is_new = sessions not in self._several
        if is_new:
            self._several[sessions] = self._context(sessions * 256, sessions)
        context, places = self._several[sessions], list(range(sessions))
        if is_new or not self._is_cuttable:
            for session in places:
                self._run(context, history(length), range(length), [session] * length, wanted=1)
        times, token_ids = [], history(sessions)
        for place in range(count + 1):
            token_ids = self._run(context, token_ids, [length + place] * sessions, places, wanted=sessions)
            times.append(time.perf_counter())
        for session in places:
            self._remove(context, session, length if self._is_cuttable else 0)
        return steps(times)

    def first_id(self, count: int) -> float:
        self._cut(0)
        last = self._run(self._single, history(PREFIX), range(PREFIX), [0] * PREFIX, wanted=1)
        began = time.perf_counter()
        places = range(PREFIX, PREFIX + 1 + count)
        # Ours computes the id that was sampled last together with those that follow it.
        self._run(self._single, last + history(count), places, [0] * len(places), wanted=1)
        found = 1000 * (time.perf_counter() - began)
        self._cut(0)
        return found

    def logits(self, token_ids: Sequence[int]) -> Floats:
        self._cut(0)
        count = len(token_ids) - 1
        self._run(self._single, token_ids[:-1], range(count), [0] * count, wanted=count)
        rows = self._np.stack([self._row(self._single, place).copy() for place in range(count)])
        self._cut(0)
        return rows

    def _context(self, positions: int, sequences: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = positions, 512, 512, sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = self._lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified, params.no_perf = False, True  # each sequence reads its own entries only
        return self._lib.llama_init_from_model(self._model, params)

    def _reach(self, length: int) -> None:
        """A history of that length: cut, loaded or computed."""
        if self._computed < length and self._saved:
            read = ctypes.c_size_t()
            none = (self._lib.llama_token * 1)()
            self._cut(0)
            saved = self._saved.encode()
            if not self._lib.llama_state_seq_load_file(self._single, saved, 0, none, 1, ctypes.byref(read)):
                raise RuntimeError("llama.cpp does not read the history that it saved")
            memory = self._lib.llama_get_memory(self._single)
            self._computed = self._lib.llama_memory_seq_pos_max(memory, 0) + 1
        if self._computed < length and length in self._states:
            self._restore(length)
        token_ids = history(length)
        if self._computed < length:
            places = range(self._computed, length)
            self._run(self._single, token_ids[self._computed :], places, [0] * len(places), wanted=0)
            self._computed = length
            if not self._is_cuttable:
                self._states[length] = self._state()
        if self._computed > length:
            self._cut(length)

    def _cut(self, length: int) -> None:
        """A recurrent state has no earlier one in it: then nothing is left, and `_reach` restores what it kept."""
        self._computed = length if self._is_cuttable else 0
        self._remove(self._single, 0, self._computed)

    def _remove(self, context: Any, sequence: int, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(context), sequence, length, -1):
            raise RuntimeError(f"llama.cpp does not cut a sequence to {length} entries")

    def _state(self) -> Any:
        size = self._lib.llama_state_seq_get_size(self._single, 0)
        data = (ctypes.c_uint8 * size)()
        self._lib.llama_state_seq_get_data(self._single, data, size, 0)
        return data

    def _restore(self, length: int) -> None:
        self._cut(0)
        data = self._states[length]
        if not self._lib.llama_state_seq_set_data(self._single, data, len(data), 0):
            raise RuntimeError("llama.cpp does not read the state that it saved")
        self._computed = length

    def _run(
        self, context: Any, token_ids: Sequence[int], places: Sequence[int], sequences: Sequence[int], *, wanted: int
    ) -> list[int]:
        """The likeliest ids after the last `wanted` tokens; logits are wanted of nothing else."""
        batch, count = self._batch, len(token_ids)
        chosen: list[int] = []
        for first in range(0, count, 512):
            batch.n_tokens = min(512, count - first)
            asked = []
            for row in range(batch.n_tokens):
                place = first + row
                batch.token[row], batch.pos[row] = token_ids[place], places[place]
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequences[place]
                batch.logits[row] = place >= count - wanted
                if batch.logits[row]:
                    asked.append(row)
            if self._lib.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            self._lib.llama_synchronize(context)
            if wanted <= 8:
                chosen += [int(self._row(context, row).argmax()) for row in asked]
        return chosen

    def _row(self, context: Any, row: int) -> Floats:
        return self._np.ctypeslib.as_array(self._lib.llama_get_logits_ith(context, row), (self._vocabulary,))


def llama_cpp() -> Any:
    """The C interface, quiet."""
    lib = importlib.import_module("llama_cpp.llama_cpp")
    _QUIET.append(lib.llama_log_callback(lambda *_: None))
    lib.llama_log_set(_QUIET[0], ctypes.c_void_p(0))
    lib.llama_backend_init()
    return lib


_QUIET: list[Any] = []  # the library calls it as long as it runs


class Quantizer(Contender):
    """No contender: writes the file in another format, by llama.cpp."""

    def __init__(self, threads: int, file: str) -> None:
        self._lib, self._file, self._threads = llama_cpp(), file, threads

    def write(self, kind: str, into: str) -> int:
        params = self._lib.llama_model_quantize_default_params()
        params.ftype = {"Q4_0": self._lib.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": self._lib.LLAMA_FTYPE_MOSTLY_Q8_0}[kind]
        params.allow_requantize, params.nthread = True, self._threads
        if self._lib.llama_model_quantize(self._file.encode(), into.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp does not write {kind}")
        return Path(into).stat().st_size

    def system(self) -> str:
        """What llama.cpp was compiled with and finds here."""
        return str(self._lib.llama_print_system_info().decode())

    def decode(self, length: int, count: int) -> list[float]:
        raise NotImplementedError

    def first_id(self, count: int) -> float:
        raise NotImplementedError


# -- others -----------------------------------------------------------------------------------------------------------


class Transformers(Contender):
    """The weights in float32, transformers' cache, its attention `sdpa`."""

    def __init__(self, threads: int, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch, self._cache_kind = torch, DynamicCache
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def decode(self, length: int, count: int) -> list[float]:
        return self.together(1, length, count)

    def together(self, sessions: int, length: int, count: int) -> list[float]:
        cache = self._cache_kind()
        token_ids = self._run([history(length)] * sessions, cache)
        times = []
        for _ in range(count + 1):
            token_ids = self._run(token_ids, cache)
            times.append(time.perf_counter())
        return steps(times)

    def first_id(self, count: int) -> float:
        cache = self._cache_kind()
        last = self._run([history(PREFIX)], cache)
        began = time.perf_counter()
        self._run([last[0] + history(count)], cache)
        return 1000 * (time.perf_counter() - began)

    def logits(self, token_ids: Sequence[int]) -> Floats:
        found: Floats = self._model(self._torch.tensor([list(token_ids[:-1])])).logits[0].numpy()
        return found

    def _run(self, token_ids: list[list[int]], cache: Any) -> list[list[int]]:
        given = self._torch.tensor(token_ids)
        found = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen: list[list[int]] = found.argmax(-1, keepdim=True).tolist()
        return chosen


class OpenVINO(Contender):
    """OpenVINO GenAI on the same GGUF file, with its own defaults. A prefill has no tokens before it."""

    def __init__(self, threads: int, file: str) -> None:
        self._lib = importlib.import_module("openvino_genai")
        self._tensor = importlib.import_module("openvino").Tensor
        self._pipeline = self._lib.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads)
        self._prefills = 0

    def decode(self, length: int, count: int) -> list[float]:
        return steps(self._times(history(length), 2 + count)[1:])

    def first_id(self, count: int) -> float:
        self._prefills += 1  # it keeps prefixes that it has seen
        token_ids = [token_id + self._prefills for token_id in history(count)]
        began = time.perf_counter()
        return 1000 * (self._times(token_ids, 1)[0] - began)

    def _times(self, token_ids: list[int], count: int) -> list[float]:
        import numpy as np

        times: list[float] = []

        class Stamps(self._lib.StreamerBase):  # type: ignore[misc, name-defined]
            def write(stamps, _: Any) -> Any:  # noqa: N805
                times.append(time.perf_counter())
                return self._lib.StreamingStatus.RUNNING

            def end(stamps) -> None:  # noqa: N805
                pass

        config = self._lib.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        ids = np.array([token_ids], dtype=np.int64)
        given = self._lib.TokenizedInputs(self._tensor(ids), self._tensor(np.ones_like(ids)))
        self._pipeline.generate(given, config, Stamps())
        return times


KINDS: dict[str, type[Contender]] = {
    "ours": Ours,
    "llama": Llama,
    "quantizer": Quantizer,
    "transformers": Transformers,
    "openvino": OpenVINO,
}


def main() -> None:
    contender = KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        ((name, arguments),) = json.loads(line).items()
        answers.write(json.dumps(getattr(contender, name)(**arguments)) + "\n")
        answers.flush()
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
