"""The device that MLX computes on: what it is called, how much memory it gives."""

from __future__ import annotations

import importlib.metadata

import mlx.core as mx

from inference_engine.kv.memory.host import free_host_bytes


def describe() -> str:
    """The device and MLX's version, for people."""
    name = mx.device_info().get("device_name", "")
    return f"mlx {importlib.metadata.version('mlx')} on the {kind()}" + (f", {name}" if name else "")


def kind() -> str:
    """`gpu`, or `cpu` for MLX's build without one."""
    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def runs_metal() -> bool:
    """Can kernels of our own run here? They are in Metal."""
    return bool(mx.metal.is_available()) and kind() == "gpu"


def usable_bytes() -> int:
    """Memory that K/V could take now, in two pieces: on a GPU no more than the system recommends for all."""
    info, limits = mx.device_info(), [free_host_bytes()]
    if "max_recommended_working_set_size" in info:
        limits.append(int(info["max_recommended_working_set_size"]) - mx.get_active_memory())
    if "max_buffer_length" in info:
        limits.append(2 * int(info["max_buffer_length"]))
    return max(0, min(limits))
