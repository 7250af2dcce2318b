"""Takes a picture of the dashboard in headless Chromium, after checking that the page has really drawn itself.

    python scripts/screenshot_dashboard.py                                 docs/images/dashboard.png, after ten minutes
    python scripts/screenshot_dashboard.py --url http://127.0.0.1:9090     of a server that runs already

Without --url it serves a model on loopback and lets a few agents talk to it through the SDK: each opens a session,
appends what a tool may have said, generates a short answer, thinks, and goes on for some turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pydoc_data.topics
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from inference_engine.cli.serve import ready_target
from inference_engine.config import ModelConfig, child_environment
from inference_engine.models import tokenizer_folder
from kakeya import Client, Full, Gather, KakeyaError, SinkWindow, Strategy
from kakeya.tokenization import load_tokenizer

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "dashboard.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1280, 862  # of a longer page
PAGE_SECONDS, STOP_SECONDS = 60, 60
VIRTUAL_MILLISECONDS = 5000  # of the page's own clock, in which it fetches and draws
CARDS = 8
# A pool small enough that sessions that are not closed are evicted for others.
SERVED = (
    "--bind=127.0.0.1:0",
    "--metrics-bind=127.0.0.1:0",
    "--kv-bytes=1GiB",
    "--session-evictable-seconds=20",
    "--drain-seconds=1",
)
STRATEGIES: tuple[Strategy, ...] = (
    Full(),
    SinkWindow(sink=4, window=256),
    Gather(block=16, sink=16, window=256, budget=608),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="the metrics port of a running server, such as http://127.0.0.1:9090")
    parser.add_argument("--model", default="smollm2-135m", help="what to serve without --url")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long agents talk before the picture")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--dark", action="store_true", help="as browsers that prefer dark pages show it")
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    if arguments.url:
        take(browser, arguments.url, arguments.out, dark=arguments.dark)
    else:
        with served(arguments.model) as (target, url), talking(target, arguments.model, arguments.agents):
            time.sleep(arguments.seconds)
            take(browser, url, arguments.out, dark=arguments.dark)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
    return 0


def take(browser: str, url: str, out: Path, *, dark: bool) -> None:
    """Check the page and write its picture. Raises AssertionError for a page that did not draw itself."""
    page = url.rstrip("/") + "/dashboard"
    drawn = look(browser, page, "--dump-dom", dark=dark)
    charts = len(re.findall(r'<svg viewBox="0 0 560 150"', drawn))
    assert 'data-drawn="' in drawn and charts == CARDS, f"{page} drew {charts} of {CARDS} charts"
    assert "NaN" not in drawn and "undefined" not in drawn, f"{page} shows numbers that are none"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        look(browser, page, f"--screenshot={raw}", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}", dark=dark)
        # A page of few colours: a palette of them is a third of the size.
        with Image.open(raw) as picture:
            picture.convert("RGB").quantize(colors=192, dither=Image.Dither.NONE).save(out, optimize=True)


def look(browser: str, page: str, *flags: str, dark: bool) -> str:
    """Open `page` in the browser, with a profile of its own; what the browser says to standard output."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={VIRTUAL_MILLISECONDS}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # its sandbox refuses to run as root
            *flags,
            page,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PAGE_SECONDS, check=True)
    return done.stdout


@contextmanager
def served(model: str) -> Iterator[tuple[str, str]]:
    """A server of ours: its target, and the address of its metrics port."""
    ours = {name: value for name, value in child_environment().items() if not name.startswith("KAKEYA_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "inference_engine.cli.main", "serve", "--model", model, "--until-eof", *SERVED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=ours,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            target, metrics = ready_target(line), re.search(r"metrics at (\S+)/metrics", line)
            assert target is not None and metrics is not None, f"the server did not start: {line!r}"
            yield target, metrics[1]
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


@contextmanager
def talking(target: str, model: str, agents: int) -> Iterator[None]:
    """Agents at work until the end."""
    tokenizer = load_tokenizer(tokenizer_folder(model, ModelConfig().cache_path))
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)[:40])
    said = list(tokenizer.encode(text, add_special_tokens=False))
    is_over = threading.Event()
    threads = [
        threading.Thread(target=talk, args=(target, said, random.Random(seed), is_over), daemon=True)
        for seed in range(agents)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(STOP_SECONDS)


def talk(target: str, said: Sequence[int], rng: random.Random, is_over: threading.Event) -> None:
    """One agent: session after session, turn after turn, with pauses between them."""
    with Client(target) as client:
        while not is_over.wait(rng.uniform(0, 4)):
            # What the server refuses, and counts, is part of the picture.
            with contextlib.suppress(KakeyaError):
                session = client.create_session(strategy=rng.choice(STRATEGIES), limit_tokens=2048, eos_token_ids=())
                for _ in range(rng.randrange(3, 12)):
                    first = rng.randrange(len(said) - 200)
                    session.append(said[first : first + rng.randrange(20, 120)])
                    session.generate(rng.randrange(8, 48)).result()
                    if is_over.wait(rng.expovariate(1 / 3)):
                        return
                if rng.random() < 0.6:  # others are forgotten, and evicted when room is needed
                    session.close()


if __name__ == "__main__":
    sys.exit(main())
