"""Stands for what measures a job, in a process of its own: implementations that do not survive."""

import os
import signal
import time

from bench.jobs import Job, Measurement
from bench.measure import Implementation

CRASHES = {
    "eager": lambda: None,
    "abort": os.abort,
    "leave": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
}


class Crashing(Job):
    def implementations(self):
        return [Implementation(name, CRASHES[name]) for name in self.only]


class Crashes(Measurement):
    def measure(self, job, implementations, begin, found):
        found["is_here"] = True
        for one in implementations:
            if one.failure is None:
                begin(one)
                one.fn()

    def row(self, job, one, found):
        return {"name": one.name, "failure": one.failure}


class CrashesBetween(Crashes):
    def row(self, job, one, found):
        return os.abort() if found else super().row(job, one, found)
