"""`python -m bench capacity`: what fits is found and timed; failures and interrupts cost little."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the bench extra")


from bench import __main__ as command
from bench import capacity, cases, implementations
from bench.measure import Implementation
from bench.results import read
from bench.search import most
from bench.settings import SIZES

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")
MIB = 2**20
TINY = [
    *("capacity", "--in-process", "--device=cpu", "--size=tiny", "--memory=1", "--repeat=1"),
    "--case=gated_mlp",
]


@pytest.mark.parametrize("limit", [0, 9, 10, 19, 20, 25, 39, 77, 80, 115, 160, 333, 10_000])
def test_the_search_comes_within_an_eighth(limit):
    tried = []

    def fits(count: int) -> bool:
        tried.append(count)
        return 10 * count <= limit

    found = 10 * most(fits, precision=capacity.PRECISION)
    assert found <= limit
    assert limit < found + max(10, found / 8) or (limit < 10 and found == 0)
    assert len(set(tried)) == len(tried)


def test_sequences_are_as_long_for_everyone():
    (tiny,), (llama,) = SIZES["tiny"], SIZES["llama-3-8b"]
    stack = cases.CASES["stack"]
    assert [stack.inputs(tiny, 48 * n)[0] for n in (1, 3)] == [(2, 24, 32), (6, 24, 32)]
    assert [stack.inputs(llama, 2048 * n)[0] for n in (1, 5)] == [(1, 2048, 4096), (5, 2048, 4096)]
    assert stack.inputs(llama, 3)[0] == (1, 3, 4096)
    # what is no multiple would be cut into other sequences
    with pytest.raises(ValueError, match="3000 tokens are no multiple of 2048"):
        stack.inputs(llama, 3000)


def test_what_fits_is_found_and_timed(tmp_path, capsys):
    assert command.main([*TINY, f"--out={tmp_path}"]) == 0
    found = read(tmp_path / "capacity.jsonl")
    rows = {row["name"]: row for row in found if row["failure"] != "not installed"}
    assert list(rows) == [
        *("eager", "checkpoint", "fusedckpt inputs", "fusedckpt gate", "fusedckpt preact")
    ]
    for row in rows.values():
        tokens, peak = row["tokens"], row["peak_bytes"]
        assert tokens > 0
        assert tokens % 48 == 0
        # another eighth, or step, would not have fitted
        assert peak * (tokens + max(48, tokens / 8)) / tokens > MIB
        assert peak <= MIB
        assert len(row["both_ms"]) == 1
    assert rows["fusedckpt inputs"]["tokens"] > rows["checkpoint"]["tokens"]
    assert found[0]["torch"] == torch.__version__
    assert command.main(["plot", str(tmp_path / "capacity.jsonl")]) == 0
    (figure,) = tmp_path.glob("*.png")
    assert figure.name == "capacity-gated_mlp-tiny-32-1-float32.png"
    assert "gated_mlp, tiny: D = 32" in capsys.readouterr().out


def test_who_is_wrong_or_fails_has_no_capacity(tmp_path, monkeypatch):
    def limited(eager):
        def fn(x, *weights):
            if len(x) > 100:
                raise torch.OutOfMemoryError("no room")
            return eager(x, *weights)

        return fn

    monkeypatch.setitem(implementations.BASELINES, "limited", limited)
    monkeypatch.setitem(
        implementations.BASELINES, "off", lambda eager: lambda *inputs: 1.01 * eager(*inputs)
    )

    def crash(*inputs):
        raise ValueError("not on [this] device")

    monkeypatch.setitem(implementations.BASELINES, "crash", lambda eager: crash)
    options = ("--only=limited", "--only=off", "--only=crash", "--memory=8", f"--out={tmp_path}")
    assert command.main([*TINY, *options]) == 1
    rows = {row["name"]: row for row in read(tmp_path / "capacity.jsonl")}
    assert rows["limited"]["tokens"] == 96
    assert rows["limited"]["failure"] is None
    assert rows["off"]["failure"].startswith("wrong: result 0")
    assert rows["crash"]["failure"] == "ValueError: not on [this] device"
    assert rows["crash"]["both_ms"] is None
    assert rows["eager"]["tokens"] > 96


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    before, left = Implementation.time, iter(range(2 * 2 + 1))

    def interrupt(*args) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        before(*args)

    monkeypatch.setattr(Implementation, "time", interrupt)
    options = ("--case=mlp", "--only=checkpoint", "--repeat=5", f"--out={tmp_path}")
    assert command.main([*TINY, *options]) == 130
    found = read(tmp_path / "capacity.jsonl")
    assert [row["failure"] for row in found] == [None, "interrupted"]


def test_an_interrupt_shows_what_fits_and_keeps_what_there_was(tmp_path, monkeypatch, capsys):
    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Implementation, "time", interrupt)
    options = ("--case=mlp", "--only=checkpoint", f"--out={tmp_path}")
    assert command.main([*TINY, *options]) == 130
    found = read(tmp_path / "capacity.jsonl")
    out = capsys.readouterr().out
    assert all(f"{row['name']:<14}" in out and f"{row['tokens']:,}" in out for row in found)
    # nothing is known yet that could stand in its place
    monkeypatch.setattr(capacity.Capacity, "fit", interrupt)
    before = (tmp_path / "capacity.jsonl").read_text()
    assert command.main([*TINY, *options]) == 130
    assert (tmp_path / "capacity.jsonl").read_text() == before


def test_it_fails_where_ours_raises(tmp_path, monkeypatch, capsys):
    def crash(*inputs):
        raise ValueError("not here")

    monkeypatch.setitem(implementations.BASELINES, "ours(crash)", lambda eager: crash)
    assert command.main([*TINY, "--only=ours", f"--out={tmp_path}"]) == 1
    assert "ours(crash): ValueError: not here" in capsys.readouterr().out


def test_sizes_have_sequences_of_their_own(tmp_path, monkeypatch):
    least = {}

    def note(work, eager) -> None:
        least[work.inputs[0].shape[-1]] = work.tokens
        raise RuntimeError("enough")

    monkeypatch.setattr(capacity.Truth, "that_fits", note)
    command.main([*TINY, "--size=gpt2", "--case=rms_norm", f"--out={tmp_path}"])
    assert least == {32: 48, 768: 2048}


def test_memory_too_small_is_a_reason(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capacity, "MIB", 1)
    assert command.main([*TINY, "--only=eager", f"--out={tmp_path}"]) == 0
    assert "eager: not even 48 tokens fit" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["plot", str(tmp_path / "capacity.jsonl")])
    assert "nothing was measured" in capsys.readouterr().err
