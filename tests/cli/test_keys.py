"""`kakeya keys`: keys are shown once, the file has digests, and a server takes changes at once."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.server.auth import Key, KeyRing

PLAIN = "a-key-of-an-older-file"


def keys(path: Path, *arguments: str) -> int:
    return main(["keys", arguments[0], f"--api-key-file={path}", *arguments[1:]])


def made(path: Path, owner: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The key that `add` printed, alone."""
    capsys.readouterr()
    assert keys(path, "add", owner) == 0
    return capsys.readouterr().out.strip()


def owner_of(path: Path, key: str) -> str:
    return KeyRing.from_file(str(path)).key_of([("authorization", f"Bearer {key}")]).owner


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "keys"


def test_a_new_key_works_for_its_owner_and_is_stored_nowhere(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (made(path, owner, capsys) for owner in ("alice", "bob"))
    assert re.fullmatch(r"kakeya_[A-Za-z0-9_-]{43}", first)
    assert (owner_of(path, first), owner_of(path, second)) == ("alice", "bob")
    assert first not in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_list_names_owners_and_ids_and_no_key(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = made(path, "alice", capsys)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{PLAIN}\nshort\n")
    assert keys(path, "list") == 0
    shown = capsys.readouterr().out
    assert "alice" in shown and Key.of(key).key_id in shown and Key.of(PLAIN).key_id in shown
    assert "line 4 is ignored" in shown
    assert key not in shown and PLAIN not in shown and "short" not in shown
    (row,) = (line for line in shown.splitlines() if "alice" in line)
    assert row.split("│")[3].strip() == "its digest"


def test_a_key_is_removed_by_its_id_and_all_keys_of_an_owner_by_name(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third, fourth = (made(path, owner, capsys) for owner in ("alice", "alice", "bob", "bob"))
    assert keys(path, "remove", Key.of(first).key_id) == 0
    assert keys(path, "remove", "bob") == 0
    text = path.read_text(encoding="utf-8")
    assert [Key.of(key).digest.hex() in text for key in (first, second, third, fourth)] == [False, True, False, False]


def test_a_server_that_runs_takes_changes_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = made(path, "alice", capsys)
    ring = KeyRing.from_file(str(path))
    second = made(path, "bob", capsys)
    assert ring.key_of([("authorization", f"Bearer {second}")]).owner == "bob"
    assert keys(path, "remove", "alice") == 0
    assert len(ring) == 2, "no call came since"
    assert ring.key_of([("authorization", f"Bearer {second}")]).owner == "bob"
    assert len(ring) == 1
    assert first not in repr(vars(ring))


def test_a_rewritten_file_keeps_its_owner_so_that_a_server_can_still_read_it(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(path, "alice", capsys)
    path.chmod(0o640)
    before, given = path.stat(), []
    # Only root can give a file to another user.
    monkeypatch.setattr(os, "fchown", lambda _file, user, group: given.append((user, group)))
    assert keys(path, "remove", "alice") == 0
    assert given == [(before.st_uid, before.st_gid)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_cannot_keep_its_owner_is_not_changed(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = made(path, "alice", capsys)

    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    assert keys(path, "remove", "alice") == 1
    assert "cannot write the key file" in capsys.readouterr().err
    assert owner_of(path, key) == "alice"


@pytest.mark.parametrize("owner", ["", "two words", "cert:abc", "-dash", "ümlaut", "x" * 65])
def test_an_owner_that_no_line_can_say_is_refused(path: Path, owner: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys(path, "add", "--", owner) == 1
    assert "an owner is" in capsys.readouterr().err
    assert not path.exists()


def test_what_cannot_be_done_changes_nothing_and_says_why(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(path, "alice", capsys)
    before = path.read_bytes()
    assert keys(path, "remove", "unknown") == 1
    assert "no key and no owner 'unknown'" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert keys(path.parent / "none", "list") == 1
    assert f"cannot read the key file {path.parent / 'none'}: No such file or directory\n" in capsys.readouterr().err
    (path.parent / "none").write_bytes(b"\xff\xfe")
    assert keys(path.parent / "none", "list") == 1
    assert "none: it is not UTF-8 text\n" in capsys.readouterr().err
