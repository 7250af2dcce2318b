"""A few logits that llama.cpp computes of the tiny files, for a test without llama.cpp.

    python -m tests.models.llama_cpp_logits PYTHON

PYTHON is that of an environment with llama-cpp-python 0.3.36, which need not have anything else. It writes
llama_cpp_logits.json beside this file: of each family logits behind the last token.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models.gguf_layouts import MORE_FAMILIES
from tests.models.tiny_folder import PROMPT
from tests.models.tiny_gguf import tiny_model, write_gguf

KEPT = Path(__file__).with_suffix(".json")
EVERY = 37  # of the vocabulary
# What llama.cpp computes otherwise than every model of these families: it rounds the bounds of YaRN.
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
_CHILD = """
import json, sys
from llama_cpp import Llama
ids, every, files = json.loads(sys.argv[1])
found = {}
for name, file in files.items():
    model = Llama(file, n_ctx=64, n_threads=1, logits_all=True, flash_attn=False, type_k=0, type_v=0, verbose=False)
    model.eval(ids)
    found[name] = [float(number) for number in model.scores[len(ids) - 1][::every]]
print(json.dumps(found))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        files = {}
        for number, family in enumerate(MORE_FAMILIES):
            files[family] = f"{work}/{number}.gguf"
            write_gguf(tiny_model(family, **CHANGES.get(family, {})), Path(files[family]))
        asked = json.dumps([PROMPT[0].tolist(), EVERY, files])
        command = [sys.argv[1], "-c", _CHILD, asked]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: [float(f"{number:.6g}") for number in numbers] for name, numbers in json.loads(said).items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
