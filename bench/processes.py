"""Work in a process of its own, which ends in time, even where the work crashes or hangs.

When its time is up, or this process is asked to stop, it is interrupted, so that it keeps its
results, and killed GRACE seconds later, or when asked once more.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# seconds that a process has to end by itself after an interrupt, before it is killed
GRACE = 15
# how often a process is asked whether it has ended
POLL = 0.05
# forked from a process that has imported torch and done nothing with it: no driver is open yet
_CONTEXT = multiprocessing.get_context("forkserver")


class Stops:
    """Inside, signals to stop this process are counted, so that it can end its work first."""

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


def _idle() -> bool:
    time.sleep(POLL)
    return False


def _wait(
    poll: Callable[[], int | None],
    hear: Callable[[], bool],
    seconds: float,
    stops: Stops,
    most: int,
) -> bool:
    """Wait for an end; False after `seconds` of silence, or once more than `most` stops came."""
    end = time.monotonic() + seconds
    while poll() is None:
        if hear():
            end = time.monotonic() + seconds
        if stops.count > most or time.monotonic() > end:
            return False
    return True


def _attend(
    group: int,
    poll: Callable[[], int | None],
    seconds: float,
    stops: Stops,
    hear: Callable[[], bool] = _idle,
) -> str:
    """Wait for a process, and end it; returns "ended", "out of time" or "interrupted"."""
    try:
        if _wait(poll, hear, seconds, stops, most=0):
            return "ended"
        _send(group, signal.SIGINT)
        _wait(poll, hear, GRACE, stops, most=1)
    finally:
        # with the processes that it started and left behind, which would go on using the GPU
        _send(group, signal.SIGKILL)
    # a process inside a driver's call may take its time even now
    _wait(poll, hear, GRACE, stops, most=2)
    return "interrupted" if stops.count else "out of time"


def _send(group: int, number: int) -> None:
    """Signal a process that leads a session, and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def take(command: Sequence[str], log: Path, seconds: float, stops: Stops) -> tuple[str, int | None]:
    """Run a command, its output going to a file; returns its outcome and exit status."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a shell's background jobs ignore interrupts, and so would their children
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    outcome = _attend(process.pid, process.poll, seconds, stops)
    status = process.returncode
    if outcome == "ended":
        outcome = "killed" if status < 0 else "failed" if status else "ok"
    return outcome, status


def isolated(
    work: Callable[..., None],
    args: tuple[Any, ...],
    hear: Callable[..., None],
    seconds: float,
    stops: Stops,
) -> str:
    """Run work(say, *args); its messages go to `hear`. Returns how it ended, in words.

    seconds: that it may be silent; beyond them it is out of time.
    """
    # modules that each process would take seconds to import
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "bench.run", "bench.capacity"])
    here, there = _CONTEXT.Pipe(duplex=False)
    process: Any = _CONTEXT.Process(target=_begin, args=(there, work, args))
    process.start()
    there.close()

    def listen() -> bool:
        with suppress(EOFError):
            if here.poll(POLL):
                hear(*here.recv())
                return True
        return _idle()

    outcome = _attend(process.pid, lambda: process.exitcode, seconds, stops, hear=listen)
    # its last messages
    while here.poll() and listen():
        pass
    here.close()
    if outcome != "ended":
        return outcome if stops.count else f"{outcome} after {seconds:g} s"
    status = process.exitcode
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _begin(there: Any, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run in a session of its own, where a terminal's Ctrl-C comes from the waiting process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        work(lambda *said: there.send(said), *args)
