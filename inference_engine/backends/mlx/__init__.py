"""The MLX backend: a model as a list of operations, run by Apple's MLX, which nothing outside this folder imports."""

from inference_engine.config import has_mlx


def why_missing() -> str:
    """Why MLX cannot be used, and what to do; "" if it can."""
    if not has_mlx():
        return "the package mlx is not installed; install kakeya-runtime[mlx]"
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:  # a library of the system that it needs
        return f"the package mlx cannot be imported: {error}"
    return ""
