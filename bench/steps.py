"""Commands run one after another as processes: each ends in time, and what became of it is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

__all__ = ["GRACE", "ROOT", "Log", "Step", "Stops", "take"]

ROOT = Path(__file__).resolve().parents[1]
# seconds that a process has to end by itself after an interrupt, before it is killed
GRACE = 15
# how often a process is asked whether it has ended
POLL = 0.05
NOT_STARTED = "not started"
# of these a step is done with; one that a signal killed may have had bad luck
DONE = ("ok", "failed")
OUTCOMES = (*DONE, "killed", "out of time", "interrupted", NOT_STARTED)


class Step(NamedTuple):
    """A command, and the share of the time left that it may take; steps after it take the rest.

    Whoever only reads what other steps left is taken again in every call.
    """

    name: str
    command: tuple[str, ...]
    share: float = 1.0
    only_reads: bool = False


class Stops:
    """Inside, what asks this process to stop is counted, so that it can end its step first."""

    def __init__(self):
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # ignored under nohup, or in the background of a shell, and so it stays
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def wait(self, process: subprocess.Popen[bytes], seconds: float, most: int = 0) -> bool:
        """Wait for a process to end; False after `seconds`, or once more than `most` stops came."""
        end = time.monotonic() + seconds
        while process.poll() is None:
            if self.count > most or time.monotonic() > end:
                return False
            time.sleep(POLL)
        return True


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def take(step: Step, log: Path, seconds: float, stops: Stops) -> tuple[str, int | None]:
    """Run a step, its output going to a file; returns its outcome and exit status.

    When its time is up or a stop is asked for it is interrupted, so that it keeps what it has.
    It is killed GRACE later, or when asked once more.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background jobs ignore interrupts, and so would what they start
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        if stops.wait(process, seconds):
            status = process.returncode
            return ("killed" if status < 0 else "failed" if status else "ok"), status
        _send(process, signal.SIGINT)
        stops.wait(process, GRACE, most=1)
    finally:
        # with what it started and left behind, which would go on using the GPU
        _send(process, signal.SIGKILL)
    # a process inside a driver's call may take its time even now
    stops.wait(process, GRACE, most=2)
    return ("interrupted" if stops.count else "out of time"), process.returncode


class Log:
    """What became of each step, kept in a file that is replaced after every one."""

    def __init__(self, path: Path, key: dict[str, Any], steps: Sequence[Step]):
        self.path, self.key = path, key
        earlier, new = self._read(), {"outcome": NOT_STARTED}
        self.steps = {s.name: new if s.only_reads else earlier.get(s.name, new) for s in steps}
        self._write()

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return what an earlier call kept under this key; a damaged file is set aside."""
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            key, steps = record["key"], dict(record["steps"])
            if not all(facts["outcome"] in OUTCOMES for facts in steps.values()):
                raise ValueError("no outcome")
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            text = f"{self.path} is no record of steps ({error!r}): moved to {aside.name}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return {}
        return steps if key == self.key else {}

    def _write(self) -> None:
        record = {"key": self.key, "steps": self.steps}
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        written.replace(self.path)

    def outcome(self, step: Step) -> str:
        """What became of a step, in this call or an earlier one."""
        return self.steps[step.name]["outcome"]

    def is_done(self, step: Step) -> bool:
        """Whether a step ended by itself, well or not."""
        return self.outcome(step) in DONE

    def note(self, step: Step, outcome: str, **facts: Any) -> None:
        """Keep what became of a step."""
        self.steps[step.name] = {"outcome": outcome, **facts}
        self._write()

    def failed(self) -> list[str]:
        """Return the names of the steps that failed."""
        return [name for name, facts in self.steps.items() if facts["outcome"] == "failed"]

    def left(self) -> list[str]:
        """Return the names of the steps that another call would take."""
        return [name for name, facts in self.steps.items() if facts["outcome"] not in DONE]
