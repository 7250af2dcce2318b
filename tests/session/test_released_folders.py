"""Sessions that a release kept are served by the next versions: a folder of each release, as SQL, is tracked.

python -m tests.session.test_released_folders VERSION    writes that of this version, at its release
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

import apsw
import apsw.shell
import pytest

from inference_engine.session.sqlite_journal import FILE
from inference_engine.types import GenerateParams
from tests.kept import keeping

RELEASED = Path(__file__).parent / "released"
PROMPT = list(range(40))
PARAMS = GenerateParams(max_tokens=8)
APPENDED, GENERATED = b"a" * 16, b"g" * 16
PRAGMAS = ("page_size", "application_id", "user_version")


def talk(folder: Path) -> None:
    """What is in each of them: a session with a label and an owner, an answer, and a fork of it."""
    with keeping(folder) as engine:
        session = engine.create_session(label="talk", owner="alice").session_id
        engine.append(session, PROMPT, owner="alice", request_id=APPENDED)
        list(engine.generate(session, PARAMS, owner="alice", request_id=GENERATED))
        engine.fork_session(session, at_position=44, label="fork", owner="alice")


def continued(folder: Path) -> list[tuple[str, list[int], list[int]]]:
    """Of each session label, history and marks, after the calls were repeated and each gave an answer more."""
    with keeping(folder) as engine:
        ids = {one.label: one.session_id for one in engine.list_sessions(owner="alice")}
        for session in ids.values():
            engine.recall(session, owner="alice")
        assert engine.append(ids["talk"], PROMPT, owner="alice", request_id=APPENDED) == 40, "not done again"
        repeated = engine.generate(ids["talk"], PARAMS, owner="alice", request_id=GENERATED, resume_from=40)
        accepted, *tokens, _ = repeated
        assert getattr(accepted, "is_replayed", False) and len(tokens) == 8
        for session in ids.values():
            list(engine.generate(session, PARAMS, owner="alice"))
        pieces = {label: engine.read_history(session, owner="alice") for label, session in sorted(ids.items())}
        return [(label, piece.token_ids.tolist(), piece.marks.tolist()) for label, piece in pieces.items()]


@pytest.mark.parametrize("path", sorted(RELEASED.iterdir()), ids=lambda path: path.stem)
def test_sessions_of_a_released_version_go_on(path: Path, tmp_path: Path) -> None:
    talk(tmp_path / "now")
    then = tmp_path / "then"
    shutil.copytree(tmp_path / "now", then)
    (then / FILE).unlink()
    db = apsw.Connection(str(then / FILE))
    db.execute(path.read_text(encoding="utf-8"))
    db.close()
    assert continued(then) == continued(tmp_path / "now")


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "state"
        talk(place)
        db = apsw.Connection(str(place / FILE))
        said = io.StringIO()
        apsw.shell.Shell(stdout=said, db=db).process_command(".dump")  # type: ignore[no-untyped-call]
        pragmas = [f"pragma {name}={next(db.execute(f'pragma {name}'))[0]};" for name in PRAGMAS]
        lines = [line for line in said.getvalue().splitlines() if line and not line.startswith("--")]
        (RELEASED / f"{version}.sql").write_text("\n".join((*pragmas, *lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
