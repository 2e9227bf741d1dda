"""Experts beside a loop over them: values and gradients, saved bytes, FLOPs, peaks, refusals."""

from itertools import product

import pytest
import torch
from expert_calls import HIDDEN, LEVELS, RANK, D, E, K, T, adapters, both, leaves, loop, routing
from quantized_weight import forget, quantize
from support import DEVICE, HALF, compare, flops, gemm_flops, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import ClampedSwiGLU, Experts, LoRA, QuantizedWeight, reference
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.blocks import run
from fusedckpt.functional import experts, gated_mlp
from fusedckpt.kernels import routed
from fusedckpt.kernels.grouped_gemm import grouped_gemm, grouped_grad
from fusedckpt.memory import peak_bytes


@pytest.mark.parametrize("kind", ["plain", "bias-chunks", "GptOss", "transposed", "clamped"])
def test_equals_the_loop(kind):
    with forced_path("aten"):
        for save, dtype in product(LEVELS, (torch.float32, *HALF)):
            agree(kind, save, dtype)


@pytest.mark.parametrize(
    ("kind", "save", "dtype"),
    [
        ("plain", "inputs", torch.bfloat16),
        ("bias-chunks", "preact", torch.float16),
        ("GptOss", "gate", torch.bfloat16),
        ("transposed", "inputs", torch.float32),
    ],
    ids=str,
)
def test_kernels_equal_the_loop(kind, save, dtype):
    """With a route that a kernel reads, where torch has none: rows of no expert are arbitrary."""
    agree(kind, save, dtype)


def agree(kind, save, dtype):
    options = {
        "plain": {},
        "bias-chunks": {"chunks": 3},
        "GptOss": {"activation": ClampedSwiGLU(limit=1 + 1 / 64), "is_transposed": True},
        "transposed": {"is_transposed": True, "chunks": 2},
        "clamped": {"activation": ClampedSwiGLU(1.0, 33 / 64, 0.0, is_interleaved=False)},
    }[kind]
    ours, eager = both(routing(T, foreign=2), save=save, **options)
    shape = {"bias": kind in ("bias-chunks", "GptOss"), "dtype": dtype}
    shape["turns"] = options.get("is_transposed", False)

    def inputs():
        drawn = leaves(**shape)
        return with_exact_gates(*drawn) if "activation" in options else drawn

    compare(ours, eager, inputs)


def with_exact_gates(x, scores, gate_up, down, *biases):
    """Round inputs so that gates and ups are multiples of 1/32, exact in every dtype below 8.

    No such value is at a limit of an odd number of 1/64. There a gradient passes or not by the last
    bit of a rounded sum, and the error of either side is luck.
    """

    def multiples(t, step):
        return (t.detach() / step).round().mul(step).requires_grad_()

    rounded = [multiples(x, 1 / 4), scores, multiples(gate_up, 1 / 8), down]
    return rounded + [multiples(b, 1 / 32) for b in biases]


@pytest.mark.parametrize(
    ("rows", "num", "top_k"),
    [((T,), 1, 1), ((T,), 5, 1), ((2, 7), 3, 3), ((1,), 4, 2), ((), 4, 2), ((0,), 4, 2)],
    ids=str,
)
def test_sizes(rows, num, top_k):
    """One expert, one expert a token, all experts, one token, none; second derivatives, too."""
    index = torch.randint(0, num, (*rows, top_k), device=DEVICE).int()
    ours, eager = both(index)
    with forced_path("aten"):
        compare(ours, eager, lambda: leaves(rows, num=num, top_k=top_k))
    given = [t.detach().double().requires_grad_() for t in leaves(rows, 2, 3, num, top_k)]
    assert torch.autograd.gradgradcheck(ours, given)


def test_scores_wider_than_x(path):
    """Of float64, where derivatives in float32 must not become so."""
    index = routing(T)

    def inputs():
        x, scores, *weights = leaves(bias=True, dtype=torch.bfloat16)
        return [x, scores.detach().double().requires_grad_(), *weights]

    for activation in ("gelu", "silu"):
        ours, _ = both(index, activation=activation)
        given = inputs()
        found = torch.autograd.grad(ours(*given).sum(), given)
        assert [t.dtype for t in found] == [t.dtype for t in given]
    compare(*both(index), inputs)


@pytest.mark.parametrize("is_on", [False, True])
def test_transforms_with_narrow_scores(is_on):
    """torch's own ops neither round biases to them, nor concatenate them under autocast."""
    (x, scores, *weights), index = leaves(bias=True), routing(T)

    def total(x, bias):
        y = experts(x, index, scores.bfloat16(), *weights[:2], down_bias=bias)
        return (y * torch.arange(D, device=DEVICE)).sum()

    with torch.autocast(DEVICE.type, torch.float16, enabled=is_on):
        expected = torch.autograd.grad(total(x, weights[3]), (x, weights[3]))
        found = torch.func.grad(total, (0, 1))(x.detach(), weights[3].detach())
    torch.testing.assert_close(found, expected, **({"rtol": 1e-2, "atol": 0.1} if is_on else {}))


def test_kernels_take_no_rows_of_any_strides():
    """An empty tensor is contiguous however it lies."""
    rows, w = torch.empty_strided((0, 4), (0, 0), device=DEVICE), randn(E, 4, 4).detach()
    ends, dw = torch.zeros(E, dtype=torch.int32, device=DEVICE), w.clone()
    grouped_gemm(rows, w, ends, torch.empty(0, 4, device=DEVICE))
    grouped_grad(rows, rows, ends, dw, adds=True)
    assert torch.equal(dw, w)


def test_tokens_of_no_expert_add_nothing():
    index = torch.full((T, K), E, device=DEVICE)
    inputs = leaves(bias=True)
    y = both(index)[0](*inputs)
    assert not y.any()
    assert not any(grad.any() for grad in torch.autograd.grad(y.sum(), inputs))


@pytest.mark.parametrize("save", LEVELS)
def test_saved_bytes_and_flops(save, path):
    """2 D + 12 K bytes a token; 16 DFK FLOPs of backward where eager takes 12."""
    index, dtype = torch.rand(T, E, device=DEVICE).topk(K).indices, torch.bfloat16
    x, scores, *weights = leaves(dtype=dtype)
    weights = [nn.Parameter(w.detach()) for w in weights]

    def call(x, scores, index):
        return experts(x, index, scores, *weights, save=save)

    products = {"inputs": 0, "gate": 1, "preact": 2}[save]
    expected = T * (2 * D + 12 * K + products * 2 * HIDDEN * K)
    assert saved_bytes(call, [x, scores, index]) == expected
    unit = T * D * HIDDEN * K
    y = call(x, scores, index)
    assert flops(lambda: call(x, scores, index)) == 6 * unit
    inputs, dy = [x, scores, *weights], torch.ones_like(y)

    def backward():
        torch.autograd.grad(y, inputs, dy, retain_graph=True)

    assert flops(backward) == {"inputs": 16, "gate": 14, "preact": 12}[save] * unit
    if path == "aten" and DEVICE.type == "cpu":
        assert gemm_flops(backward) == flops(backward)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_nothing_twice_in_a_checkpoint(is_adapted):
    """A checkpoint's recompute saves z, and stops before the last GEMM."""
    index = torch.rand(T, E, device=DEVICE).topk(K).indices
    x, scores, *weights = leaves()
    weights = adapters() if is_adapted else weights

    def step(run):
        return flops(lambda: run(experts, x, index, scores, *weights).sum().backward())

    unit, low = T * D * HIDDEN * K, is_adapted * 2 * T * K * RANK
    # frozen weights have no gradient
    whole = (22 - 6 * is_adapted) * unit + low * (7 * D + 12 * HIDDEN)
    assert step(fusedckpt.checkpoint) == step(lambda fn, *args: fn(*args)) == whole
    # torch's cannot stop inside a function
    most = whole + 2 * unit + low * (2 * D + HIDDEN)
    assert step(lambda *args: checkpoint(*args, use_reentrant=False)) <= most


def test_grouped_mm_takes_its_place(monkeypatch):
    """The path of kernels, which runs on a CPU too: rows of no expert are left as they are."""
    monkeypatch.setattr(routed, "has_kernel", lambda *_: True)
    # nothing waits for the device, the gradients of biases neither
    monkeypatch.setattr(routed, "pieces_of", None)
    for options in ({}, {"save": "preact", "chunks": 2, "is_transposed": True}):
        ours, eager = both(routing(T, foreign=2), **options)
        turns = options.get("is_transposed", False)
        shape = {"d": 16, "f": 24, "bias": turns, "turns": turns}
        for rank in (0, RANK):
            compare(ours, eager, lambda shape=shape, rank=rank: leaves(**shape, rank=rank))


def test_chunks_count_rows_of_experts(monkeypatch):
    """Each row's temporaries are 3 D + 3 F wide; sums of weight gradients are no smaller here."""
    # of a size of its own: decisions are remembered by shapes
    tokens = T + 2
    monkeypatch.setattr(run, "CHUNK_BYTES", 4 * tokens * K * 3 * (D + HIDDEN) // 2)
    x, scores, *weights = leaves((tokens,))
    index = routing(tokens)
    assert experts(x, index, scores, *weights).grad_fn.call.chunks == 2
    with torch.autocast(DEVICE.type, torch.bfloat16):
        # half as large, and chunks would keep sums in float32
        assert experts(x, index, scores, *weights).grad_fn.call.chunks == 1


def test_chunks_bound_the_peak():
    """Backward's peak is at most 1.5 times that of a dense gated MLP of the same active width."""
    tokens, d, f, num, top_k = 1024, 32, 32, 4, 4
    index = torch.randint(0, num, (tokens, top_k), device=DEVICE)
    x, scores, *weights = leaves((tokens,), d, f, num, top_k)
    dense = [randn(top_k * f, d), randn(top_k * f, d), randn(d, top_k * f)]

    def peak(run, inputs):
        y = run()
        dy = torch.ones_like(y)
        return peak_bytes(lambda: torch.autograd.grad(y, inputs, dy), DEVICE)

    # slow in the interpreter
    with forced_path("aten"):
        limit = peak(lambda: gated_mlp(x, *dense), [x, *dense])
        whole, cut = (
            peak(lambda c=c: experts(x, index, scores, *weights, chunks=c), [x, scores, *weights])
            for c in (1, 4)
        )
    assert cut <= 1.5 * limit
    assert cut < whole / 2


def test_negative_index_under_compile():
    """Compiled code asserts, where a check that reads the index would wait for the device."""
    x, scores, *weights = leaves()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    compiled(x, routing(T), scores, *weights)
    if DEVICE.type == "cpu":
        # on a GPU the assertion ends the process
        with pytest.raises(RuntimeError, match="index must be at least 0"):
            compiled(x, torch.full((T, K), -1), scores, *weights)


def test_module():
    torch.manual_seed(0)
    module = Experts(E, D, HIDDEN, bias=True, save="preact", chunks=2).to(DEVICE)
    assert repr(module) == f"Experts({E}, {D}, {HIDDEN}, activation=silu, save=preact, chunks=2)"
    names = ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert list(module.state_dict()) == names
    x, scores, *_ = leaves()
    index, given = routing(T), [p.detach() for p in module.parameters()]
    expected = loop(x, index, scores, given[0], given[2], given[1], given[3])
    torch.testing.assert_close(module(x, index, scores), expected)
    for i, name in ((0, "gate_up_proj"), (2, "down_proj")):
        setattr(module, name, quantize(given[i]))
        given[i] = getattr(module, name).dequantize()
        forget()
    expected = loop(x, index, scores, given[0], given[2], given[1], given[3])
    torch.testing.assert_close(module(x, index, scores), expected)
    # what no gradient reads, x, is not saved
    expected = 4 * T * (K + 2 * HIDDEN * K) + 8 * T * K
    assert saved_bytes(module, [x, index, scores]) == expected


# nothing makes it dense
FLAT = QuantizedWeight(torch.Size((D, HIDDEN)), torch.float32, DEVICE, print)


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def broken(**fields):
    """Return gate_up as a record of which a part does not fit."""
    parts = {"A": (E, RANK, D), "B": (E, 2 * HIDDEN, RANK)}
    given = {key: torch.zeros(shape) for key, shape in parts.items()} | fields
    given["weight"] = torch.zeros(E, 2 * HIDDEN, D)
    return {"gate_up": LoRA(**{key: on_device(value) for key, value in given.items()})}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"index": torch.zeros(T, K)}, TypeError, "index must be int64 or int32"),
        ({"index": torch.zeros(T, 0).long()}, ValueError, r"index must be \[24, K\]"),
        ({"index": torch.zeros(T - 1, K).long()}, ValueError, r"index must be \[24, K\]"),
        ({"index": torch.full((T, K), -1)}, ValueError, "72 negative elements"),
        ({"index": None}, TypeError, "index must be a tensor"),
        ({"scores": torch.zeros(T, K + 1)}, ValueError, "scores must be"),
        ({"down": torch.zeros(D, HIDDEN)}, ValueError, r"down must be \[E, D, F\]"),
        (
            {"gate_up": torch.zeros(E, HIDDEN, D)},
            ValueError,
            r"\[6, 28, 10\], got .* \(x \[24, 10\]",
        ),
        ({"gate_up_bias": torch.zeros(E, 3)}, ValueError, r"gate_up_bias must be \[6, 28\]"),
        ({"down": torch.zeros(E, D, HIDDEN).half()}, TypeError, "x and down must share a dtype"),
        ({"activation": "swigly"}, ValueError, "activation must be one of"),
        ({"activation": ClampedSwiGLU("x")}, TypeError, r"activation.alpha must be a number"),
        ({"is_transposed": "no"}, TypeError, "is_transposed must be True or False"),
        (broken(A=torch.zeros(E, RANK, 9)), ValueError, r"gate_up.A must be \[6, 4, 10\]"),
        (broken(A=torch.zeros(RANK, D)), ValueError, r"gate_up.A must be \[6, r, 10\]"),
        (broken(B=torch.zeros(E, RANK, 28)), ValueError, r"gate_up.B must be \[6, 28, 4\]"),
        (broken(B=None), TypeError, "gate_up.B must be a tensor"),
        (broken(dropout=0.1), ValueError, "dropout of adapters must be 0, got 0.1"),
        ({"down": FLAT}, ValueError, r"down must be \[E, D, F\]"),
        ({"down": FLAT._replace(dense=None)}, TypeError, "down.dense must be a function"),
        ({"save": "all"}, ValueError, "save must be one of"),
        ({"chunks": 0}, ValueError, "chunks must be an integer from 1"),
    ],
    ids=str,
)
def test_refusals(change, error, says):
    if DEVICE.type == "cuda" and "negative" in says:
        pytest.skip("the device asserts, and is of no use to the process after that")
    x, scores, gate_up, down = leaves()
    given = {"index": routing(T), "scores": scores, "gate_up": gate_up, "down": down} | change
    given = {key: on_device(value) for key, value in given.items()}
    with pytest.raises(error, match=f"^experts: .*{says}"):
        experts(x, **given)


def test_gradients_of_weights_are_computed_one_after_the_other():
    """With few tokens they are the largest tensors of a backward; here they are added to others."""
    num_experts, d, f = 4, 64, 128
    weights = (
        nn.Parameter(torch.randn(num_experts, 2 * f, d, device=DEVICE)),
        nn.Parameter(torch.randn(num_experts, d, f, device=DEVICE)),
    )
    x, scores = randn(6, d), torch.rand(6, 2, device=DEVICE)
    index = torch.arange(12, device=DEVICE).view(6, 2) % num_experts

    def clear():
        for weight in weights:
            weight.grad = torch.zeros_like(weight)

    def loss(function=experts):
        return function(x, index, scores, *weights).sin().sum()

    with forced_path("aten"):
        clear()
        peak = peak_bytes(lambda: loss().backward())
        gate_up, down = (weight.nbytes for weight in weights)
        assert gate_up <= peak < gate_up + down
        expected = torch.autograd.grad(loss(reference.experts), weights)
        # a retained graph, and parts of it
        y = loss()
        grads = torch.autograd.grad(y, weights, retain_graph=True)
        torch.testing.assert_close(grads, expected)
        assert torch.equal(torch.autograd.grad(y, weights[0], retain_graph=True)[0], grads[0])
        clear()
        # a hook finds a whole gradient
        seen = []
        handle = weights[0].register_hook(lambda grad: seen.append(grad.untyped_storage().nbytes()))
        y.backward()
        handle.remove()
        assert seen == [gate_up]
        torch.testing.assert_close([weight.grad for weight in weights], [*grads])
