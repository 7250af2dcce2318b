"""Any forward, with what the scripted one has: its steps are counted, and a script receives each."""

from __future__ import annotations

from inference_engine.backends.base import Forward, Step
from laboratory.scripted import Script
from tests.facade import WatchedForward


class CountedForward(WatchedForward):
    """Of the script only `on_step` counts."""

    def __init__(self, forward: Forward, script: Script | None = None) -> None:
        super().__init__(forward, self._count)
        self.script = script or Script()
        self.steps = 0

    def _count(self, _: Step) -> None:
        self.steps += 1
        if self.script.on_step is not None:
            self.script.on_step(self.steps)
