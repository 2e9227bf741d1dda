"""A command in a process of its own: what kills that process costs one row, not the command.

A segfault cannot be caught. So the process that measures notes in a journal who is at work, and the
one that supervises it starts it again without whoever was at work when it died.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

__all__ = ["INTERRUPTED", "Event", "Journal", "supervise"]

# the exit status of a command that Ctrl-C ended
INTERRUPTED = 130


class Event(NamedTuple):
    """Something that happened: of a job, to whom, with which words.

    kind: "started" a process, "at work" on a job or "crashed" there, "measured" a job, "done" with
    it, which has words if it failed.
    """

    kind: str
    job: str = ""
    who: str = ""
    why: str = ""


class Journal:
    """What happened to a command so far, kept by lines in a file; without a file, nothing."""

    def __init__(self, path: Path | None):
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path and path.exists() else []
        self.events = [Event(*json.loads(line)) for line in lines]

    def note(self, event: Event) -> None:
        """Add an event, unless it is the last one."""
        if self.path is not None and self.events[-1:] != [event]:
            self.events.append(event)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def crash(self, why: str) -> bool:
        """Note that whoever is at work crashed; returns False where nobody is."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "at work":
            self.note(last._replace(kind="crashed", why=f"crashed: {why}"))
        return last is not None and last.kind in ("at work", "crashed")

    @property
    def done(self) -> dict[str, bool]:
        """The jobs that are done, and whether they failed."""
        return {event.job: bool(event.why) for event in self.events if event.kind == "done"}

    def crashes(self, job: str) -> dict[str, str]:
        """Who crashed on a job, and how."""
        found = (event for event in self.events if event.kind == "crashed")
        return {event.who: event.why for event in found if event.job == job}


def _wait(process: subprocess.Popen[Any]) -> int:
    """Wait for a process; Ctrl-C reaches it too, and it keeps what it has before it ends."""

    def stop(*_: Any) -> None:
        process.terminate()
        sys.exit(128 + signal.SIGTERM)

    before, interrupted = signal.signal(signal.SIGTERM, stop), False
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            interrupted = True
    signal.signal(signal.SIGTERM, before)
    return INTERRUPTED if interrupted else process.returncode


def supervise(
    arguments: Sequence[str], worker: Sequence[str] = (sys.executable, "-m", "bench")
) -> int:
    """Run a command that takes --journal, again without whoever crashes it, and return its status.

    That ends: whoever crashed is not at work again. Returns 1 for a crash with nobody at work.
    """
    with TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "journal"
        while True:
            Journal(path).note(Event("started"))
            status = _wait(subprocess.Popen([*worker, *arguments, f"--journal={path}"]))
            if status == INTERRUPTED:
                return status
            journal = Journal(path)
            why = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            if not journal.crash(why):
                if status < 0:
                    print(f"python -m bench: died of {why}, nobody at work", file=sys.stderr)
                return 1 if status < 0 else status
            _, job, who, why = journal.events[-1]
            print(f"{job}: {who} {why}; once more without it", file=sys.stderr)
