"""`python -m bench compare`: what is a change, and what is noise."""

from __future__ import annotations

import pytest
from made_up import Row, group, row, write

from bench import __main__ as command
from bench import compare


def test_changes_beyond_noise_are_told():
    before = group(row("eager"), row("ours"), row("gone"), row("broke"), row("grew"))
    after = group(
        row("eager", 3.02),
        row("ours", 2.0),
        row("new"),
        row("broke", failure="RuntimeError: no"),
        row("grew", peak=1001),
    )
    found = list(compare.changes(before, after, 0.05))
    assert [(c.name, c.what) for c in found] == [
        ("ours", "forward of eager"),
        ("ours", "backward of eager"),
        ("ours", "both of eager"),
        ("new", "implementation"),
        ("broke", "failure"),
        ("grew", "peak bytes"),
        ("gone", "implementation"),
    ]
    assert [c.is_worse for c in found] == [False] * 4 + [True, True, False]
    assert not list(compare.changes(before, before, 0.0))
    # 20 % apart, and as much noise
    noisy = group(row("eager"), row("ours", 3.6, both_ms=[2.2, 5.0] * 3))
    found = compare.changes(before, noisy, 0.05)
    assert not [change for change in found if change.what == "both of eager"]


def test_load_that_slows_everything_is_no_change():
    before = group(row("eager", 3.0), row("ours", 6.0))
    after = group(row("eager", 4.5), row("ours", 9.0))
    assert not list(compare.changes(before, after, 0.05))
    (*_, both) = compare.eager_changes(before, after, 0.05)
    assert (both.what, both.share) == ("both ms", "+50.0%")


def test_few_rounds_are_no_evidence():
    def short(ms: float, peak: int = 1000) -> Row:
        times = dict.fromkeys(("forward_ms", "backward_ms", "both_ms"), [ms] * 4)
        return row("ours", ms, peak, **times)

    before = group(row("eager"), short(3.0))
    after = group(row("eager", 6.0), short(9.0, 1001))
    assert [change.what for change in compare.changes(before, after, 0.05)] == ["peak bytes"]
    assert compare.is_short(before)
    assert not compare.is_short(group(row("eager")))


def test_comparing_prints_both_sources(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", group(row("eager"), row("ours")), group(row("eager"), case="x"))
    faster = row("eager", 2.0), row("ours", 1.0)
    there = {"commit": "fedcba9876543210"}
    b = write(tmp_path / "b.jsonl", group(*faster, **there), group(*faster, device="another"))
    assert command.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "before: a device" in out
    assert "commit fedcba987654" in out
    assert "-50.0%" in out
    sizes = "tiny: 48 tokens, D = 32, F = 80, float32"
    assert f"eager itself moved, both ms 2.850 -> 1.900 (-33.3%): mlp, {sizes}" in out
    assert f"only before: x, {sizes}, on a device" in out
    assert f"only after: mlp, {sizes}, on another" in out
    assert command.main(["compare", str(a), str(a)]) == 0
    assert "no change in 2 cases" in capsys.readouterr().out
    few = group(row("eager", both_ms=[3.0]), row("ours", both_ms=[3.0]))
    c = write(tmp_path / "c.jsonl", few)
    assert command.main(["compare", str(a), str(c)]) == 0
    assert "fewer than 5 rounds are not compared: mlp tiny 48" in capsys.readouterr().out


def test_files_of_nothing_in_common_are_refused(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", group(row("eager")))
    b = write(tmp_path / "b.jsonl", group(row("eager"), tokens=96))
    with pytest.raises(SystemExit):
        command.main(["compare", str(a), str(b)])
    assert "have no case in common" in capsys.readouterr().err
