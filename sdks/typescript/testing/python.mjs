// The interpreter that has the runtime and its tools: KAKEYA_PYTHON, or that of the project's virtual environment.
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
export const PYTHON = process.env["KAKEYA_PYTHON"] ?? `${ROOT}.venv/bin/python`;
