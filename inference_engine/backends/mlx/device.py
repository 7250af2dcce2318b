"""The device that MLX computes on: what it is called, how much memory it gives, how much of it is held."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import threading
import weakref

import mlx.core as mx
import numpy as np

from inference_engine.kv.memory.host import free_host_bytes

MOST_CACHED_BYTES = 2**29  # what the steps of a large model take anew


def describe() -> str:
    """The device, MLX's version and that of the system, whose part the compiler of Metal is."""
    name, system = str(mx.device_info().get("device_name", "")), platform.mac_ver()[0]
    known = f"mlx {importlib.metadata.version('mlx')} on the {kind()}", name, system and f"macOS {system}"
    return ", ".join(filter(None, known))


def kind() -> str:
    """`gpu`, or `cpu` for MLX's build without one."""
    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def usable_bytes() -> int:
    """Memory that K/V could take now, in two pieces: on a GPU no more than the system recommends for all."""
    info, limits = mx.device_info(), [free_host_bytes()]
    if "max_recommended_working_set_size" in info:
        limits.append(int(info["max_recommended_working_set_size"]) - mx.get_active_memory())
    if "max_buffer_length" in info:
        limits.append(2 * int(info["max_buffer_length"]))
    return max(0, min(limits))


def multiplies_in_full() -> bool:
    """Does MLX multiply float32 as float32? In TF32 the error is a thousand times what it may be."""
    one, other = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float32)
    found = np.array(mx.matmul(mx.array(one), mx.array(other)))
    return bool(np.abs(found - one.astype(np.float64) @ other).max() < 1e-4)


class Limits:
    """Of memory on a GPU, while one of these is there: set for the first, as they were when the last one has gone.

    By default MLX keeps freed buffers until they fill the device's memory, and those of a growing history fit no
    later step. And the system is to keep as much of ours resident as it recommends.
    """

    there = 0
    before = contextlib.ExitStack()  # what sets them as they were
    turn = threading.RLock()  # collecting garbage may let one go while its thread makes another

    def __init__(self) -> None:
        if kind() != "gpu":
            return
        with Limits.turn:
            Limits.there += 1
            weakref.finalize(self, self._gone).atexit = False  # also of one that could not be made
            if Limits.there > 1:
                return
            Limits.before.callback(mx.set_cache_limit, cached := mx.set_cache_limit(MOST_CACHED_BYTES))
            if cached < MOST_CACHED_BYTES:  # what embeds us wants fewer
                mx.set_cache_limit(cached)
            if resident := mx.device_info().get("max_recommended_working_set_size"):
                Limits.before.callback(mx.set_wired_limit, mx.set_wired_limit(int(resident)))

    @classmethod
    def _gone(cls) -> None:
        with cls.turn:
            cls.there -= 1
            if not cls.there:
                cls.before.close()
