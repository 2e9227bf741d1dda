"""`python -m bench run` at toy sizes: every case, honest numbers, failures that stay alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusedckpt

pytest.importorskip("matplotlib", reason="needs the bench extra")


from bench import __main__ as command
from bench import cases, clock, implementations, jobs, measure, peers, run
from bench.cases import LAYERS
from bench.measure import Implementation, Work
from bench.results import append, groups, ratios, read
from bench.settings import SIZES

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")
TINY = ["run", "--in-process", "--device=cpu", "--size=tiny", "--repeat=3"]
SEQ = 24
(SIZE,) = SIZES["tiny"]
F32 = 4


def bench(out: Path, *options: str) -> tuple[int, list[dict]]:
    status = command.main([*TINY, *options, f"--out={out}"])
    lines = (out / "run.jsonl").read_text().splitlines()
    return status, [json.loads(line) for line in lines]


def rows_of(result: list[dict], case: str = "mlp") -> dict[str, dict]:
    rows = [line for line in result if line["case"] == case]
    return {row["name"]: row for row in rows if row["failure"] != "not installed"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    status, result = bench(tmp_path_factory.mktemp("run"))
    assert status == 0
    return result


@pytest.fixture
def add_way(monkeypatch):
    def add(name: str, wrap) -> None:
        monkeypatch.setitem(implementations.BASELINES, name, wrap)

    return add


def test_every_line_names_what_a_number_needs(result):
    assert list(dict.fromkeys(line["case"] for line in result)) == list(cases.CASES)
    for line in result:
        assert line["torch"] == torch.__version__
        assert line["paths"] == fusedckpt.paths("cpu", torch.float32)
        assert {"device", "driver", "date", "commit", "python", "triton"} <= line.keys()
        assert (line["dtype"], line["size"]) == ("float32", "tiny")
        assert (line["dim"], line["hidden"]) == (SIZE.dim, SIZE.hidden)
        assert line["tokens"] == line["checked_tokens"] == SIZE.tokens
        assert line["seq"] == (SEQ if cases.CASES[line["case"]].sequences else None)
        assert min(line["matmul_tflops"], line["copy_gbytes"]) > 0


@pytest.mark.parametrize("name", cases.CASES)
def test_every_case_is_checked_weighed_and_timed(result, name):
    levels = cases.CASES[name].levels
    ours = [f"fusedckpt {level}" for level in levels] or ["fusedckpt"]
    rows = rows_of(result, name)
    assert {"eager", *ours} <= rows.keys()
    assert len(rows) == {"stack": 11, "decoder_layer": 7}.get(name, 2 + len(ours))
    for row in rows.values():
        assert row["failure"] is None
        assert len(row["errors"]) >= 3
        assert 0 < row["backward_peak_bytes"] <= row["peak_bytes"]
        assert not row["is_graph"]
        for time in (row["forward_ms"], row["backward_ms"], row["both_ms"]):
            assert len(time) == 3
            assert min(time) > 0
    saved = [rows[way]["saved_bytes"] for way in (*ours, "eager")]
    # linear_act keeps x and z at its last level, as eager does
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]


@pytest.mark.parametrize(
    ("case", "way", "elements"),
    [
        ("mlp", "fusedckpt inputs", SIZE.dim),
        ("mlp", "fusedckpt preact", SIZE.dim + SIZE.hidden),
        ("mlp", "eager", SIZE.dim + 2 * SIZE.hidden),
        ("mlp", "checkpoint", SIZE.dim),
        ("gated_mlp", "fusedckpt gate", SIZE.dim + SIZE.hidden),
        ("gated_mlp", "fusedckpt preact", SIZE.dim + 2 * SIZE.hidden),
        ("gated_mlp", "eager", SIZE.dim + 4 * SIZE.hidden),
        ("norm_gated_mlp_residual", "fusedckpt inputs", SIZE.dim),
        ("norm_linear", "fusedckpt", SIZE.dim),
        # the sum, which is an output too
        ("add_rms_norm", "fusedckpt", SIZE.dim),
        ("decoder_layer", "checkpoint", SIZE.dim),
        ("decoder_layer", "ours(fused)", SIZE.dim),
        ("stack", "ours(fused) one segment", SIZE.dim),
        ("stack", "torch(eager) one segment", SIZE.dim),
        ("stack", "ours(fused) per layer", LAYERS * SIZE.dim),
    ],
)
def test_saved_bytes_are_those_of_the_tables(result, case, way, elements):
    assert rows_of(result, case)[way]["saved_bytes"] == elements * F32 * SIZE.tokens


def test_torch_compile_takes_part(tmp_path, add_way, capsys):
    # the plain backend: no compiler of C++ is asked for
    add_way("torch.compile", lambda eager: torch.compile(eager, backend="aot_eager"))
    status, result = bench(tmp_path, "--case=mlp", "--repeat=1")
    assert status == 0
    assert rows_of(result)["torch.compile"]["failure"] is None
    out = capsys.readouterr().out
    assert f"{SIZE.tokens} tokens, D = {SIZE.dim}, F = {SIZE.hidden}" in out
    assert "torch.compile" in out


def test_wrong_numbers_get_no_speed(tmp_path, add_way, capsys):
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override]
            return dy * 1.001

    add_way("off", lambda eager: lambda x, *weights: eager(Off.apply(x), *weights))
    add_way("nan", lambda eager: lambda *inputs: eager(*inputs) * math.nan)
    status, result = bench(tmp_path, "--case=mlp")
    row = rows_of(result)["off"]
    assert status == 1
    # y, then dx
    assert row["failure"].startswith("wrong: result 1 is off by ")
    assert row["is_wrong"]
    assert row["both_ms"] is row["forward_ms"] is row["saved_bytes"] is None
    assert "off: wrong: result 1" in capsys.readouterr().out
    assert rows_of(result)["nan"]["is_wrong"]
    assert rows_of(result)["eager"]["both_ms"]


@pytest.mark.parametrize("calls", [0, 3, 6])
def test_a_crash_loses_its_own_row_alone(tmp_path, add_way, capsys, calls):
    def crash(eager):
        left = iter(range(calls))

        def fn(*inputs: Tensor) -> Tensor:
            if next(left, None) is None:
                raise RuntimeError("out of [memory]\nat a place")
            return eager(*inputs)

        return fn

    add_way("crash", crash)
    status, result = bench(tmp_path, "--case=mlp")
    rows = rows_of(result)
    assert status == 0
    assert rows.pop("crash")["failure"] == "RuntimeError: out of [memory]"
    assert all(row["both_ms"] for row in rows.values())
    assert "crash: RuntimeError: out of [memory]" in capsys.readouterr().out


def test_inputs_that_cannot_be_made_lose_one_size(tmp_path, monkeypatch):
    def refuse(*args) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(jobs, "draw", refuse)
    status, result = bench(tmp_path, "--case=mlp")
    # eager's among them
    assert status == 1
    assert {row["failure"] for row in rows_of(result).values()} == {"MemoryError: no room"}


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


def test_turns_rotate(monkeypatch):
    order = []

    monkeypatch.setattr(Implementation, "time", lambda one, *args: order.append(one.name))
    case = cases.CASES["layer_norm"]
    inputs = cases.draw(case, SIZE, 8, torch.device("cpu"), torch.float32)
    work = Work(inputs, [torch.ones(8, SIZE.dim)], torch.device("cpu"))
    eager = case.eager(SIZE)
    rivals = [Implementation(name, eager) for name in "abc"]
    begun = []
    measure.measure(work, rivals, eager, 1, lambda one: begun.append(one.name))
    assert "".join(order) == "abcbcacab"
    assert "".join(begun) == "abcabc" + "abcbcacab" + "abc"
    assert len(begun) == 3 * (measure.OTHER_STEPS + 1)


def test_variants_are_listed_where_kernels_are_compiled():
    def names(case: str) -> set[str]:
        return {one.name for one in implementations.implementations_of(case, SIZE, True)}

    variants = {f"fusedckpt gate{variant}" for variant in ("", " split", " hybrid")}
    assert variants <= names("gated_mlp")
    assert "fusedckpt inputs fused" in names("linear_act")


def test_ratios_are_taken_within_rounds():
    assert ratios([2, 9, 6], [1, 9, 2]) == [2, 1, 3]


def test_the_load_is_that_of_the_formulas():
    t, d, f, f32 = 48, SIZE.dim, SIZE.hidden, F32
    load = cases.load_of(cases.CASES["gated_mlp"], SIZE, t, torch.float32)
    weights = 3 * d * f * f32
    assert load["flops"] == 6 * t * d * f + 12 * t * d * f
    assert load["bytes"] == 2 * t * d * f32 + weights + 3 * t * d * f32 + 2 * weights
    norm = cases.load_of(cases.CASES["add_rms_norm"], SIZE, t, torch.float32)
    assert norm["flops"] == 0
    # x, residual and weight, y and the sum; in backward the gradients of the former besides
    assert norm["bytes"] == (4 * t * d + d) * f32 + (6 * t * d + 2 * d) * f32
    layer = cases.load_of(cases.CASES["decoder_layer"], SIZE, t, torch.float32)
    gemms = 2 * t * (2 * d * d + 2 * d * SIZE.kv + 3 * d * f)
    # attention's two products, and the four of its gradients
    assert layer["flops"] == 3 * gemms + (4 + 8) * t * SEQ * d


def test_sizes_fit_their_cases():
    for name, sizes in SIZES.items():
        for size in sizes:
            assert size.dim % size.head_dim == size.kv % size.head_dim == 0, name
            assert size.dim // size.head_dim % (size.kv // size.head_dim) == 0, name
    assert cases.CASES["stack"].inputs(SIZES["llama-3-8b"][0], 65536)[0] == (32, 2048, 4096)


def test_budgets_reach_the_compiler(monkeypatch):
    seen = []

    def compile_fx(graph, inputs):
        seen.append(torch._functorch.config.activation_memory_budget)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    for budget in (0.5, 0.0):
        assert (
            implementations._compiled(budget)(torch.relu)(torch.ones(2, requires_grad=True)).sum()
            == 2
        )
    assert seen == [0.5, 0.0]
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_a_library_that_is_absent_is_a_line(tmp_path, monkeypatch, capsys):
    peer = peers.Peer("Absent", "no_such_package", "rms_norm", torch.relu)
    monkeypatch.setattr(peers, "PEERS", (peer, peer._replace(name="Gone")))
    status, result = bench(tmp_path, "--case=rms_norm", "--repeat=1")
    assert status == 0
    assert [line["failure"] for line in result][-2:] == ["not installed"] * 2
    assert "not installed: Absent, Gone" in capsys.readouterr().out


def test_a_peer_computes_with_weights_of_its_own_layout(tmp_path, monkeypatch):
    def packed(size, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)

    def broken(size, *inputs):
        raise ImportError("no such symbol")

    right = peers.Peer("packed", "torch", "gated_mlp", packed, **peers.GATED)
    swapped = right._replace(name="swapped", unpack=lambda grads: peers._split(grads, 1, (79, 81)))
    monkeypatch.setattr(
        peers, "PEERS", (right, swapped, peers.Peer("broken", "torch", "gated_mlp", broken))
    )
    status, result = bench(tmp_path, "--case=gated_mlp", "--repeat=1")
    rows = rows_of(result, "gated_mlp")
    assert status == 0
    assert rows["packed"]["both_ms"]
    assert (
        rows["packed"]["saved_bytes"]
        == 5 * SIZE.hidden * F32 * SIZE.tokens
        + (SIZE.dim * F32 * SIZE.tokens)
        - SIZE.hidden * F32 * SIZE.tokens
    )
    assert rows["swapped"]["failure"].startswith("RuntimeError")
    assert rows["broken"]["failure"] == "ImportError: no such symbol"
    assert rows["eager"]["both_ms"]


def test_numbers_are_checked_on_what_fits(monkeypatch):
    case, eager = cases.CASES["add_rms_norm"], cases.CASES["add_rms_norm"].eager(SIZE)
    inputs = cases.draw(case, SIZE, 8, torch.device("cpu"), torch.float32)
    work = Work(inputs, [torch.ones(8, SIZE.dim)] * 2, torch.device("cpu"), 2)
    results = Work.results

    def limited(self, fn):
        if self.inputs[0].dtype == torch.float64 and len(self.inputs[0]) > 3:
            raise torch.OutOfMemoryError("too large")
        return results(self, fn)

    monkeypatch.setattr(Work, "results", limited)
    rival = Implementation("rival", eager)
    assert measure.measure(work, [rival], eager, 1, lambda _: None) == 2
    assert rival.failure is None
    assert len(rival.samples) == 1


def test_names_choose_who_takes_part(tmp_path):
    options = ("--case=mlp", "--repeat=1", "--only=fusedckpt", "--skip=preact")
    assert list(rows_of(bench(tmp_path, *options)[1])) == ["eager", "fusedckpt inputs"]


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


def test_it_fails_where_eager_or_ours_raises(tmp_path, add_way):
    def refuse(*inputs: Tensor) -> Tensor:
        raise RuntimeError("no")

    for name, expected in (("library", 0), ("torch.compile", 0), ("ours(x)", 1), ("eager", 1)):
        add_way(name, lambda eager: refuse)
        status, _ = bench(tmp_path, "--case=rms_norm", "--repeat=1", "--skip=fusedckpt")
        assert status == expected, name


def test_who_wishes_to_exit_loses_its_row(tmp_path, add_way):
    add_way("exit", lambda eager: lambda *inputs: exit("enough"))
    status, result = bench(tmp_path, "--case=rms_norm", "--repeat=1")
    assert status == 0
    assert rows_of(result, "rms_norm")["exit"]["failure"] == "SystemExit: enough"
    assert rows_of(result, "rms_norm")["fusedckpt"]["both_ms"]


def test_a_lost_device_costs_a_row(tmp_path, add_way, monkeypatch, capsys):
    def fault(*inputs: Tensor) -> Tensor:
        # as any later call for the device does then
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", fault)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    measured = jobs._measure

    def in_another_process(*args) -> None:
        # which has a device
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        measured(*args)

    monkeypatch.setattr(jobs, "_measure", in_another_process)
    add_way("fault", lambda eager: lambda *x: fault() if len(x) == 2 else eager(*x))
    status, result = bench(tmp_path, "--case=rms_norm", "--case=layer_norm", "--repeat=1")
    why = "crashed: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert status == 0
    assert rows_of(result, "rms_norm")["fault"]["failure"] == why
    assert rows_of(result, "rms_norm")["fusedckpt"]["both_ms"]
    assert rows_of(result, "layer_norm")["fault"]["both_ms"]
    assert f"fault {why}; once more without it" in capsys.readouterr().err


def test_numbers_are_checked_after_timing_too(tmp_path, add_way):
    def from_call(first: int, change):
        def wrap(eager):
            calls = iter(range(first))
            return lambda *inputs: (
                change(eager, *inputs) if next(calls, None) is None else eager(*inputs)
            )

        return wrap

    def double(eager, x: Tensor, *rest: Tensor) -> Tensor:
        y = eager(x, *rest)
        # as a kernel writes, unseen by autograd
        x.data.mul_(2)
        return y

    for first in (1, 4):
        add_way(f"off {first}", from_call(first, lambda eager, *inputs: 1.01 * eager(*inputs)))
        add_way(f"writes {first}", from_call(first, double))
    status, result = bench(tmp_path, "--case=layer_norm")
    rows = rows_of(result, "layer_norm")
    assert status == 1
    for first in (1, 4):
        assert rows[f"off {first}"]["failure"].startswith("wrong: result 0 is off by ")
        assert rows[f"writes {first}"]["failure"] == "wrong: it overwrites input 0"
        assert rows[f"off {first}"]["both_ms"] is rows[f"writes {first}"]["both_ms"] is None
    assert rows["eager"]["both_ms"]
    assert rows["fusedckpt"]["both_ms"]


def test_inputs_that_change_for_once_are_nobodys_numbers(tmp_path, add_way):
    calls = iter(range(1000))

    def once(eager):
        def fn(x: Tensor, *rest: Tensor) -> Tensor:
            y = eager(x, *rest)
            if next(calls) == 5:
                x.data.add_(1)
            return y

        return fn

    add_way("once", once)
    status, result = bench(tmp_path, "--case=rms_norm")
    assert status == 1
    assert {row["both_ms"] for row in rows_of(result, "rms_norm").values()} == {None}


def test_another_dtype_is_wrong(tmp_path, add_way):
    add_way("wide", lambda eager: lambda *inputs: eager(*inputs).double())
    options = ("--case=rms_norm", "--case=gated_mlp", "--repeat=1")
    status, result = bench(tmp_path, *options)
    assert status == 1
    expected = "wrong: result 0 is torch.float64, eager's torch.float32"
    assert rows_of(result, "rms_norm")["wide"]["failure"] == expected


def test_ceilings_are_those_of_the_size(tmp_path, monkeypatch):
    shrinks = []

    def ceilings(device, dtype, shrink=1) -> tuple[float, float]:
        shrinks.append(shrink)
        return float(shrink), 1.0

    monkeypatch.setattr(clock, "ceilings", ceilings)
    sizes = ("--size=gpt2", "--tokens=2", "--tokens=4")
    _, result = bench(tmp_path, "--case=rms_norm", "--repeat=1", "--only=eager", *sizes)
    assert shrinks == [8, 1]
    assert {line["size"]: line["matmul_tflops"] for line in result} == {"tiny": 8, "gpt2": 1}


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


def test_results_survive_reading(result, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in result))
    found = groups(read(path))
    assert [rows[0]["case"] for rows in found] == list(cases.CASES)
    again = tmp_path / "again.jsonl"
    for rows in found:
        append(rows, again)
    assert [json.loads(line) for line in again.read_text().splitlines()] == result
    path.write_text('{"case": {}}\n')
    with pytest.raises(ValueError, match=r"run\.jsonl:1: not a result of bench run"):
        read(path)


@pytest.mark.parametrize("style", [(), ("--markdown",)])
def test_tables_come_from_files(result, tmp_path, capsys, style):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in result))
    assert command.main(["table", str(path), *style]) == 0
    out = capsys.readouterr().out
    assert "stack, tiny: 48 tokens, D = 32, F = 80, float32" in out
    assert "ours(fused) one segment" in out
    assert out.count("a large matmul") == 1
