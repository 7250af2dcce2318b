"""What import contracts cannot say: circles of files, the environment, where mlx is, code from data, names of files.

Each rule is a function from one source file to what it finds there, so that the rule itself can be tried on a bad line.
"""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("inference_engine", "kakeya_gateway", "kv_cache_proposer", "laboratory", "sdks/python/src")
OURS = (*SHIPPED, "scripts", "tests", "sdks/python/examples", "sdks/python/tests")
GENERATED = ROOT / "sdks/python/src/kakeya/v1"
# The settings, and in the SDK what gRPC reads of it.
ENVIRONMENT_READERS = (
    ROOT / "inference_engine/config.py",
    *(ROOT / "sdks/python/src/kakeya" / name for name in ("_reach.py", "_served_tokenizer.py")),
)
FACADE = ROOT / "tests/facade.py"

MLX_LINES = 1855  # of the executor, with all operations of a list: another framework's arrays take no more
# Of a package: its rooms, which are the folders and files at its top; its floors, the longest way down; its arrows,
# pairs of rooms of which one imports the other, in functions and for types as well; and its rooms in circles.
ROOMS = {"inference_engine": (19, 11, 94, 0), "inference_engine/kv": (18, 12, 73, 2)}
# Of the runtime: names of files that are there twice, mostly a kernel's and its reference's. The number only falls.
REPEATED_FILES = 14
# Methods of a session's parts, which every mechanism may have to answer. The numbers only fall.
VERBS = {"kv/part.py": ("Part", 11), "kv/parts/layer_part.py": ("LayerPart", 3)}
PRIVATE_PATCHES = 9  # in tests, of private names: lower it with each that goes
# What a session or an engine may lack, and the files that may ask whether it is there: its own, and what composes it.
# Elsewhere it has an object that does nothing.
OPTIONAL = {
    "snapshots": set[str](),
    "draft_memory": {"kv/session_kv.py", "scheduler/speculation.py"},
    "drafter": {"engine/engine.py"},
    "drafting": {"scheduler/speculation.py"},
    "journal": {"engine/engine.py"},
    "latent": {"kv/archives/latent.py", "engine/engine.py", "engine/memory.py"},
    "restorer": set[str](),
    "speculation": set[str](),
    "tier": set[str](),
}
EQUALITY = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)
MECHANISMS = ("kv", "session", "decode", "scheduler", "engine")  # rooms of the engine that know them
PATCHES = {"setattr", "delattr", "setitem", "delitem", "multiple", "dict"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
UNSAFE_FORMATS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Words that say when, for whom or where a file was made instead of what it is. `window` and `cuda` are not among them.
NAME_WORDS = re.compile(
    r"v\d+|phase\d*|milestone\d*|sprint\d*|issue\d*|ticket\d*|pr\d+|new|old|legacy|final|draft\d+|wip|tmp|temp|misc"
    r"|linux|macos|darwin|osx|win32|win64|windows|ubuntu|x86|arm64|laptop|nvidia|[ahb][12]00|m[1-4]"
)

Rule = Callable[[ast.AST, Path], Iterator[str]]


def environment_access(tree: ast.AST, path: Path) -> Iterator[str]:
    """Reads or writes of the process environment outside the settings."""
    if path in ENVIRONMENT_READERS:
        return
    for node in _judged(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            continue
        yield from (f"os.{name} (line {node.lineno})" for name in sorted(names & ENVIRONMENT))


def engine_reached_into(tree: ast.AST, path: Path) -> Iterator[str]:
    """What an engine keeps to itself, used by a test outside the facade."""
    if path == FACADE:
        return
    for node in _judged(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "engine":
            yield f"engine.{node.attr} (line {node.lineno})"


def private_patch(tree: ast.AST, path: Path) -> Iterator[str]:
    """What code of ours keeps to itself, replaced by a test outside the facade."""
    if path == FACADE:
        return
    for node in _judged(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        called = node.func.attr
        if called not in PATCHES and not (called == "object" and ast.unparse(node.func.value).endswith("patch")):
            continue
        names = ast.unparse(node.args[0]).strip("'")
        if called in {"setattr", "delattr", "object"} and not isinstance(node.args[0], ast.Constant):
            names += "." + ast.unparse(node.args[1]).strip("'")
        if any(name.startswith("_") and not name.startswith("__") for name in names.split(".")):
            yield f"{names} (line {node.lineno})"


def mlx_outside_its_place(tree: ast.AST, path: Path) -> Iterator[str]:
    """Imports of mlx in files that neither are named mlx nor lie in a folder of that name."""
    if "mlx" in path.relative_to(ROOT).with_suffix("").parts:
        return
    for name, line in _imports(tree):
        if name.split(".")[0] in {"mlx", "mlx_lm"}:
            yield f"import {name} (line {line})"


def private_part_of_the_sdk(tree: ast.AST, path: Path) -> Iterator[str]:
    """What the SDK keeps to itself, imported by the gateway."""
    if ROOT / "kakeya_gateway" not in path.parents:
        return
    for name, line in _imports(tree):
        if name.startswith(("kakeya._", "kakeya.v1")):
            yield f"import {name} (line {line})"


def code_from_data(tree: ast.AST, path: Path) -> Iterator[str]:
    """Calls by which a file of weights or a string could become running code."""
    del path
    for name, line in _imports(tree):
        if name.split(".")[0] in UNSAFE_FORMATS or name in {"torch.load", "torch.serialization"}:
            yield f"import {name} (line {line})"
    for node in _judged(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            yield f"{node.func.id}() (line {node.lineno})"
        if isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node) == "torch.load":
            yield f"torch.load (line {node.lineno})"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield f"trust_remote_code (line {node.lineno})"


def backend_known_by_class(tree: ast.AST, path: Path) -> Iterator[str]:
    """What a backend can do, asked of its class: its protocol says it, with None where it cannot."""
    del path
    for node in _judged(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "isinstance":
            continue
        if re.search(r"\w+Forward\b", kind := ast.unparse(node.args[1])):
            yield f"isinstance(…, {kind}) (line {node.lineno})"


def optional_mechanism(tree: ast.AST, path: Path) -> Iterator[str]:
    """Branches on whether an optional mechanism is there, outside what is its own."""
    place = path.relative_to(ROOT).as_posix().removeprefix("inference_engine/")
    if place.split("/")[0] not in MECHANISMS:
        return
    for node in _judged(tree):
        for asked in _asked_of(node):
            if any(place not in OPTIONAL.get(name, {place}) for name in _names_of(asked)):
                yield f"{ast.unparse(asked)}, if it is there (line {asked.lineno})"


def _asked_of(node: ast.AST) -> list[ast.expr]:
    """What `node` compares with None, or takes for true or false."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        pairs = [pair for pair, op in zip(pairwise(sides), node.ops, strict=True) if isinstance(op, EQUALITY)]
        return [this for one, other in pairs for this, that in ((one, other), (other, one)) if _is_none(that)]
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.UnaryOp):
        return [node.operand] if isinstance(node.op, ast.Not) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool":
        return node.args
    return node.ifs if isinstance(node, ast.comprehension) else []


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _names_of(node: ast.expr) -> set[str]:
    """The names by which an expression is known: `restorer`, for `(found := self._restorer())`, and `found`."""
    if isinstance(node, ast.NamedExpr):
        return _names_of(node.target) | _names_of(node.value)
    if isinstance(node, ast.Call):
        return _names_of(node.func)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return {name.strip("_")}


RULES: tuple[Rule, ...] = (
    optional_mechanism,
    environment_access,
    engine_reached_into,
    private_patch,
    mlx_outside_its_place,
    private_part_of_the_sdk,
    code_from_data,
    backend_known_by_class,
)


# All that a rule looks at, and what has no parts of these kinds, in which none needs to look.
CONDITIONS = (ast.If, ast.While, ast.IfExp, ast.Assert, ast.BoolOp, ast.UnaryOp, ast.comprehension)
JUDGED = (ast.Attribute, ast.Call, ast.Compare, ast.Import, ast.ImportFrom, ast.keyword, *CONDITIONS)
PARTLESS = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)


@lru_cache(maxsize=1)
def _judged(tree: ast.AST) -> list[ast.AST]:
    """Found once for all rules: finding them takes longer than the rules do."""
    found: list[ast.AST] = []
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, JUDGED):
            found.append(node)
        for part in vars(node).values():
            if isinstance(part, list):
                left += [one for one in part if isinstance(one, ast.AST)]
            elif isinstance(part, ast.AST) and not isinstance(part, PARTLESS):
                left.append(part)
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in _judged(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import themselves through others, inside functions included."""
    return sorted(name for name, found in reached(imports).items() if name in found)


def reached(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What each module imports, itself or through others."""
    all_found: dict[str, set[str]] = {name: set(found) for name, found in imports.items()}
    for middle in imports:
        for found in all_found.values():
            if middle in found:
                found.update(all_found[middle])
    return all_found


def rooms_of(folder: str) -> dict[str, set[str]]:
    """The folders and files at the top of a package, each with those of them that it imports."""
    package = folder.replace("/", ".") + "."
    found: dict[str, set[str]] = {}
    for module, imported in imports_of((folder,)).items():
        if module.startswith(package):  # not the package's own face
            room, *_ = module.removeprefix(package).split(".")
            others = {one.removeprefix(package).split(".")[0] for one in imported if one.startswith(package)}
            found[room] = found.get(room, set()) | (others - {room})
    return found


def floors_of(rooms: Mapping[str, set[str]]) -> int:
    """Rooms on the longest way down; those of one circle share a floor."""
    below = reached(rooms)
    down = {room: {other for other in others if room not in below[other]} for room, others in below.items()}
    floor: dict[str, int] = {}
    while len(floor) < len(down):
        ready = [room for room, others in down.items() if room not in floor and others <= floor.keys()]
        floor |= {room: 1 + max((floor[other] for other in down[room]), default=0) for room in ready}
    return max(floor.values())


def imports_of(folders: tuple[str, ...]) -> dict[str, set[str]]:
    """The modules below `folders`, each with those of them that it imports."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in source_files(folders)}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = _read(path)[1]
        found[name] = {one if one in modules else one.rpartition(".")[0] for one in imported} & modules.keys() - {name}
    return found


def source_files(folders: tuple[str, ...]) -> list[Path]:
    """Every Python file below `folders` that is written by hand."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if GENERATED not in path.parents)


def violations(rule: Rule, folders: tuple[str, ...]) -> list[str]:
    """What `rule` finds below `folders`, one line a finding."""
    return [
        f"{path.relative_to(ROOT)}: {finding}" for path in source_files(folders) for finding in _read(path)[0][rule]
    ]


@cache
def _read(path: Path) -> tuple[dict[Rule, list[str]], set[str]]:
    """What all rules find in a file, and what it imports: reading it takes longer than they do."""
    tree = ast.parse(path.read_bytes(), str(path))
    return {rule: list(rule(tree, path)) for rule in RULES}, {name for name, _ in _imports(tree)}


def test_only_the_settings_touch_the_environment() -> None:
    assert violations(environment_access, OURS) == []


def test_tests_reach_into_an_engine_in_one_place() -> None:
    assert violations(engine_reached_into, ("tests",)) == []


def test_tests_replace_no_more_private_names_than_they_did() -> None:
    found = violations(private_patch, ("tests", "sdks/python/tests"))
    assert len(found) <= PRIVATE_PATCHES, "\n".join(found)


def test_mlx_is_imported_only_where_the_name_says_so() -> None:
    assert violations(mlx_outside_its_place, OURS) == []


def test_the_gateway_is_built_on_public_names_of_the_sdk() -> None:
    assert violations(private_part_of_the_sdk, ("kakeya_gateway",)) == []
    tree = ast.parse("from kakeya._sync import Client")
    assert list(private_part_of_the_sdk(tree, ROOT / "kakeya_gateway/app.py"))


def test_the_executor_on_mlx_stays_small() -> None:
    files = source_files(("inference_engine/backends/mlx",))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MLX_LINES


def test_nothing_we_ship_turns_data_into_code() -> None:
    assert violations(code_from_data, SHIPPED) == []


def test_what_a_backend_can_do_is_not_asked_of_its_class() -> None:
    assert violations(backend_known_by_class, (*SHIPPED, "scripts")) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(imports_of(("inference_engine", "kakeya_gateway", "kv_cache_proposer", "laboratory"))) == []


def test_a_package_has_the_rooms_floors_and_arrows_that_are_written_down() -> None:
    for folder, known in ROOMS.items():
        rooms = rooms_of(folder)
        found = len(rooms), floors_of(rooms), sum(map(len, rooms.values())), len(circles(rooms))
        assert found == known, f"{folder}: {found}; lower the number in ROOMS of what fell, and undo what grew"


def test_rooms_and_floors_are_counted() -> None:
    kernels = rooms_of("inference_engine/kernels")
    assert {"triton", "attention"} <= kernels.keys()
    assert "attention" in kernels["prefill_attention"]
    assert floors_of({"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3
    assert floors_of({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2


def test_two_circles_are_two_floors() -> None:
    upper, lower = {"a": {"b"}, "b": {"a"}}, {"c": {"d"}, "d": {"c"}}
    assert floors_of(upper | lower) == 1
    assert floors_of(upper | lower | {"b": {"a", "c"}}) == 2
    assert floors_of(upper | lower | {"b": {"a", "between"}, "between": {"c"}}) == 3


def test_whether_an_optional_mechanism_is_there_is_asked_in_its_own_place() -> None:
    assert violations(optional_mechanism, ("inference_engine",)) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def test_the_name_of_a_class_is_there_once() -> None:
    """So that a search for it finds it."""
    found: dict[str, set[Path]] = {}
    files: Counter[str] = Counter()
    for path in source_files(("inference_engine", "kv_cache_proposer")):
        files[path.name] += path.name != "__init__.py"
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(path)
    assert [name for name, paths in found.items() if len(paths) > 1] == []
    repeated = [name for name, count in files.items() if count > 1]
    assert len(repeated) <= REPEATED_FILES, ", ".join(sorted(repeated))


def test_a_mechanism_is_asked_few_things() -> None:
    for path, (name, count) in VERBS.items():
        body = ast.parse((ROOT / "inference_engine" / path).read_bytes()).body
        own = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        asked = [node.name for node in own if isinstance(node, ast.FunctionDef)]
        assert len(asked) == count, f"{name}: {asked}; lower the number in VERBS, or ask in fewer words"


def test_a_clone_stays_small() -> None:
    """Bytes of the tracked files: all of them, and the records. Larger checkpoints and single measurements stay out."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if (ROOT / name).is_file()}
    assert sum(sizes.values()) <= 20_000_000
    assert sum(size for name, size in sizes.items() if name.startswith("results/")) <= 3_000_000


def test_no_file_is_named_after_a_version_a_phase_a_ticket_or_a_platform() -> None:
    folders = [ROOT / name for name in (*OURS, "docs", "results", "sdks/typescript/src")]
    paths = (path.relative_to(ROOT) for folder in folders for path in folder.rglob("*") if path.suffix != ".pyc")
    named = (path for path in paths if "node_modules" not in path.parts and not _is_wire_package(path))
    # A record of a decision is numbered, and a record of a measurement may hold its machine: inside, not in its name.
    words = ((path, re.split(r"[_\-.]+", path.stem.lower())) for path in named if path.parts[:2] != ("docs", "adr"))
    assert [str(path) for path, parts in words if any(NAME_WORDS.fullmatch(word) for word in parts)] == []


def _is_wire_package(path: Path) -> bool:
    return "kakeya/v1" in path.as_posix()


FORBIDDEN: list[tuple[Rule, str]] = [
    (environment_access, "import os; os.environ['HOME']"),
    (environment_access, "from os import getenv"),
    (engine_reached_into, "session = engine._store.find(session_id, owner)"),
    (private_patch, "monkeypatch.setattr(Leaves, '_new', None)"),
    (private_patch, "monkeypatch.setattr('kakeya._append.INQUIRY_SECONDS', 0.3)"),
    (private_patch, "patch.object(engine._scheduler, 'submit')"),
    (private_patch, "mock.patch.object(hibernation, '_read_seconds', 1)"),
    (private_patch, "monkeypatch.setitem(calls._CALLS, 'full', Full)"),
    (optional_mechanism, "if self._tier is None: pass"),
    (optional_mechanism, "found = kv.draft_memory is not None"),
    (optional_mechanism, "needs_taps = self._drafting is not None and self._drafting.needs_taps(request)"),
    (optional_mechanism, "StreamNotifier(None if self._journal is None else self._journal.on_saved)"),
    (optional_mechanism, "if (restorer := self.restorer()) is not None and restorer.is_calibrated: pass"),
    (optional_mechanism, "return '' if self.restorer() is None else LATENT"),
    (optional_mechanism, "if plan.restorer is not None and not plan.restorer.replays: pass"),
    (optional_mechanism, "return self.segment if self.tier is None else self.tier.step"),
    (optional_mechanism, "chosen = layout.spare or context.latent is not None"),
    (optional_mechanism, "if self._tier: pass"),
    (optional_mechanism, "step = self.tier.step if self.tier else self.segment"),
    (optional_mechanism, "if is_decoding and not self._speculation: pass"),
    (optional_mechanism, "memory = kv.draft_memory or NoMemory()"),
    (optional_mechanism, "kept = [each for each in sets if self.restorer()]"),
    (optional_mechanism, "if snapshots := self._snapshots: pass"),
    (optional_mechanism, "if bool(self._journal): pass"),
    (optional_mechanism, "if None is not self._journal: pass"),
    (optional_mechanism, "if self._tier == None: pass"),
    (mlx_outside_its_place, "import mlx.core as mx"),
    (mlx_outside_its_place, "from mlx_lm import load"),
    (code_from_data, "import pickle"),
    (code_from_data, "import torch; torch.load('weights.bin')"),
    (code_from_data, "from torch import load"),
    (code_from_data, "eval(text)"),
    (code_from_data, "AutoModel.from_pretrained(path, trust_remote_code=True)"),
    (backend_known_by_class, "isinstance(target.forward, TorchForward)"),
    (backend_known_by_class, "isinstance(forward, torch_forward.TorchForward | NativeForward)"),
]


def test_a_rule_finds_what_it_forbids(subtests: pytest.Subtests) -> None:
    for rule, line in FORBIDDEN:
        with subtests.test(str(line)):
            assert list(rule(ast.parse(line), ROOT / "inference_engine/scheduler/loop.py"))


HARMLESS: list[tuple[Rule, str]] = [
    (environment_access, "import os; os.replace(a, b)"),
    (engine_reached_into, "engine.session_info(session_id)"),
    (optional_mechanism, "if drafter is None: pass"),  # where an engine is composed
    (optional_mechanism, "if latent is None: pass"),
    (optional_mechanism, "if limit is None: pass"),
    (optional_mechanism, "if self._journal.keeps and not self.snapshots.poll(): pass"),
    (optional_mechanism, "if strategy.restorer() == other.restorer(): pass"),
    (private_patch, "monkeypatch.setattr(fidelity, 'measure', measured)"),
    (private_patch, "monkeypatch.setattr(Client, '__init__', refused)"),
    (private_patch, "object.__setattr__(self, '_total', 3)"),
    (code_from_data, "model.eval()"),
    (code_from_data, "AutoModel.from_pretrained(path, trust_remote_code=False)"),
    (backend_known_by_class, "isinstance(launched, Tensor)"),
]


def test_a_rule_lets_the_harmless_pass(subtests: pytest.Subtests) -> None:
    for rule, line in HARMLESS:
        with subtests.test(str(line)):
            assert not list(rule(ast.parse(line), ROOT / "inference_engine/engine/engine.py"))
