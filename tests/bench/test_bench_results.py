"""What only reads results: tables, figures and comparisons, on results that are made up."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from made_up import FACTS, group, row, write
from matplotlib.figure import Figure

from bench import compare, figures, table
from bench.__main__ import main
from bench.results import Row, append, groups, least_ms, ratios, read

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def fits() -> list[Row]:
    shared = {"case": "mlp", "size": "tiny", "dim": 32, "hidden": 80, "dtype": "float32"}
    shared |= {"memory": 1, "is_wrong": False, **FACTS}
    eager = {"name": "eager", "failure": None, "tokens": 96, "peak_bytes": 2**20}
    ours = {"name": "ours", "failure": "no room", "tokens": 0, "peak_bytes": 0, "both_ms": None}
    return [shared | eager | {"both_ms": [2.0]}, shared | ours]


def cells(rows: list[Row], head: str) -> list[str]:
    """Return a column of the table."""
    return [table.columns(rows[0])[head](one) for one in rows]


def test_rates_count_what_the_case_needs():
    # 3 GFLOP at 1.5 TFLOP/s; 3 MB at 10 GB/s
    (one,) = group(row("eager", 4.0))
    assert least_ms(one) == pytest.approx((2.0, 0.3))
    assert least_ms(one | {"matmul_tflops": None}) is None
    found = [write(one) for write in table.columns(one).values()]
    # the medians of 4.0 and 3.6
    assert found[:5] == ["eager", "1.520", "2.280", "3.800", "1.00x"]
    assert found[5:] == ["1.00x", "10", "0.001", "0.001", "0.789", "0.789", "53%"]


def test_errors_are_held_against_eagers():
    rows = group(
        row("eager", errors=[1e-7, 1e-6, 0.0]),
        # of each result by itself, the worst
        row("ours", errors=[1.5e-7, 5e-7, 0.0]),
        row("far", errors=[1.2345e-6, 1e-6, 0.0]),
        # where eager is exact, of an epsilon
        row("inexact", errors=[0.0, 0.0, 3 * 2**-23]),
        row("none", errors=[]),
    )
    assert cells(rows, "error") == ["1.00x", "1.50x", "12x", "3.00x", "-"]


def test_ratios_of_a_table_are_taken_within_rounds():
    assert ratios([2, 9, 6], [1, 9, 2]) == [2, 1, 3]
    rows = group(row("eager", both_ms=[1.0, 9.0, 2.0]), row("fused", both_ms=[2.0, 9.0, 6.0]))
    assert cells(rows, "of\neager") == ["1.00x", "2.00x"]


def test_notes_say_what_the_numbers_do_not(capsys):
    absent = [row(name, failure="not installed") for name in "AB"]
    lost = row("lost", failure="RuntimeError: no")
    rows = group(row("eager"), row("ours", is_graph=True), lost, *absent)
    table.show_rows(rows)
    assert capsys.readouterr().out.splitlines()[-4:-1] == [
        *("lost: RuntimeError: no", "not installed: A, B"),
        "launched, not replayed from a graph: eager",
    ]
    table.show_rows(rows, markdown=True)
    text = capsys.readouterr().out
    assert "| eager | 1.140 |" in text
    assert "| lost" not in text


def test_sources_are_named_where_they_differ():
    there = {"commit": "fedcba9876543210", "tf32": True, "flash-attn": "2.8"}
    here, norm = group(row("eager")), group(row("eager"), case="norm")
    other = group(row("eager", is_graph=True), case="stack", **there)
    assert table.sources([here, norm]) == [table.source(here)]
    first, second = table.sources([here, norm, other])
    assert first == f"mlp, norm: {table.source(here)}"
    assert second.startswith("stack: a device; torch 2.13, triton 3.7, fusedckpt 0.1, flash-attn")
    assert "TF32 matmuls; 2026-01-02, commit fedcba987654; CUDA graphs" in second


def test_figures_are_drawn_from_files(tmp_path, capsys):
    names = ("eager", "torch.compile 0", "fusedckpt inputs", "torch(eager) per layer", "Liger")
    rows = [row(name, 3 + i, 900 - 90 * i) for i, name in enumerate(names)]
    lost = row("lost", failure="RuntimeError: no", peak_bytes=None)
    norm = group(*rows, case="rms_norm", flops=0, bytes=300)
    other = group(*rows, tokens=96, matmul_tflops=None, copy_gbytes=None)
    path = write(tmp_path / "run.jsonl", group(*rows, lost), norm, other)
    append(fits(), path)
    # one file to itself: every line is one
    path.write_bytes(2 * path.read_bytes())
    assert main(["plot", str(path), f"--out={tmp_path / 'made'}"]) == 0
    assert {file.stem for file in (tmp_path / "made").iterdir()} == {
        *("mlp-tiny-32-48-float32", "rms_norm-tiny-32-48-float32", "mlp-tiny-32-96-float32"),
        *("pareto-tiny-32-48-float32", "pareto-tiny-32-96-float32"),
        "capacity-mlp-tiny-32-1-float32",
    }
    assert main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("mlp, tiny: 48 tokens") == out.count("in 1 MiB") == 1
    assert "ours: no room" in out
    assert main(["table", str(path), "--markdown"]) == 0
    assert "| eager | 96 | 1.000 | 2.000 | 48,000 |" in capsys.readouterr().out


def test_committed_results_can_be_drawn_and_compared(tmp_path, monkeypatch, capsys):
    # in a few dots
    monkeypatch.setitem(figures.STYLE, "savefig.dpi", 20)
    for path in [*RESULTS.glob("*.json"), RESULTS / "cpu/capacity.jsonl"]:
        assert main(["plot", str(path), f"--out={tmp_path}"]) == 0
    assert (tmp_path / "demo-cpu.png").read_bytes().startswith(b"\x89PNG")
    path = str(RESULTS / "cpu/run.jsonl")
    assert main(["compare", path, path]) == 0
    assert "no change in 13 cases" in capsys.readouterr().out


def test_the_front_is_what_nothing_beats():
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.0), (2.0, 2.0), (3.0, 1.0), (1.0, 4.0)]
    assert [points[i] for i in figures.pareto_front(points)] == [(1, 3), (2, 2), (3, 1)]


CLOUDS = {
    "apart": [(1.0, 5.0), (2.0, 3.0), (1.5, 5.1), (3.0, 1.0)],
    "column": [(1.0, 5.0 + i / 50) for i in range(12)] + [(9.0, 5.1), (5.0, 1.0)],
    "top": [(i / 3, 5.0 - i / 90) for i in range(14)],
    "one": [(1.0, 1.0)],
}


@pytest.mark.parametrize("points", CLOUDS.values(), ids=CLOUDS)
def test_every_dot_is_named_by_lines_that_do_not_cross(points):
    axes = Figure().subplots()
    axes.scatter(*zip(*points, strict=True))
    names = [f"way{i}" for i in range(len(points))]
    figures.name_points(axes, points, names, line=0.05)
    assert all(sum(name in text.get_text().split() or f"{name};" in text.get_text().split()
                   for text in axes.texts) == 1 for name in names)  # fmt: skip
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    lines = []
    for text in axes.texts:
        x, y = text.xy
        lines.append((((x - left) / (right - left), (y - low) / (high - low)), text.xyann[1]))
        assert text.arrow_patch is not None
        assert 0 <= text.xyann[1] <= 1
    assert not [pair for a, b in combinations(lines, 2) if figures._crosses(*(pair := (*a, *b)))]
    sizes = sorted((t.xyann[1], 1 + t.get_text().count("\n")) for t in axes.texts)
    for (one, few), (other, many) in pairwise(sizes):
        assert other - one >= 0.0499 * (few + many) / 2


@pytest.mark.parametrize("name", ["table", "plot"])
def test_files_without_results_end_in_one_line(tmp_path, refused, name):
    path = tmp_path / "run.jsonl"
    for text in (None, b"", b"nonsense\n", b"\xff\n", b"[" * 100_000 + b"\n", b"[1]\n", b"{}\n"):
        if text is not None:
            path.write_bytes(text)
        assert ("run.jsonl:1: not a result" if text else "run.jsonl") in refused(name, str(path))


def test_a_row_that_lacks_a_name_is_told_by_its_line(tmp_path, refused):
    path = write(tmp_path / "run.jsonl", group(row("eager"), row("ours")))
    first, second = path.read_text().splitlines()
    for change, message in (
        ({"both_ms": "3"}, "both_ms is not a list of numbers"),
        ({"commit": ...}, "it names no commit"),
    ):
        record = {k: v for k, v in (json.loads(second) | change).items() if v is not ...}
        path.write_text(f"{first}\n{json.dumps(record)}\n")
        error = refused("table", str(path))
        assert "run.jsonl:2: not a result" in error
        assert message in error


def test_a_damaged_record_is_told(tmp_path, capsys):
    record = json.loads((RESULTS / "demo-cpu.json").read_text())
    (tmp_path / "broken.json").write_text(json.dumps(record | {"parts": [3]}))
    assert main(["plot", str(tmp_path / "broken.json")]) == 2
    assert "broken.json: not a result" in capsys.readouterr().err


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", group(row("eager"), row("ours")))
    path.write_bytes(path.read_bytes()[:-30])
    assert [one["name"] for one in read(path)] == ["eager"]
    assert "run.jsonl:2: left out, the line is unfinished" in capsys.readouterr().err
    # the next line takes its place
    append(group(row("eager"), case="norm"), path)
    assert [one["case"] for one in read(path)] == ["mlp", "norm"]
    assert not capsys.readouterr().err


def test_a_case_measured_twice_counts_once(tmp_path):
    path = write(tmp_path / "run.jsonl", group(row("eager", 1.0), row("gone")))
    append(group(row("eager", 2.0), date="2026-02-02T03:04:05+00:00"), path)
    append(group(row("eager", 3.0), device="another"), path)
    found = groups(read(path))
    assert [[one["name"] for one in rows] for rows in found] == [["eager"], ["eager"]]
    assert [rows[0]["both_ms"][0] for rows in found] == [2.0, 3.0]


def test_changes_beyond_noise_are_told():
    before = group(row("eager"), row("ours"), row("gone"), row("broke"), row("grew"))
    broke, grew = row("broke", failure="RuntimeError: no"), row("grew", peak=1001)
    after = group(row("eager", 3.02), row("ours", 2.0), row("new"), broke, grew)
    found = list(compare.changes(before, after, 0.05))
    assert [(c["name"], c["what"], c[""]) for c in found] == [
        ("ours", "forward of eager", ""),
        ("ours", "backward of eager", ""),
        ("ours", "both of eager", ""),
        ("new", "implementation", ""),
        ("broke", "failure", "worse"),
        ("grew", "peak bytes", "worse"),
        ("gone", "implementation", ""),
    ]
    assert not list(compare.changes(before, before, 0.0))
    # 20 % apart, and as much noise
    noisy = group(row("eager"), row("ours", 3.6, both_ms=[2.2, 5.0] * 3))
    found = compare.changes(before, noisy, 0.05)
    assert not [change for change in found if change["what"] == "both of eager"]
    # load that slows everything is no change, nor are few rounds evidence
    slow = group(*(row(name, 4.5) for name in ("eager", "ours", "gone", "broke", "grew")))
    assert not list(compare.changes(before, slow, 0.05))
    few = dict.fromkeys(("forward_ms", "backward_ms", "both_ms"), [9.0] * 4)
    assert not list(compare.changes(before[:2], group(row("eager"), row("ours", **few)), 0.05))


def test_comparing_prints_both_sources(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", group(row("eager"), row("ours")), group(row("eager"), case="x"))
    faster = row("eager", 2.0), row("ours", 1.0)
    there = {"commit": "fedcba9876543210"}
    b = write(tmp_path / "b.jsonl", group(*faster, **there), group(*faster, device="another"))
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "before: a device" in out
    assert "commit fedcba987654" in out
    assert "-50.0%" in out
    sizes = "tiny: 48 tokens, D = 32, F = 80, float32"
    assert f"eager itself moved, both ms 2.850 -> 1.900 (-33.3%): mlp, {sizes}" in out
    assert f"only before: x, {sizes}, on a device" in out
    assert f"only after: mlp, {sizes}, on another" in out
    c = write(tmp_path / "c.jsonl", group(row("eager", both_ms=[3.0]), row("ours")))
    assert main(["compare", str(a), str(c)]) == 0
    assert "fewer than 5 rounds are not compared: mlp tiny 48" in capsys.readouterr().out


def test_files_of_nothing_in_common_are_refused(tmp_path, refused):
    a = write(tmp_path / "a.jsonl", group(row("eager")))
    b = write(tmp_path / "b.jsonl", group(row("eager"), tokens=96))
    assert "have no case in common" in refused("compare", str(a), str(b))
