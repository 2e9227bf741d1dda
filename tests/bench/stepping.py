"""Time for the steps of `python -m bench gpu` that passes by what happens, not by the clock."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import processes

SLEEPER = """
import sys, time
print("half", flush=True)
try:
    time.sleep(3600)
except KeyboardInterrupt:
    print("kept")
    sys.exit(130)
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


class Clock:
    """A limit is over once the process has written something, the grace after it soon, or never."""

    def __init__(self, monkeypatch: Any, log: Path, grace_ends: bool):
        self.now, self.log, self.sent = 0.0, log, []
        self.grace_ends, send = grace_ends, processes._send

        def noted(process, number) -> None:
            self.sent.append(number)
            send(process, number)

        monkeypatch.setattr(processes, "_send", noted)
        stand_in = SimpleNamespace(monotonic=self.monotonic, sleep=time.sleep)
        monkeypatch.setattr(processes, "time", stand_in)

    def monotonic(self) -> float:
        if not self.sent and self.log.exists() and self.log.read_text():
            self.now = 1e6
        if self.sent == [signal.SIGINT] and self.grace_ends:
            self.now += processes.GRACE
        return self.now
