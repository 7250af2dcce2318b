"""The device that MLX computes on: whether there is one, what it is called, how much memory it gives."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from inference_engine.kv.memory.host import free_host_bytes


def why_missing() -> str:
    """Why MLX cannot be used, and what to do; "" if it can."""
    if importlib.util.find_spec("mlx") is None:
        return "the package mlx is not installed; install kakeya-runtime[mlx]"
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:  # a library of the system that it needs
        return f"the package mlx cannot be imported: {error}"
    return ""


def describe() -> str:
    """The device and MLX's version, for people."""
    import mlx.core as mx

    name = mx.device_info().get("device_name", "")
    return f"mlx {importlib.metadata.version('mlx')} on the {kind()}" + (f", {name}" if name else "")


def kind() -> str:
    """`gpu`, or `cpu` for MLX's build without one."""
    import mlx.core as mx

    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def usable_bytes() -> int:
    """Memory that K/V could use now: on a GPU what the system recommends for it, less what is in use."""
    import mlx.core as mx

    free = free_host_bytes()
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is None:
        return free
    return max(0, min(free, int(recommended) - mx.get_active_memory()))


def most_buffer_bytes() -> int | None:
    """The longest piece of memory that the device allocates; None: no such limit."""
    import mlx.core as mx

    found = mx.device_info().get("max_buffer_length")
    return None if found is None else int(found)
