"""What admission finds of the models known by name, for the package to bring: a first start of theirs tries nothing.

    python scripts/generate_verdicts.py    writes inference_engine/backends/known_verdicts.json

`tests/backends/test_verdicts.py` tries them again at every change and compares.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from inference_engine.backends.verdicts import BROUGHT, brought_key
from inference_engine.compose import forget_admission, try_out
from inference_engine.config import ModelConfig, configure_threads_environment, resolve
from inference_engine.models import fetch
from inference_engine.models.folder import GGUF

# Those that tests fetch: a verdict that no test tries again would go bad unseen.
NAMES = ("smollm2-135m",)


def tried(gguf: Path) -> dict[str, Any]:
    """The verdicts of a GGUF file by name, found now, whatever any cache has."""
    with tempfile.TemporaryDirectory() as cache:
        config = ModelConfig(model=str(gguf), cache_dir=cache)
        forget_admission(config)
        try_out(config)
        kept = sorted((Path(cache) / "admitted").glob("*.json"))
        return {path.name.split(".")[1]: json.loads(path.read_text(encoding="utf-8"))["verdict"] for path in kept}


def main() -> None:
    configure_threads_environment()
    cache = resolve(ModelConfig).cache_path
    files = [fetch(name, cache) / GGUF for name in NAMES]
    lines = [
        f'"{brought_key(gguf)}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(verdict)}' for name, verdict in tried(gguf).items())
        + "\n}"
        for gguf in files
    ]
    BROUGHT.write_text('{"verdicts": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
