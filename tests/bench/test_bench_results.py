"""What only reads results: figures and comparisons, on results that are made up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the bench extra")

from made_up import FACTS, Row, group, row, write
from matplotlib.figure import Figure

from bench import __main__ as command
from bench import figures, plot, table
from bench.results import append, groups, key_of, least_ms, read, title


def fits() -> list[Row]:
    shared = {"case": "mlp", "size": "tiny", "dim": 32, "hidden": 80, "dtype": "float32"}
    shared |= {"memory": 1, "is_wrong": False, **FACTS}
    eager = {"name": "eager", "failure": None, "tokens": 96, "peak_bytes": 2**20}
    ours = {"name": "ours", "failure": "no room", "tokens": 0, "peak_bytes": 0, "both_ms": None}
    return [shared | eager | {"both_ms": [2.0]}, shared | ours]


def cells(rows: list[Row], head: str) -> list[str]:
    """Return a column of what is printed."""
    return [table.columns(rows[0])[head](one) for one in rows]


def test_the_front_is_what_nothing_beats():
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 3.0), (2.0, 2.0), (3.0, 1.0), (1.0, 4.0)]
    assert [points[i] for i in plot.pareto_front(points)] == [(1, 3), (2, 2), (3, 1)]
    assert plot.pareto_front([]) == []


def test_names_move_apart_no_further_than_they_must():
    assert figures._apart([1.0, 5.0, 9.0], 2.0) == [1.0, 5.0, 9.0]
    assert figures._apart([4.0, 4.0, 9.0], 1.0) == [3.5, 4.5, 9.0]
    assert figures._apart([3.0], 1.0) == [3.0]
    assert figures._apart([], 1.0) == []


def test_ceilings_bound_the_time_from_two_sides():
    # 3 GFLOP at 1.5 TFLOP/s; 3 MB at 10 GB/s
    (one,) = group(row("eager"))
    assert least_ms(one) == pytest.approx((2.0, 0.3))
    assert least_ms(one | {"matmul_tflops": None}) is None


def test_rates_count_what_the_case_needs():
    (one,) = group(row("eager", 4.0))
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
        row("exact", errors=[0.0, 0.0, 0.0]),
        row("interrupted", errors=[]),
    )
    assert cells(rows, "error") == ["1.00x", "1.50x", "12x", "3.00x", "0.00x", "-"]


def test_ratios_of_a_table_are_taken_within_rounds():
    rows = group(row("eager", both_ms=[1.0, 9.0, 2.0]), row("fused", both_ms=[2.0, 9.0, 6.0]))
    assert cells(rows, "of\neager") == ["1.00x", "2.00x"]


def test_notes_say_what_the_numbers_do_not(capsys):
    rows = (
        row("eager", is_graph=True),
        row("ours"),
        row("lost", failure="RuntimeError: no"),
        row("A", failure="not installed"),
        row("B", failure="not installed"),
    )
    notes = [
        "lost: RuntimeError: no",
        "not installed: A, B",
        "launched, not replayed from a graph: ours",
        "numbers checked at 24 tokens",
    ]
    table.show_rows(group(*rows, checked_tokens=24))
    assert capsys.readouterr().out.splitlines()[-5:-1] == notes
    table.show_rows(group(*rows), markdown=True)
    text = capsys.readouterr().out
    assert "| eager | 1.140 |" in text
    assert "| lost" not in text
    assert "lost: RuntimeError: no" in text


def test_figures_are_drawn_from_files(tmp_path, capsys):
    names = ("eager", "torch.compile 0", "fusedckpt inputs", "torch(eager) per layer", "Liger")
    rows = [row(name, 3 + i, 900 - 90 * i) for i, name in enumerate(names)]
    lost = row("lost", failure="RuntimeError: no", peak_bytes=None)
    norm = group(*rows, case="rms_norm", flops=0, bytes=300)
    other = group(*rows, tokens=96, matmul_tflops=None, copy_gbytes=None)
    path = write(tmp_path / "run.jsonl", group(*rows, lost), norm, other)
    assert command.main(["plot", str(path), f"--out={tmp_path / 'made'}"]) == 0
    drawn = {file.stem for file in (tmp_path / "made").iterdir()}
    assert drawn == {
        *("mlp-tiny-32-48-float32", "rms_norm-tiny-32-48-float32", "mlp-tiny-32-96-float32"),
        *("pareto-tiny-32-48-float32", "pareto-tiny-32-96-float32"),
        # without ceilings there is no roof
        "roofline-tiny-32-48-float32",
    }
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (tmp_path / "made").iterdir())


def test_families_have_one_colour_in_every_picture():
    of = {
        name: figures.family(name)
        for name in ("torch.compile 0", "ours(fused)", "quack", "fusedckpt inputs")
    }
    labels = [found.label for found in of.values()]
    assert labels == ["torch.compile", "fusedckpt.checkpoint", "other libraries", "fusedckpt"]
    # the demo's names
    assert figures.family("fuse") == of["fusedckpt inputs"]
    assert figures.family("fuse+ckpt") == of["ours(fused)"]
    assert figures.family("checkpoint") == figures.family("torch(eager) per layer")
    demos = ("eager", "checkpoint", "fuse", "fuse+ckpt", "fuse+plan")
    assert len({figures.family(name).colour for name in demos}) == len(demos)


def test_figures_name_every_source():
    there = {"commit": "fedcba9876543210", "tf32": True, "flash-attn": "2.8"}
    here, norm = group(row("eager")), group(row("eager"), case="norm")
    other = group(row("eager"), case="stack", **there)
    assert table.sources([here, norm]) == [table.source(here)]
    first, second = table.sources([here, norm, other])
    assert first == f"mlp, norm: {table.source(here)}"
    assert second.startswith("stack: a device; torch 2.13, triton 3.7, fusedckpt 0.1, flash-attn")
    assert "TF32 matmuls; 2026-01-02, commit fedcba987654" in second
    assert "CUDA graphs" not in second
    assert "CUDA graphs" in table.source(group(row("eager", is_graph=True)))


def test_sequences_are_in_titles():
    (one,) = group(row("eager"), case="stack", seq=24)
    assert title(one) == "stack, tiny: 48 tokens, D = 32, F = 80, float32, sequences of 24"
    assert plot.heading(one) == "stack, sequences of 24"
    assert key_of(one) != key_of(group(row("eager"), case="stack")[0])


def test_points_are_led_to_their_names():
    axes = Figure().subplots()
    points = [(1.0, 5.0), (2.0, 5.0), (1.0, 5.1), (3.0, 1.0)]
    axes.scatter(*zip(*points, strict=True))
    figures.name_points(axes, points, ["a", "b", "c", "d"], gap=0.06)
    found = {text.get_text(): text for text in axes.texts}
    assert [found[name].xy for name in "abcd"] == points
    heights = sorted(text.xyann[1] for text in found.values())
    assert all(high - low > 0.0599 for low, high in pairwise(heights))
    assert found["d"].xyann[1] < found["a"].xyann[1] < found["b"].xyann[1] < found["c"].xyann[1]
    assert all(text.arrow_patch is not None for text in found.values())


def test_names_of_points_at_the_top_stay_beside_the_axes():
    axes = Figure().subplots()
    points = [(1.0, 5.0)] * 9 + [(1.0, 1.0)]
    axes.scatter(*zip(*points, strict=True))
    figures.name_points(axes, points, list("abcdefghij"), gap=0.1)
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert heights[0] >= 0
    assert heights[-1] <= 1
    assert all(high - low > 0.0999 for low, high in pairwise(heights))


def test_shares_are_of_the_ceilings_of_their_own_run(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: seen.append(figure))
    # 3.8 ms where 2 and 1 are needed
    slow = group(row("eager", 4.0))
    fast = group(row("eager", 4.0), case="stack", matmul_tflops=3.0)
    plot.draw_roofline([slow, fast], tmp_path / "roofline.png")
    ((axes,),) = (figure.axes for figure in seen)
    shares = [points.get_offsets()[0][0] for points in axes.collections]
    assert shares == pytest.approx([100 * 2 / 3.8, 100 * 1 / 3.8])
    assert axes.get_xlim()[1] > 100


@pytest.mark.parametrize("name", ["table", "plot"])
def test_files_without_results_end_in_one_line(tmp_path, capsys, name):
    path = tmp_path / "run.jsonl"
    for text in (None, b"", b"nonsense\n", b"\xff\n", b"[" * 100_000 + b"\n", b"[1]\n", b"{}\n"):
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(SystemExit) as ended:
            command.main([name, str(path)])
        assert ended.value.code == 2
        where = "run.jsonl:1: not a result" if text else "run.jsonl"
        assert where in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("both_ms", "3", "both_ms is not a list of numbers"),
        ("both_ms", [1, None], "both_ms is not a list of numbers"),
        ("both_ms", {"median": 1.0}, "both_ms is not a list of numbers"),
        ("errors", None, "errors is not a list of numbers"),
        ("is_wrong", 1, "is_wrong is not true or false"),
        ("tokens", 4.5, "tokens is not a whole number"),
        ("flops", True, "flops is not a whole number"),
        ("matmul_tflops", [1, 2], "matmul_tflops is not a number"),
        ("date", None, "date is not a string"),
        ("commit", ..., "it names no commit"),
    ],
)
def test_a_row_of_wrong_types_is_told_by_its_line(tmp_path, capsys, name, value, message):
    path = write(tmp_path / "run.jsonl", group(row("eager"), row("ours")))
    first, second = path.read_text().splitlines()
    record = json.loads(second) | {name: value}
    if value is ...:
        del record[name]
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(SystemExit) as ended:
        command.main(["table", str(path)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "run.jsonl:2: not a result" in last
    assert message in last


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", group(row("eager"), row("ours")))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert [one["name"] for one in read(path)] == ["eager"]
    assert "run.jsonl:2: left out, the line is unfinished" in capsys.readouterr().err
    # what comes next takes its place
    append(group(row("eager"), case="norm"), path)
    assert [one["case"] for one in read(path)] == ["mlp", "norm"]
    assert not capsys.readouterr().err
    # a line that lacks its end alone is whole
    path.write_bytes(whole[:-1])
    append(group(row("eager"), case="norm"), path)
    assert [len(rows) for rows in groups(read(path))] == [2, 1]


def test_files_of_both_kinds_can_be_joined(tmp_path, capsys):
    path = write(tmp_path / "all.jsonl", group(row("eager"), row("ours")))
    append(fits(), path)
    # one file to itself: every line is one
    path.write_bytes(2 * path.read_bytes())
    assert command.main(["table", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("mlp, tiny: 48 tokens") == 1
    assert out.count("\nours ") == 1
    assert out.count("mlp, tiny: D = 32, F = 80, float32, in 1 MiB") == 1
    assert "ours: no room" in out
    assert command.main(["table", str(path), "--markdown"]) == 0
    assert "| eager | 96 | 1.000 | 2.000 | 48,000 |" in capsys.readouterr().out
    assert command.main(["plot", str(path)]) == 0
    drawn = {file.stem for file in tmp_path.glob("*.png")}
    assert {"mlp-tiny-32-48-float32", "capacity-mlp-tiny-32-1-float32"} <= drawn


def test_a_case_measured_twice_counts_once(tmp_path):
    path = write(tmp_path / "run.jsonl", group(row("eager", 1.0), row("gone")))
    append(group(row("eager", 2.0), date="2026-02-02T03:04:05+00:00"), path)
    append(group(row("eager", 3.0), device="another"), path)
    found = groups(read(path))
    assert [[one["name"] for one in rows] for rows in found] == [["eager"], ["eager"]]
    assert [rows[0]["both_ms"][0] for rows in found] == [2.0, 3.0]


@pytest.mark.parametrize("name", ["demo", "classics"])
def test_plot_redraws_the_pictures_of_demo_and_classics(name, tmp_path, capsys):
    record = Path(__file__).parents[2] / "bench" / "results" / f"{name}-cpu.json"
    assert command.main(["plot", str(record), f"--out={tmp_path}"]) == 0
    assert f"drew {name}-cpu.png" in capsys.readouterr().out
    assert (tmp_path / f"{name}-cpu.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    broken = json.loads(record.read_text()) | {"title": 3, "subtitle": 3}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(SystemExit):
        command.main(["plot", str(tmp_path / "broken.json")])
    assert "not a result of demo or classics" in capsys.readouterr().err
