"""How many bytes a process may pin: by the machine, its cgroups, and the ranks on it."""

import pytest
import torch

from fusedckpt.checkpointing import host_memory
from fusedckpt.checkpointing.host_memory import HostMemory, pinned_limit

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 100 GiB available, and a process in the cgroup /jobs/a."""
    names = {"MEMINFO": "meminfo", "CGROUP": "cgroup", "CGROUPS": "cgroups"}
    for name, file in names.items():
        monkeypatch.setattr(host_memory, name, tmp_path / file)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n")
    (tmp_path / "cgroup").write_text("1:memory:/old\n0::/jobs/a\n")
    (tmp_path / "cgroups/jobs/a").mkdir(parents=True)
    return tmp_path


def write(folder, most, used, names=("memory.max", "memory.current")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (most, used), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_half_of_the_available_memory(machine, monkeypatch):
    assert pinned_limit() == 50 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert pinned_limit() == 50 * GIB // 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert pinned_limit() == 50 * GIB


@pytest.mark.parametrize("where", ["cgroups/jobs/a", "cgroups/jobs", "cgroups"])
def test_every_cgroup_around_counts(machine, where):
    write(machine / "cgroups/jobs/a", "max", 5 * GIB)
    write(machine / where, 30 * GIB, 10 * GIB)
    assert pinned_limit() == 10 * GIB


def test_cgroups_of_version_1(machine):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(machine / "cgroups/memory", 1 << 63, GIB, names)
    assert pinned_limit() == 50 * GIB
    write(machine / "cgroups/memory", 9 * GIB, GIB, names)
    assert pinned_limit() == 4 * GIB


def test_nothing_is_pinned_where_the_machine_does_not_tell(machine):
    (machine / "meminfo").unlink()
    assert pinned_limit() == 0


def test_pinned_then_pageable_by_powers_of_two():
    class Store(HostMemory):
        def allocate(self, count, dtype, is_pinned):
            pins.append(is_pinned)
            return torch.empty(count, dtype=dtype)

    pins, store = list[bool](), Store()
    store._limit = 2 << 20
    tensor = torch.empty(600 << 10, dtype=torch.uint8)
    copies = [store.empty_like(tensor) for _ in range(3)]
    assert pins == [True, True, False]
    assert (store.pinned, store.pageable) == (2 << 20, 600 << 10)
    del copies[0]
    assert (store.pinned, store.pageable) == (1 << 20, 600 << 10)
    copies.append(store.empty_like(tensor))
    assert pins == [True, True, False, True]
    copies.clear()
    assert (store.pinned, store.pageable) == (0, 0)
