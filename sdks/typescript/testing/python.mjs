// The interpreter that has the runtime and its tools: KAKEYA_PYTHON, or that of the project's virtual environment.
import { delimiter } from "node:path";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
export const PYTHON = process.env["KAKEYA_PYTHON"] ?? `${ROOT}.venv/bin/python`;

// What it imports is this checkout, wherever the interpreter was installed for; all processes that are started inherit it.
process.env["PYTHONPATH"] = [ROOT, `${ROOT}sdks/python/src`].join(delimiter);
