"""`python -m bench run --resume`, and interrupts: nothing that was measured is lost."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the bench extra")

from running import bench, rows_of

from bench import clock, measure, peers, run
from bench.measure import Implementation

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")


@pytest.fixture
def at_commit(monkeypatch):
    return lambda name: monkeypatch.setattr("bench.env.commit", lambda: name)


@pytest.fixture
def measured(monkeypatch):
    """The jobs that are measured, in order."""
    found, before = [], run.Run.measure
    monkeypatch.setattr(
        run.Run,
        "measure",
        lambda self, job, *args: (found.append(job.name), before(self, job, *args)),
    )
    return found


def test_resuming_measures_who_was_not(tmp_path, at_commit, measured, add_way, monkeypatch, capsys):
    at_commit("one")
    bench(tmp_path, "--case=rms_norm", "--only=checkpoint")
    _, result = bench(tmp_path, "--case=rms_norm", "--resume")
    assert rows_of(result, "rms_norm")["fusedckpt"]["both_ms"]
    assert measured == ["rms_norm"] * 2
    # of some of those who were measured nothing is left, nor of who failed for good
    capsys.readouterr()
    assert bench(tmp_path, "--case=rms_norm", "--only=checkpoint", "--resume")[0] == 0
    assert "nothing left to measure" in capsys.readouterr().out
    add_way("crash", lambda eager: lambda *inputs: int("x"))
    for _ in range(2):
        bench(tmp_path, "--case=rms_norm", "--resume")
    assert measured == ["rms_norm"] * 3
    # what is installed now can be measured
    peer = peers.Peer("Late", "no_such_package", "rms_norm", torch.relu)
    monkeypatch.setattr(peers, "PEERS", (peer,))
    for _ in range(2):
        bench(tmp_path, "--case=rms_norm", "--resume")
    assert measured == ["rms_norm"] * 4
    monkeypatch.setattr(peers, "PEERS", (peer._replace(package="torch"),))
    bench(tmp_path, "--case=rms_norm", "--resume")
    assert measured == ["rms_norm"] * 5


@pytest.mark.parametrize("commit", [None, "0123-dirty"])
def test_what_no_commit_names_is_measured_again(tmp_path, at_commit, measured, capsys, commit):
    at_commit(commit)
    for _ in range(2):
        _, lines = bench(tmp_path, "--case=rms_norm", "--repeat=1", "--only=eager", "--resume")
    assert measured == ["rms_norm"] * 2
    assert len(lines) == 2
    assert "nothing counts as measured before" in capsys.readouterr().out


@pytest.mark.parametrize("commit", ["one", "one-dirty"])
@pytest.mark.parametrize("where", ["_measure_memory", "in_turns"])
def test_an_interrupt_takes_nothing_away(tmp_path, at_commit, monkeypatch, capsys, commit, where):
    at_commit(commit)
    options = ("--case=rms_norm", "--only=eager")
    _, first = bench(tmp_path, *options)

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure, where, interrupt)
        for resume in ((), ("--resume",)):
            assert bench(tmp_path, *options, "--repeat=6", *resume) == (130, first)
        patch.setattr(clock, "ceilings", interrupt)
        assert bench(tmp_path, *options) == (130, first)
    assert capsys.readouterr().out.count("interrupted") == 3
    # one round of six is less than the three that there are, and more than nothing
    before, left = Implementation.time, iter(range(2 + 1))
    late = lambda *args: before(*args) if next(left, None) is not None else interrupt()  # noqa: E731
    monkeypatch.setattr(Implementation, "time", late)
    status, result = bench(tmp_path, *options, "--repeat=6", "--resume")
    assert status == 130
    assert len(result) == (1 if commit == "one" else 2)


def test_a_run_resumes_where_it_stopped(tmp_path, at_commit, measured):
    at_commit("one")
    options = ("--case=rms_norm", "--case=layer_norm", "--repeat=1", "--skip=checkpoint")
    bench(tmp_path, *options[:1], *options[2:])
    first = (tmp_path / "run.jsonl").read_text()
    measured.clear()
    _, lines = bench(tmp_path, *options, "--resume")
    assert measured == ["layer_norm"]
    assert (tmp_path / "run.jsonl").read_text().startswith(first)
    assert {line["case"] for line in lines} == {"rms_norm", "layer_norm"}
    # more rounds are asked for than there are
    bench(tmp_path, *options, "--repeat=2", "--resume")
    assert measured[1:] == ["rms_norm", "layer_norm"]
    # another commit's numbers are none of ours
    at_commit("another")
    bench(tmp_path, *options, "--resume")
    assert measured[3:] == ["rms_norm", "layer_norm"]


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    before, left = Implementation.time, iter(range(2 * 4 + 6))

    def interrupt(*args) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        before(*args)

    monkeypatch.setattr(Implementation, "time", interrupt)
    status, result = bench(tmp_path, "--case=mlp", "--case=gated_mlp", "--repeat=9")
    assert status == 130
    rows = rows_of(result).values()
    assert [len(row["both_ms"]) for row in rows] == [2, 1, 1, 2]
    assert {line["case"] for line in result} == {"mlp"}
