"""Allocations and frees as the profiler and CUDA's allocator tell them."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE

from fusedckpt import allocations
from fusedckpt.allocations import Change, profiled


def test_workspaces_are_there_before_anything_is_counted(monkeypatch):
    """In the thread of the forward and in that of the backward; a CPU has none."""
    with torch.no_grad():
        allocations.open_workspaces(DEVICE)
    called = []
    monkeypatch.setattr(allocations, "open_workspaces", called.append)
    monkeypatch.setattr(allocations, "allocator_history", lambda device: nullcontext([]))
    profiled(lambda: called.append("fn"), "cuda:0")
    profiled(lambda: None)
    assert called == [torch.device("cuda:0"), "fn"]


# a step's memory on CUDA: time, address, block, requested bytes, and whether an op runs meanwhile
STEP = [
    # a block from before
    (1, 90, -512, -500, False),
    (2, 10, 1024, 600, True),
    (3, 20, 512, 8, True),
    # Python drops a tensor
    (4, 10, -1024, -600, False),
    (5, 10, 512, 512, True),
]


class MadeUp:
    """The profiler of a step on a GPU: events without a parent are not in its tree."""

    def __init__(self, **_):
        self.profiler = SimpleNamespace(kineto_results=self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def experimental_event_tree(self):
        def memory(time, address, nbytes):
            fields = SimpleNamespace(ptr=address, alloc_size=nbytes, device=torch.device("cuda:0"))
            named = {"name": "[memory]", "start_time_ns": time, "children": ()}
            return SimpleNamespace(**named, extra_fields=fields)

        inside = [memory(*row[:3]) for row in STEP if row[-1]]
        return [SimpleNamespace(name="aten::op", start_time_ns=0, children=inside)]

    def events(self):
        def event(name, time, nbytes, kind, index):
            values = {"name": name, "start_ns": time, "nbytes": nbytes, "device_index": index}
            values["device_type"] = SimpleNamespace(name=kind)
            return SimpleNamespace(**{key: lambda v=v: v for key, v in values.items()})

        others = [
            event("aten::op", 0, 0, "CPU", -1),
            event("[memory]", 2, 99, "CPU", -1),
            event("[memory]", 3, 77, "CUDA", 1),
        ]
        return others + [event("[memory]", row[0], row[2], "CUDA", 0) for row in reversed(STEP)]


def history(*left_out):
    """Return the allocator's actions in the step, after one from before it."""
    actions = [{"action": "alloc", "addr": 90, "size": 500}]
    for number, (_, address, _, nbytes, _) in enumerate(STEP):
        if number not in left_out:
            kind = "alloc" if nbytes > 0 else "free_requested"
            actions.append({"action": kind, "addr": address, "size": abs(nbytes)})
            actions.append({"action": "free_completed" if nbytes < 0 else "segment_alloc"})
    return actions


EXACT = [
    Change(2, 10, 600),
    Change(3, 20, 8),
    Change(4, 10, -600),
    Change(5, 10, 512),
]
# a block ends when its memory is allocated again
OF_BLOCKS = [
    Change(2, 10, 1024),
    Change(3, 20, 512),
    Change(5, 10, -1024),
    Change(5, 10, 512),
]


@pytest.mark.parametrize(
    ("actions", "changes"),
    [
        (history(), EXACT),
        # not the actions of these events
        (history(3), OF_BLOCKS),
        ([], OF_BLOCKS),
    ],
    ids=["history", "another history", "no history"],
)
def test_frees_between_ops_on_cuda(monkeypatch, actions, changes):
    @contextmanager
    def recorded(device):
        yield actions

    monkeypatch.setattr(allocations, "allocator_history", recorded)
    monkeypatch.setattr(allocations, "open_workspaces", lambda device: None)
    monkeypatch.setattr(torch.profiler, "profile", MadeUp)
    profile = profiled(lambda: None, torch.device("cuda", 0))
    assert profile.changes == changes
    assert [event.name for event in profile.events] == ["aten::op"]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_history_of_the_callers_goes_on():
    def run():
        kept = torch.empty(3, device=DEVICE)
        torch.empty(1000, device=DEVICE)
        return kept

    expected = [change.nbytes for change in profiled(run, DEVICE).changes]
    assert expected == [12, 4000, -4000, -12]
    assert not torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history("all", stacks="python")
    try:
        before = torch.empty(5, device=DEVICE)
        assert [change.nbytes for change in profiled(run, DEVICE).changes] == expected
        assert torch._C._cuda_isHistoryEnabled()
        sizes = [x["size"] for x in torch.cuda.memory._snapshot()["device_traces"][0]]
        assert 4 * before.numel() in sizes
    finally:
        torch.cuda.memory._record_memory_history(None)
