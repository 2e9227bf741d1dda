"""Live bytes between markers."""

import torch

from fusedckpt.planning import marks
from fusedckpt.planning.marks import Phase, Reading, phases_of

CPU = torch.device("cpu")


def test_peaks_of_phases_on_a_cpu():
    def run(mark):
        mark("enter 0")
        x = torch.empty(1000, dtype=torch.uint8)
        y = torch.empty(5000, dtype=torch.uint8)
        del y
        mark("leave 0")
        del x
        mark("returned")

    found = [phase[:3] for phase in phases_of(run, CPU, 100)]
    assert found == [
        ("begin", 100, 100),
        ("enter 0", 100, 6100),
        ("leave 0", 1100, 1100),
        ("returned", 100, 100),
    ]


def test_peaks_of_phases_on_cuda_are_the_allocators(monkeypatch):
    """As an allocator with 7 bytes of others counts them."""
    state = {"current": 7, "peak": 7}

    def take(change):
        state["current"] += change
        state["peak"] = max(state["peak"], state["current"])

    def stats(_):
        return {f"requested_bytes.all.{name}": x for name, x in state.items()}

    monkeypatch.setattr(marks, "seconds", lambda device: 1.0)
    monkeypatch.setattr(marks, "open_workspaces", lambda device: None)
    monkeypatch.setattr(marks, "allocator_count", lambda: "requested_bytes")
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    reset = {"peak": "current"}
    monkeypatch.setattr(
        torch.cuda,
        "reset_peak_memory_stats",
        lambda _: state.update({x: state[y] for x, y in reset.items()}),
    )

    def run(mark):
        mark("enter 0")
        take(50), take(-40)
        mark("leave 0")

    assert [phase[:3] for phase in phases_of(run, torch.device("cuda"), 100)] == [
        ("begin", 100, 100),
        ("enter 0", 100, 150),
        ("leave 0", 110, 110),
    ]


def test_a_reading_of_units_that_were_not_called():
    names = ["begin", "forward", "enter 1", "leave 1", "returned", "backward", "back 1", "end"]
    phases = [Phase(name, 10 * i, 10 * i + 5, 1.0) for i, name in enumerate(names)]
    reading = Reading(phases, [0, 0, 0])
    assert [reading.begin(i) for i in range(3)] == [20, 20, 40]
    assert (reading.peak("enter", 0), reading.peak("back", 0)) == (20, 0)
    # what comes behind the last unit is one phase
    assert (reading.peak("leave", 1), reading.ms("leave", 1)) == (55, 3.0)
    assert (reading.before, reading.after, reading.base) == (15, 75, 0)
