"""How commands begin and end: streams that are closed or unread, no home, no place to write, every signal.

A command never ends with a traceback for any of it: it does its work, or says in one line what is missing.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from subprocess import PIPE
from threading import Thread, active_count
from unittest.mock import Mock, patch

import pytest

import kakeya as sdk
from inference_engine.cli import keys, process
from inference_engine.cli.main import main
from inference_engine.compose import try_out
from inference_engine.config import NO_CACHE, ModelConfig, child_environment
from inference_engine.server.watchdog import EXIT_JOURNAL
from tests.cli.conditions import CONDITIONS, STAGES, without_a_home
from tests.further import further, further_test
from tests.models.tiny_folder import write_tiny_gguf
from tests.processes import LIMIT_SECONDS, Process, ending, run, started

CONDITIONED = str(Path(__file__).with_name("conditions.py"))
# A command that has begun something. Where a shell runs the tests in the background, SIGINT is ignored.
COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from inference_engine.cli import process
def command():
    with open(sys.argv[1], "w") as file:
        try:
            print("begun", flush=True)
            time.sleep(float(sys.argv[2]))
            sys.stdin.read()
            print("wrong", file=sys.stderr)
        finally:
            file.write(str(file.fileno()))
    return 0
sys.exit(process.run(command))
"""


@pytest.mark.parametrize("count", [further(0), further(1), further(2), 3])
def test_no_file_takes_the_place_of_a_standard_stream_that_is_closed(
    count: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for numbers in combinations(range(3), count):
        with subtests.test(str(numbers)):
            closing = " ".join(f"{number}>&-" for number in numbers)
            shell = ("sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", COMMAND, tmp_path / "file", "0")
            done = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            assert done.returncode == 0
            assert done.stdout == ("" if 1 in numbers else "begun\n")
            assert done.stderr == ("" if 2 in numbers else "wrong\n")
            assert int((tmp_path / "file").read_text()) > 2


@pytest.mark.parametrize(
    ("sent", "is_ignored", "status"),
    [
        (signal.SIGINT, False, process.INTERRUPTED),
        further(signal.SIGTERM, False, -signal.SIGTERM),
        further(signal.SIGHUP, False, -signal.SIGHUP),
        (signal.SIGHUP, True, 0),
    ],
)
def test_a_signal_ends_what_a_command_began(
    sent: signal.Signals, is_ignored: bool, status: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "file"), "0" if is_ignored else str(LIMIT_SECONDS)]
    if is_ignored:
        words = ["nohup", *words]
    with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as it:
        assert it.stdout is not None and it.stdout.readline() == "begun\n"
        it.send_signal(sent)
        _, said = it.communicate(timeout=LIMIT_SECONDS)
        assert it.returncode == status
    assert said == ("wrong\n" if is_ignored else "")
    assert (tmp_path / "file").read_text()


def test_a_signal_whose_exception_is_lost_ends_the_command_that_was_asked_for(tmp_path: Path) -> None:
    """Python loses one that comes while it compiles a module."""
    script = f"""
import os, signal, sys
from contextlib import suppress
from inference_engine import config
from inference_engine.cli.main import main
def quiet():
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
    print("lost", flush=True)
config.quiet_grpc = quiet
sys.argv = ["kakeya", "keys", "add", "bob", "--api-key-file", {str(tmp_path / "keys")!r}]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "lost\n")
    assert not (tmp_path / "keys").exists()


NOT_GIVEN = (
    (RuntimeError("can't start new thread"), "no more threads can be started: raise the limit (ulimit -u"),
    (OSError(errno.EMFILE, "Too many open files", "/dev/null"), "raise the limit (ulimit -n)"),
    (ImportError("libtorch.so: failed to map segment from shared object", path="/lib/libtorch.so"), "(ulimit -v"),
    (ImportError("libgomp.so.1: cannot open shared object file", path="/lib/_C.so"), "libgomp.so.1: cannot open"),
    (MemoryError(), "not enough memory"),
)


def test_what_the_system_does_not_give_is_one_sentence_and_our_mistakes_are_not(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for error, said in NOT_GIVEN:
        with subtests.test(repr(error)), patch.object(keys, "run_list", side_effect=error):
            assert main(["keys", "list", "--api-key-file", "keys"]) == 1
            printed = capsys.readouterr().err
            assert printed.startswith("kakeya keys: ") and said in printed and printed.count("\n") == 1
    for ours in (RuntimeError("what we did"), ImportError("cannot import name 'that' from 'inference_engine'")):
        failing = patch.object(keys, "run_list", side_effect=ours)
        with subtests.test(repr(ours)), failing, pytest.raises(type(ours)):
            main(["keys", "list", "--api-key-file", "keys"])


def test_what_an_error_number_means_depends_on_who_has_it(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    def starts() -> None:
        with patch("subprocess._fork_exec", side_effect=lambda *_: another()):
            subprocess.run(["true"], check=False)

    def another() -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    cases = (
        (starts, "(ulimit -u", True),
        (another, "(ulimit -u", False),
        # Not of standard output without a reader, at which a command ends and says nothing.
        (Mock(side_effect=OSError(errno.EIO, "Input/output error")), "kakeya keys: Input/output error", True),
        (Mock(side_effect=OSError(errno.EPIPE, "Broken pipe")), "kakeya keys: Broken pipe", True),
        (Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")), "keys: No space left on device", True),
    )
    for fails, said, is_said in cases:
        with subtests.test(said), patch.object(keys, "run_list", side_effect=lambda _, fails=fails: fails()):
            assert main(["keys", "list", "--api-key-file", "keys"]) == 1
            printed = capsys.readouterr().err
            assert (said in printed) == is_said and printed.count("\n") == 1


WRITING = """
import errno, os, sys
from inference_engine.cli import process
def command():
    if sys.argv[1] == "another's":
        print("begun", end="")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    print("x" * 300_000)
    return 0
sys.exit(process.run(command))
"""


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ("full", "kakeya: standard output cannot be written: No space left on device\n"),
        (
            "not read",
            "kakeya: standard output cannot be written: it is full, and set not to wait for its reader; write",
        ),
        ("another's", "kakeya: No space left on device\n"),
    ],
)
def test_the_error_of_standard_output_is_not_that_of_another_file(whose: str, said: str) -> None:
    """Nothing is written to find out."""
    words = (sys.executable, "-c", WRITING, whose)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(reading), os.fdopen(writing, "wb") as pipe, Path("/dev/full").open("wb") as full:
        to = {"full": full.fileno(), "not read": pipe.fileno(), "another's": PIPE}[whose]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=to, stderr=PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "begun" if whose == "another's" else None)
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize("is_buffered", [True, False])
def test_output_that_is_asked_for_unbuffered_is(is_buffered: bool) -> None:
    """As in our image, whose logs are read while it runs."""
    ends = "import os\nfrom inference_engine.cli import process\nprocess.run(lambda: print('said') or os._exit(0))"
    environment = child_environment(PYTHONUNBUFFERED="" if is_buffered else "1")
    done = subprocess.run((sys.executable, "-c", ends), stdout=PIPE, env=environment, text=True, check=False)
    assert done.stdout == ("" if is_buffered else "said\n")


def test_a_server_that_gets_no_threads_says_so_before_libraries_end_it(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, most = Thread.start, active_count() + 10

    def limited(self: Thread) -> None:
        if active_count() >= most:
            raise RuntimeError("can't start new thread")
        start(self)

    with patch.object(Thread, "start", limited):
        assert main(["serve", "--model", str(tiny_folder), "--bind=127.0.0.1:0"]) == 1
    assert "kakeya serve: no more threads can be started" in capsys.readouterr().err
    assert active_count() < most


# Those that need no server and no more of a model than its folder.
PRINTING = (
    ("serve", "--help"),
    ("models", "list", "--cache-dir={folder}"),
    ("models", "show", "{model}", "--cache-dir={folder}"),
)
READER_LEFT = (1, process.READER_LEFT)  # rich, which prints tables, ends with 1


@pytest.mark.parametrize("condition", [further("output unread"), further("both unread"), "output full"])
def test_a_command_whose_output_cannot_be_written_ends_as_others_do(
    condition: str, tiny_folder: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for command in PRINTING:
        with subtests.test(" ".join(command)):
            words = (word.format(model=tiny_folder, folder=tmp_path) for word in command)
            done = run(CONDITIONED, condition, *words)
            if condition == "output full":
                assert done.returncode == 1
                assert done.stderr.count("\n") == 1
                assert "standard output cannot be written: No space left on device" in done.stderr
            else:
                assert done.returncode in READER_LEFT
                assert done.stderr == ""


def test_a_key_that_cannot_be_printed_is_not_added(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for condition, reason in (("output unread", "Broken pipe"), ("output full", "No space left on device")):
        with subtests.test(condition):
            done = run(CONDITIONED, condition, "keys", "add", "bob", "--api-key-file", str(tmp_path / "keys"))
            assert done.returncode == 1
            assert done.stderr == f"kakeya keys: the key cannot be printed ({reason}), so it is not added\n"
            assert not (tmp_path / "keys").exists()


HOMELESS = "HOME is not set and this user has no home folder"
CACHELESS = f"there is no cache folder, because {HOMELESS}; name one with --cache-dir"
WITHOUT_A_HOME = (
    ("models list", CACHELESS),
    ("models fetch smollm2-135m", CACHELESS),
    ("models show smollm2-135m", CACHELESS),
    ("models fetch org/name", "name one with HF_HOME, and one for what is made of them with --cache-dir"),
    ("serve", CACHELESS),
    ("run smollm2-135m", CACHELESS),
    ("serve --model org/name", "name one with HF_HOME, and one for what is made of them with --cache-dir"),
    ("serve --model ~/model", f"~/model: {HOMELESS}; write the path in full"),
    ("serve --model {model} --state-dir ~/state --kv-bytes=64MiB --bind=127.0.0.1:0", "~/state: HOME is not set"),
    ("serve --model {model} --state-dir ~/state --kv-bytes=64MiB --bind=127.0.0.1:0", "~/state: HOME is not set"),
    ("serve --model {model} --api-key-file ~/keys --kv-bytes=64MiB --bind=127.0.0.1:0", "~/keys: HOME is not set"),
    ("demo", CACHELESS),
    ("doctor --bind=127.0.0.1:0", CACHELESS),
    ("keys list --api-key-file ~/keys", "~/keys: HOME is not set"),
    ("journal list ~/state", "~/state: HOME is not set"),
    ("sessions list --tls-ca-file ~/ca.pem", "~/ca.pem: HOME is not set"),
    ("train latent --quick --model {model}", CACHELESS),
    ("train components --model {model}", CACHELESS),
    ("train corpus --model {model}", CACHELESS),
    ("evaluate fidelity --strategies full --backend native", CACHELESS),
)


@further_test
def test_without_a_home_folder_a_command_says_what_to_name_instead(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    with without_a_home():
        for command, said in WITHOUT_A_HOME:
            with subtests.test(command):
                status = main(command.format(model=tiny_folder).split())
                printed = capsys.readouterr()
                assert status == 1
                assert said in printed.err + printed.out
                assert "Traceback" not in printed.err
        assert main(["models", "show", str(tiny_folder)]) == 0
        # What a GGUF file has to have made of it says so, too.
        write_tiny_gguf(file := tmp_path / "tiny.gguf")
        for command, status in (("demo --model", 1), ("chat --model", 1), ("run", 1), ("models show", 0)):
            with subtests.test(command):
                assert main([*command.split(), str(file)]) == status
                printed = capsys.readouterr()
                said = re.sub(r"[\s│]+", " ", printed.err + printed.out)
                assert CACHELESS in said
                assert "no-cache" not in said


def test_a_home_folder_of_another_user_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HOME=/root in a container that runs as a number. Root can enter any folder, so the refusal is made here."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/other/.cache")
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert ModelConfig().cache_path == NO_CACHE
    assert main(["models", "list"]) == main(["models", "list", "--cache-dir", "/home/other/models"]) == 1
    own, named = capsys.readouterr().err.splitlines()
    assert own.endswith("/home/other/.cache/kakeya cannot be read (Permission denied); name one with --cache-dir")
    assert named.endswith("cache_dir /home/other/models cannot be read (Permission denied); name another folder")


@contextmanager
def serving(condition: str, folder: Path, *more: str) -> Iterator[tuple[Process, sdk.Client, Path]]:
    """A server in this condition, ready, whose ready line may not be readable; and its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    words = ("serve", "--model", str(folder), "--kv-bytes=64MiB", "--bind", target, *more)
    log = folder.parent / "log"
    with (
        log.open("w", encoding="utf-8") as errors,
        ending(started(CONDITIONED, condition, *words, stderr=errors)) as process,
        sdk.Client(target) as client,
    ):
        while process.poll() is None:
            with suppress(sdk.ConnectionFailed):
                client.server_info()
                break
        yield process, client, log


SERVED = sorted({*CONDITIONS} - {"folder gone"})
LESS_OFTEN = {*SERVED} - {"no home"}


@pytest.mark.parametrize("condition", [further(each) if each in LESS_OFTEN else each for each in SERVED])
def test_a_model_given_by_its_path_is_served_in_every_other_condition(condition: str, tiny_folder: Path) -> None:
    if condition == "no temporary folder":  # through which the first start of a model reads it
        try_out(ModelConfig(model=str(tiny_folder)))
    with serving(condition, tiny_folder) as (process, client, log):
        if condition == "nohup":
            process.send_signal(signal.SIGHUP)
        with client.create_session() as session:
            session.append([1, 2, 3])
            assert len(session.generate(3).result().token_ids) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) == 0
        said = log.read_text(encoding="utf-8")
        assert "Traceback" not in said
        assert ("name a folder with --cache-dir" in said) == (condition == "no home")
        assert ("the ready line cannot be written" in said) == (condition in {"output unread", "output full"})


def starts() -> Iterator[object]:
    for stage in STAGES:
        for sent in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            is_first = (stage, sent) in (("the journal is opened", signal.SIGTERM), ("ports are bound", signal.SIGHUP))
            yield (stage, sent) if is_first else further(stage, sent)


@pytest.mark.parametrize(("stage", "sent"), [*starts()])
def test_a_signal_that_comes_while_a_server_starts_ends_it_and_leaves_nothing(
    stage: str, sent: signal.Signals, tiny_folder: Path, tmp_path: Path
) -> None:
    words = ("serve", "--model", str(tiny_folder), "--bind=127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    done = run(CONDITIONED, f"{sent.name} when {stage}", *words, "--kv-bytes=64MiB")
    serves = stage == "ports are bound"  # then it drains
    assert done.returncode == (0 if serves else process.INTERRUPTED if sent == signal.SIGINT else -sent)
    assert "Traceback" not in done.stderr
    assert ("draining for at most" in done.stderr) == serves
    assert main(["journal", "check", str(tmp_path / "state")]) == 0 or not (tmp_path / "state").exists()


def test_a_state_folder_that_becomes_read_only_ends_the_server_by_name_and_loses_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    words = ("--state-dir", str(tmp_path / "state"), "--hibernate=always", "--hibernate-after-seconds=0")
    with serving("read-only later", tiny_folder, *words) as (server, client, log):
        session = client.create_session()
        session.append([1, 2, 3])
        generated = session.generate(3).result().token_ids
        server.send_signal(signal.SIGUSR1)
        with pytest.raises(sdk.KakeyaError):
            session.append([4])
        assert server.wait(LIMIT_SECONDS) == EXIT_JOURNAL
        said = log.read_text(encoding="utf-8")
        assert "sessions cannot be kept any more: " in said and "Read-only file system" in said
        assert "Traceback" not in said
    with serving("as usual", tiny_folder, *words) as (_, client, _):
        pieces = client.session(session.id).history()
        assert [at for piece in pieces for at in piece.token_ids] == [1, 2, 3, *generated]
