"""What only reads results: `bench show`, on results that are made up and on committed ones."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from made_up import FACTS, group, row, way, ways, write
from matplotlib.figure import Figure

from bench import changes, drawings, figures, show, tables
from bench.__main__ import main
from bench.results import Row, append, groups, least_ms, ms_of, ratios, read, slowdown

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def fits() -> list[Row]:
    shared = {"command": "run", "case": "mlp", "size": "tiny", "dim": 32, "hidden": 80}
    shared |= {"dtype": "float32", "memory": 1, "is_wrong": False, "saved_bytes": None, **FACTS}
    eager = {"name": "eager", "failure": None, "fits": 96, "peak_bytes": 2**20}
    ours = {"name": "ours", "failure": "no room", "fits": 0, "peak_bytes": 0, "both_ms": None}
    return [shared | eager | {"both_ms": [2.0]}, shared | ours]


def cells(rows: list[Row], head: str) -> list[str]:
    """Return a column of the table."""
    return [show.columns_of(rows)[head](one) for one in rows]


def test_rates_count_what_the_case_needs():
    # 3 GFLOP at 1.5 TFLOP/s; 3 MB at 10 GB/s
    (one,) = group(row("eager", 4.0))
    assert least_ms(one) == pytest.approx((2.0, 0.3))
    assert least_ms(one | {"matmul_tflops": None}) is None
    found = [write(one) for write in show.columns_of([one]).values()]
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
    show.show_rows(rows)
    assert capsys.readouterr().out.splitlines()[-4:-1] == [
        *("lost: RuntimeError: no", "not installed: A, B"),
        "launched, not replayed from a graph: eager",
    ]
    show.show_rows(rows, markdown=True)
    text = capsys.readouterr().out
    assert "| eager | 1.140 |" in text
    assert "| lost" not in text


def test_sources_are_named_where_they_differ():
    there = {"commit": "fedcba9876543210", "tf32": True, "flash-attn": "2.8"}
    here, norm = group(row("eager")), group(row("eager"), case="norm")
    other = group(row("eager", is_graph=True), case="stack", **there)
    assert tables.sources([here, norm]) == [tables.source(here)]
    first, second = tables.sources([here, norm, other])
    assert first == f"mlp, norm: {tables.source(here)}"
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
    assert main(["show", "--plot", str(path), f"--out={tmp_path / 'made'}"]) == 0
    assert {file.stem for file in (tmp_path / "made").iterdir()} == {
        *("mlp-tiny-32-48-float32", "rms_norm-tiny-32-48-float32", "mlp-tiny-32-96-float32"),
        *("pareto-tiny-32-48-float32", "pareto-tiny-32-96-float32"),
        "memory-mlp-tiny-32-1-float32",
    }
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("mlp, tiny: 48 tokens") == out.count("in 1 MiB") == 1
    assert "ours: no room" in out
    assert main(["show", str(path), "--markdown"]) == 0
    assert "| eager | 96 | 2.000 | 1.000 | 48,000 |" in capsys.readouterr().out


def test_committed_results_can_be_drawn_and_compared(tmp_path, monkeypatch, capsys):
    # in a few dots
    monkeypatch.setitem(figures.STYLE, "savefig.dpi", 20)
    # errors alone are in one
    errors = RESULTS / "rounding-cpu.jsonl"
    assert main(["show", str(errors)]) == 0
    assert "above 2" in capsys.readouterr().out
    paths = [*RESULTS.glob("*.jsonl"), RESULTS / "cpu/memory.jsonl"]
    paths.remove(errors)
    assert len(paths) == 6
    for path in paths:
        assert main(["show", "--plot", str(path), f"--out={tmp_path}"]) == 0
    assert (tmp_path / "demo-cpu.png").read_bytes().startswith(b"\x89PNG")
    path = str(RESULTS / "cpu/run.jsonl")
    assert main(["show", path, path]) == 0
    assert "no change in 13 cases" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.jsonl")), ids=lambda path: path.stem)
def test_a_table_agrees_with_itself(path):
    """A row's ms is the first row's ms times the printed ratio, in every committed result."""
    cases = groups(read(path))
    assert cases
    for rows in cases:
        timed = [one for one in rows if one["both_ms"]]
        for one in timed:
            assert ms_of(one, rows[0]) == ms_of(rows[0], rows[0]) * slowdown(one, rows[0])
        columns = show.columns_of(rows)
        if (ratio := columns.get(f"of\n{rows[0]['name']}")) is None:
            continue
        ms = columns["both\nms" if "both\nms" in columns else "ms"]
        first = float(ms(rows[0]).replace(",", ""))
        for one in timed:
            # both have three digits at least
            printed = float(ms(one).replace(",", "")) / first
            assert printed == pytest.approx(float(ratio(one)[:-1]), abs=0.006, rel=0.006)


def test_times_and_ratios_are_one_number():
    """Load in the first round of one way alone would make its median another number."""
    rows = ways(way("eager", both_ms=[1.0, 9.0, 2.0]), way("fuse", both_ms=[2.0, 9.0, 6.0]))
    ms, ratio = cells(rows, "ms"), cells(rows, "of\neager")
    assert (ms, ratio) == (["2.000", "4.000"], ["1.00x", "2.00x"])


def test_ways_that_failed_or_were_not_judged_are_told(capsys):
    wrong = way("wrong", failure="wrong: gradients are off", is_wrong=True, both_ms=None)
    rows = ways(way("eager"), wrong, way("fuse", note="fused 3 modules"), unjudged="it draws")
    show.show_rows(rows, ["a note"])
    assert capsys.readouterr().out.splitlines()[-6:-1] == [
        "wrong: wrong: gradients are off",
        "fuse: fused 3 modules",
        "gradients are not judged (all): it draws",
        "peak: above parameters and gradients",
        "a note",
    ]


@pytest.mark.parametrize("count", [drawings.FEW, drawings.FEW + 1])
def test_few_ways_are_bars_and_many_are_dots(tmp_path, count):
    curve = {"ms": 2.0, "forward_ms": 1.0, "mib": [0.0, 1.0, 0.5]}
    rows = ways(*(way(f"way {i}", 3 + i, 2**20 - i, curve=curve) for i in range(count)))
    path = write(tmp_path / "ways.jsonl", rows, ways(way("plain", depth=3), case="depth"))
    assert main(["show", "--plot", str(path)]) == 0
    assert (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")


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
    assert not [pair for a, b in combinations(lines, 2) if figures.lines_cross(*(pair := (*a, *b)))]
    sizes = sorted((t.xyann[1], 1 + t.get_text().count("\n")) for t in axes.texts)
    for (one, few), (other, many) in pairwise(sizes):
        assert other - one >= 0.0499 * (few + many) / 2


@pytest.mark.parametrize("option", [(), ("--plot",)])
def test_files_without_results_end_in_one_line(tmp_path, refused, option):
    path = tmp_path / "run.jsonl"
    for text in (None, b"", b"nonsense\n", b"\xff\n", b"[" * 100_000 + b"\n", b"[1]\n", b"{}\n"):
        if text is not None:
            path.write_bytes(text)
        assert ("run.jsonl:1: not a result" if text else "run.jsonl") in refused(
            "show", str(path), *option
        )


def test_a_row_that_lacks_a_name_is_told_by_its_line(tmp_path, refused):
    path = write(tmp_path / "run.jsonl", group(row("eager"), row("ours")))
    first, second = path.read_text().splitlines()
    for change, message in (
        ({"both_ms": "3"}, "both_ms is not a list of numbers"),
        ({"commit": ...}, "it names no commit"),
    ):
        record = {k: v for k, v in (json.loads(second) | change).items() if v is not ...}
        path.write_text(f"{first}\n{json.dumps(record)}\n")
        error = refused("show", str(path))
        assert "run.jsonl:2: not a result" in error
        assert message in error


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
    found = list(changes.changes(before, after, 0.05))
    assert [(c["name"], c["what"], c[""]) for c in found] == [
        ("ours", "forward of eager", ""),
        ("ours", "backward of eager", ""),
        ("ours", "both of eager", ""),
        ("new", "implementation", ""),
        ("broke", "failure", "worse"),
        ("grew", "peak bytes", "worse"),
        ("gone", "implementation", ""),
    ]
    assert not list(changes.changes(before, before, 0.0))
    # 20 % apart, and as much noise
    noisy = group(row("eager"), row("ours", 3.6, both_ms=[2.2, 5.0] * 3))
    found = changes.changes(before, noisy, 0.05)
    assert not [change for change in found if change["what"] == "both of eager"]
    # load that slows everything is no change, nor are few rounds evidence
    slow = group(*(row(name, 4.5) for name in ("eager", "ours", "gone", "broke", "grew")))
    assert not list(changes.changes(before, slow, 0.05))
    few = dict.fromkeys(("forward_ms", "backward_ms", "both_ms"), [9.0] * 4)
    assert not list(changes.changes(before[:2], group(row("eager"), row("ours", **few)), 0.05))


def test_comparing_prints_both_sources(tmp_path, capsys):
    a = write(tmp_path / "a.jsonl", group(row("eager"), row("ours")), group(row("eager"), case="x"))
    faster = row("eager", 2.0), row("ours", 1.0)
    there = {"commit": "fedcba9876543210"}
    b = write(tmp_path / "b.jsonl", group(*faster, **there), group(*faster, device="another"))
    assert main(["show", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "before: a device" in out
    assert "commit fedcba987654" in out
    assert "-50.0%" in out
    sizes = "tiny: 48 tokens, D = 32, F = 80, float32"
    assert f"eager itself moved, both ms 2.850 -> 1.900 (-33.3%): mlp, {sizes}" in out
    assert f"only before: x, {sizes}, on a device" in out
    assert f"only after: mlp, {sizes}, on another" in out
    c = write(tmp_path / "c.jsonl", group(row("eager", both_ms=[3.0]), row("ours")))
    assert main(["show", str(a), str(c)]) == 0
    assert "fewer than 5 rounds are not compared: mlp, tiny: 48 tokens" in capsys.readouterr().out


def test_files_of_nothing_in_common_are_refused(tmp_path, refused):
    a = write(tmp_path / "a.jsonl", group(row("eager")))
    b = write(tmp_path / "b.jsonl", group(row("eager"), tokens=96))
    assert "have no case in common" in refused("show", str(a), str(b))
