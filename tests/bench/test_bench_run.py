"""`python -m bench run` at toy sizes: honest numbers, failures that stay alone."""

from __future__ import annotations

import math
import os
import time
from importlib.util import find_spec

import pytest
import torch
from support import HANGS
from torch import Tensor, nn

import fusedckpt
from bench import cases, implementations, jobs, measure, peers
from bench.__main__ import main
from bench.cases import LAYERS, SIZES
from bench.measure import Implementation, Work

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")
SEQ = 24
(SIZE,) = SIZES["tiny"]
F32 = 4
MLP = ("--case=mlp", "--repeat=1")
NORM = ("--case=rms_norm", "--repeat=1")


def rows_of(result: list[dict], case: str = "mlp") -> dict[str, dict]:
    rows = [line for line in result if line["case"] == case]
    return {row["name"]: row for row in rows if row["failure"] != "not installed"}


@pytest.fixture(scope="module")
def result(tmp_path_factory, bench_run):
    status, result = bench_run(tmp_path_factory.mktemp("run"), "--repeat=1")
    assert status == 0
    return result


def test_every_line_names_what_a_number_needs(result):
    assert list(dict.fromkeys(line["case"] for line in result)) == list(cases.CASES)
    for line in result:
        assert line["torch"] == torch.__version__
        assert line["paths"] == fusedckpt.backends("cpu", torch.float32)
        assert {"device", "driver", "date", "commit", "python", "triton"} <= line.keys()
        assert (line["dtype"], line["size"]) == ("float32", "tiny")
        assert (line["dim"], line["hidden"], line["tokens"]) == (SIZE.dim, SIZE.hidden, SIZE.tokens)
        case = cases.CASES[line["case"]]
        assert line["seq"] == ((48 if case.has_context else SEQ) if case.sequences else None)
        assert min(line["matmul_tflops"], line["copy_gbytes"]) > 0


@pytest.mark.parametrize("name", cases.CASES)
def test_every_case_is_checked_weighed_and_timed(result, name):
    levels = cases.CASES[name].levels
    ours = [f"fusedckpt {level}" for level in levels] or ["fusedckpt"]
    rows = rows_of(result, name)
    assert {"eager", *ours} <= rows.keys()
    counts = {"stack": 11, "decoder_layer": 7, "attention": 10}
    counts["experts"] = 5 + 2 * (find_spec("transformers") is not None)
    counts["head"] = 3 + hasattr(nn, "LinearCrossEntropyOptions")
    assert len(rows) == counts.get(name, 2 + len(ours))
    for way, row in rows.items():
        assert row["failure"] is None
        assert len(row["errors"]) >= 3
        # torch 2.14's own head has made its gradients in forward
        assert 0 < row["backward_peak_bytes"] <= row["peak_bytes"] or way == "torch's"
        for times in (row["forward_ms"], row["backward_ms"], row["both_ms"]):
            assert len(times) == 1
            assert min(times) > 0
    saved = [rows[way]["saved_bytes"] for way in (*ours, "eager")]
    # linear_act saves x and z at its last level, as eager does
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
        ("experts", "checkpoint", SIZE.dim),
        ("attention", "ours(eager)", SIZE.dim),
        # attention's output and its log-sum-exp
        ("attention", "ours(fused) regions", 2 * SIZE.dim + SIZE.dim // SIZE.head_dim),
        ("decoder_layer", "checkpoint", SIZE.dim),
        ("decoder_layer", "ours(fused)", SIZE.dim),
        ("stack", "ours(fused) one segment", SIZE.dim),
        ("stack", "torch(eager) one segment", SIZE.dim),
        ("stack", "ours(fused) per layer", LAYERS * SIZE.dim),
    ],
)
def test_saved_bytes_are_those_of_the_tables(result, case, way, elements):
    assert rows_of(result, case)[way]["saved_bytes"] == elements * F32 * SIZE.tokens


def test_attention_runs_again_where_nothing_saves_it(result):
    rows = rows_of(result, "attention")
    again = {"checkpoint", "ours(eager)", "ours(fused)"}
    found = {name: row["attentions"] for name, row in rows.items()}
    assert found == {name: 2 if name in again else 1 for name in rows}


def test_torch_compile_takes_part(tmp_path, bench_run, add_way, capsys):
    # the plain backend: no compiler of C++ is asked for
    add_way("torch.compile", lambda eager: torch.compile(eager, backend="aot_eager"))
    status, result = bench_run(tmp_path, *MLP, "--only=torch.compile")
    assert status == 0
    assert rows_of(result)["torch.compile"]["failure"] is None
    assert f"{SIZE.tokens} tokens, D = {SIZE.dim}, F = {SIZE.hidden}" in capsys.readouterr().out


def test_turns_rotate(monkeypatch):
    order, begun = [], []
    monkeypatch.setattr(Implementation, "time", lambda one, *args: order.append(one.name))
    case, device = cases.CASES["layer_norm"], torch.device("cpu")
    inputs = cases.draw(case, SIZE, 8, device, torch.float32)
    work, eager = Work(inputs, [torch.ones(8, SIZE.dim)], device), case.eager(SIZE)
    rivals = [Implementation(name, eager) for name in "abc"]
    measure.measure(work, rivals, eager, 1, lambda one: begun.append(one.name))
    assert "".join(order) == "abcbcacab"
    # numbers before and after memory and time
    assert "".join(begun) == "abcabc" + "abcbcacab" + "abc"


def test_variants_are_listed_where_kernels_are_compiled():
    def names(case: str) -> set[str]:
        return {one.name for one in implementations.implementations_of(case, SIZE, True)}

    assert {f"fusedckpt gate{kind}" for kind in ("", " split", " hybrid")} <= names("gated_mlp")
    assert "fusedckpt inputs fused" in names("linear_act")


def test_the_load_is_that_of_the_formulas():
    t, d, f, f32 = 48, SIZE.dim, SIZE.hidden, F32
    load = cases.load_of(cases.CASES["gated_mlp"], SIZE, t, torch.float32)
    weights = 3 * d * f * f32
    assert load["flops"] == 6 * t * d * f + 12 * t * d * f
    assert load["bytes"] == 2 * t * d * f32 + weights + 3 * t * d * f32 + 2 * weights
    layer = cases.load_of(cases.CASES["decoder_layer"], SIZE, t, torch.float32)
    gemms = 2 * t * (2 * d * d + 2 * d * SIZE.kv + 3 * d * f)
    # attention's two products, and the four of its gradients
    assert layer["flops"] == 3 * gemms + (4 + 8) * t * SEQ * d


def test_sizes_fit_their_cases():
    for size in (size for sizes in SIZES.values() for size in sizes):
        assert size.dim % size.head_dim == size.kv % size.head_dim == 0, size
        assert size.dim // size.head_dim % (size.kv // size.head_dim) == 0, size
    stack, (llama,) = cases.CASES["stack"], SIZES["llama-3-8b"]
    assert [stack.inputs(SIZE, 48 * n)[0] for n in (1, 3)] == [(2, 24, 32), (6, 24, 32)]
    assert [stack.inputs(llama, n)[0] for n in (10240, 3)] == [(5, 2048, 4096), (1, 3, 4096)]
    # what is no multiple would be cut into other sequences
    with pytest.raises(ValueError, match="3000 tokens are no multiple of 2048"):
        stack.inputs(llama, 3000)


def test_budgets_reach_the_compiler(monkeypatch):
    seen = []

    def compile_fx(graph, inputs):
        seen.append(torch._functorch.config.activation_memory_budget)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    for budget in (0.5, 0.0):
        compiled = implementations.compiled(budget)(torch.relu)
        assert compiled(torch.ones(2, requires_grad=True)).sum() == 2
    assert seen == [0.5, 0.0]


def test_names_choose_who_takes_part(tmp_path, bench_run):
    rows = rows_of(bench_run(tmp_path, *MLP, "--only=fusedckpt", "--skip=preact")[1])
    assert list(rows) == ["eager", "fusedckpt inputs"]


class Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 1.001


def after(calls: int, eager):
    """Return a function that raises once it has been called so often."""
    left = iter(range(calls))

    def fn(*inputs: Tensor) -> Tensor:
        if next(left, None) is None:
            raise RuntimeError("out of [memory]\nat a place")
        return eager(*inputs)

    return fn


def test_wrong_numbers_and_failures_cost_one_row(tmp_path, bench_run, add_way, capsys):
    add_way("off", lambda eager: lambda x, *weights: eager(Off.apply(x), *weights))
    add_way("nan", lambda eager: lambda *inputs: eager(*inputs) * math.nan)
    add_way("wide", lambda eager: lambda *inputs: eager(*inputs).double())
    for calls in (0, 3, 6):
        add_way(f"crash {calls}", lambda eager, calls=calls: after(calls, eager))
    # right at first, and wrong once it has been timed
    add_way("later", lambda eager: Later(eager))
    add_way("exit", lambda eager: lambda *inputs: (_ for _ in ()).throw(SystemExit(3)))
    status, result = bench_run(tmp_path, *MLP)
    rows = rows_of(result)
    assert status == 1
    # y, then dx
    assert rows["off"]["failure"].startswith("wrong: result 1 is off by ")
    assert rows["wide"]["failure"] == "wrong: result 0 is torch.float64, eager's torch.float32"
    wrong = {"off", "nan", "wide", "later"}
    assert {name for name, row in rows.items() if row["is_wrong"]} == wrong
    assert rows["crash 3"]["failure"] == "RuntimeError: out of [memory]"
    assert rows["exit"]["failure"] == "SystemExit: 3"
    for name in (*wrong, "crash 0", "crash 3", "crash 6", "exit"):
        assert rows[name]["both_ms"] is rows[name]["forward_ms"] is None
    assert rows["eager"]["both_ms"]
    assert rows["fusedckpt inputs"]["both_ms"]
    assert "off: wrong: result 1" in capsys.readouterr().out


class Later:
    def __init__(self, eager):
        self.eager, self.calls = eager, 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.eager(*inputs) * (1.0 if self.calls < 6 else 1.01)


def test_only_own_failures_and_wrong_numbers_fail_the_command(tmp_path, bench_run, add_way):
    def crash(eager):
        return after(0, eager)

    add_way("peer", crash)
    assert bench_run(tmp_path, *NORM, "--only=peer")[0] == 0
    add_way("ours(crash)", crash)
    assert bench_run(tmp_path, *NORM, "--only=crash")[0] == 1


def abort(*inputs: Tensor) -> None:
    os.abort()


def hang(*inputs: Tensor) -> None:
    time.sleep(3600)


class Crashing(jobs.Job):
    def implementations(self):
        fns = {"abort": abort, "leave": lambda *inputs: os._exit(3), "hang": hang}
        return [Implementation(name, fns.get(name, torch.relu)) for name in self.chosen.only]


def call(job, found, begin):
    for one in found:
        if one.failure is None:
            begin(one)
            if one.name == "eager" and not one.is_launched:
                raise measure.DeviceLost(f"{measure.NO_GRAPH}: it waits")
            one.fn(torch.ones(2))
    return {}


def described(job, one, facts):
    return {"name": one.name, "failure": one.failure}


def crashing(*names: str) -> tuple[jobs.Job, jobs.Measurement]:
    options = {"only": names, "device": "cpu", "dtype": "float32", "in_process": False}
    job = Crashing("rms_norm", "tiny", SIZE, 8, jobs.Namespace(**options, timeout=HANGS))
    return job, jobs.Measurement("x.jsonl", 1, call, described)


def test_what_kills_its_process_costs_one_row(capsys):
    rows = jobs.rows_of(*crashing("eager", "abort", "leave", "last"), [].append)
    assert {row["name"]: row["failure"] for row in rows} == {
        **{"eager": None, "last": None},
        **{"abort": "crashed: SIGABRT", "leave": "crashed: exit status 3"},
    }
    told = capsys.readouterr().err
    assert "abort crashed: SIGABRT; once more without it" in told
    assert "eager crashed: no CUDA graph: it waits; once more launched from Python" in told


def test_what_hangs_is_ended():
    job, measurement = crashing("hang")
    ended = jobs._isolated(lambda *said: None, 0.5, (measurement, job, {}))
    assert ended == "out of time after 0.5 s"


def test_a_process_of_its_own_measures_the_same(tmp_path):
    argv = ["run", "--device=cpu", "--size=tiny", *NORM, "--only=eager", f"--out={tmp_path}"]
    assert main(argv) == 0
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1


@pytest.fixture
def at_commit(monkeypatch):
    return lambda name: monkeypatch.setattr("bench.env.commit", lambda: name)


def test_resuming_measures_who_was_not(
    tmp_path, bench_run, at_commit, add_way, monkeypatch, capsys
):
    at_commit("one")
    peer = peers.Peer("Late", "no_such_package", "rms_norm", torch.relu)
    monkeypatch.setattr(peers, "PEERS", (peer,))

    def count(*options: str) -> int:
        return len(bench_run(tmp_path, *NORM, *options, "--resume")[1])

    assert count("--only=checkpoint") == 2
    assert count() == 2 + 4
    # of some of those who were measured nothing is left
    assert count("--only=checkpoint") == 6
    assert "nothing left to measure" in capsys.readouterr().out
    # nor of an implementation that failed for good
    add_way("crash", lambda eager: after(0, eager))
    assert count() == count() == 6 + 5
    # what is installed now can be measured; more rounds, another commit
    monkeypatch.setattr(peers, "PEERS", (peer._replace(package="torch"),))
    assert count() == 11 + 5
    assert count("--only=eager", "--repeat=2") == 17
    at_commit("two")
    assert count("--only=eager") == 18
    # a dirty checkout names nothing
    at_commit("two-dirty")
    assert count("--only=eager") == 19
    assert "nothing counts as measured before" in capsys.readouterr().out
    # without --resume earlier rows go
    assert len(bench_run(tmp_path, *NORM, "--only=eager")[1]) == 1


def test_an_interrupt_takes_nothing_away(tmp_path, bench_run, monkeypatch):
    _, first = bench_run(tmp_path, *NORM, "--only=eager")

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Implementation, "time", interrupt)
    assert bench_run(tmp_path, *NORM, "--only=eager") == (130, first)


def test_profile_lists_what_runs(tmp_path, bench_run, capsys):
    status, result = bench_run(tmp_path, *NORM, "--only=fusedckpt", "--profile")
    assert status == 0
    out = capsys.readouterr().out
    assert "kernels of fusedckpt\n" in out
    assert "kernels of eager" not in out
    for row in rows_of(result, "rms_norm").values():
        names, launches, us = zip(*row["kernels"], strict=True)
        assert any(name.startswith("aten::") for name in names)
        assert min(launches) >= 1
        assert list(us) == sorted(us, reverse=True)
    # rows that list no kernels are not what is asked for
    assert bench_run(tmp_path, *NORM, "--only=fusedckpt", "--profile")[0] == 0
