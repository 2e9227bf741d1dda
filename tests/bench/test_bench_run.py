"""`python -m bench run` at toy sizes: every case, honest numbers, failures that stay alone."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import fusedckpt

pytest.importorskip("matplotlib", reason="needs the bench extra")


from running import bench, rows_of

from bench import __main__ as command
from bench import cases, clock, implementations, measure, peers
from bench.cases import LAYERS
from bench.measure import Implementation, Work
from bench.results import append, groups, ratios, read
from bench.settings import SIZES

pytestmark = pytest.mark.usefixtures("aten", "uncompiled")
SEQ = 24
(SIZE,) = SIZES["tiny"]
F32 = 4


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    status, result = bench(tmp_path_factory.mktemp("run"))
    assert status == 0
    return result


def test_every_line_names_what_a_number_needs(result):
    assert list(dict.fromkeys(line["case"] for line in result)) == list(cases.CASES)
    for line in result:
        assert line["torch"] == torch.__version__
        assert line["paths"] == fusedckpt.paths("cpu", torch.float32)
        assert {"device", "driver", "date", "commit", "python", "triton"} <= line.keys()
        assert (line["dtype"], line["size"]) == ("float32", "tiny")
        assert (line["dim"], line["hidden"]) == (SIZE.dim, SIZE.hidden)
        assert line["tokens"] == line["checked_tokens"] == SIZE.tokens
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
    assert {name: row["attentions"] for name, row in rows.items()} == {
        name: 2 if name in again else 1 for name in rows
    }


def test_torch_compile_takes_part(tmp_path, add_way, capsys):
    # the plain backend: no compiler of C++ is asked for
    add_way("torch.compile", lambda eager: torch.compile(eager, backend="aot_eager"))
    status, result = bench(tmp_path, "--case=mlp", "--repeat=1")
    assert status == 0
    assert rows_of(result)["torch.compile"]["failure"] is None
    out = capsys.readouterr().out
    assert f"{SIZE.tokens} tokens, D = {SIZE.dim}, F = {SIZE.hidden}" in out
    assert "torch.compile" in out


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
