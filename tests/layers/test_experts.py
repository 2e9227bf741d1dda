"""Experts beside a loop over them: values and gradients, saved bytes, FLOPs, peaks, refusals."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from quantised_weight import Int8Rows, forget, quantise
from support import DEVICE, HALF, compare, flops, gemm_flops, randn, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt import ClampedSwiGLU, Experts, LoRA, QuantisedWeight
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.blocks import quantised, run
from fusedckpt.functional import experts, gated_mlp
from fusedckpt.kernels import routed
from fusedckpt.memory import peak_bytes

T, D, HIDDEN, E, K, RANK = 24, 10, 14, 6, 3, 4
LEVELS = ("inputs", "gate", "preact")


def loop(x, index, scores, gate_up, down, gate_up_bias=None, down_bias=None, **options):
    """What transformers' eager experts compute."""
    gating, turns = options.get("activation", "silu"), options.get("is_transposed", False)
    shape, x = x.shape[:-1], x.reshape(-1, x.shape[-1])
    index, scores = (t.reshape(-1, t.shape[-1]) for t in (index, scores))
    y = torch.zeros(len(x), down.shape[2 if turns else 1], dtype=x.dtype, device=x.device)
    for e in range(down.shape[0]):
        tokens, slot = torch.where(index == e)
        first, last = (w[e].t() if turns else w[e] for w in (gate_up, down))
        z = F.linear(x[tokens], first, None if gate_up_bias is None else gate_up_bias[e])
        if isinstance(gating, str):
            gate, up = z.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            gate, up = (z[..., ::2], z[..., 1::2]) if gating.is_interleaved else z.chunk(2, -1)
            gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
            h = (up + gating.offset) * (gate * torch.sigmoid(gate * gating.alpha))
        out = F.linear(h, last, None if down_bias is None else down_bias[e])
        y = y.index_add(0, tokens, (out * scores[tokens, slot, None]).to(y.dtype))
    return y.view(*shape, y.shape[-1])


def routing(*rows, num=E, top_k=K, foreign=0):
    """Draw an index; the second expert gets no token, and the first tokens no expert."""
    drawn = torch.rand(*rows, num + 1).topk(top_k + 1).indices
    index = torch.where(drawn == 1, num, drawn)[..., :top_k]
    index.view(-1, top_k)[:foreign] = num + 2
    return index.to(DEVICE)


def leaves(
    rows=(T,), d=D, f=HIDDEN, num=E, top_k=K, bias=False, turns=False, dtype=torch.float32, rank=0
):
    """Draw x, scores, two weights, each with A and B where there is a rank, and biases."""
    found = [randn(*rows, d, dtype=dtype), torch.rand(*rows, top_k, device=DEVICE)]
    found[1] = found[1].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    for n, k in ((2 * f, d), (d, f)):
        for sizes in ((n, k), *([(rank, k), (n, rank)] if rank else [])):
            w = randn(num, *(sizes[::-1] if turns else sizes), dtype=dtype).detach() / k**0.5
            found.append(w.requires_grad_())
    return found + ([randn(num, 2 * f, dtype=dtype), randn(num, d, dtype=dtype)] if bias else [])


def both(index, **options):
    """Return ours and the loop, which adds adapters to the weights, as functions of leaves."""

    def called(fn, **more):
        def call(x, scores, *rest):
            count = 3 if len(rest) > 4 else 1
            gate_up, down = (adapted(fn, *rest[i : i + count], **more) for i in (0, count))
            biases = zip(("gate_up_bias", "down_bias"), rest[2 * count :], strict=False)
            return fn(x, index, scores, gate_up, down, **dict(biases), **more)

        return call

    def adapted(fn, weight, a=None, b=None, is_transposed=False, **_):
        if a is None:
            return weight
        low_rank = a @ b if is_transposed else b @ a
        return (
            LoRA(weight, a, b, 1.5) if fn is experts else weight + 1.5 * low_rank.to(weight.dtype)
        )

    eager = {k: v for k, v in options.items() if k in ("activation", "is_transposed")}
    return called(experts, **options), called(loop, **eager)


@pytest.mark.parametrize("kind", ["plain", "bias-chunks", "GptOss", "transposed", "clamped"])
def test_equals_the_loop(kind):
    with forced_path("aten"):
        for save, dtype in product(LEVELS, (torch.float32, *HALF)):
            # gates at the limit go either way: other draws, other errors
            torch.manual_seed(0)
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
        "GptOss": {"activation": ClampedSwiGLU(limit=1.0), "is_transposed": True},
        "transposed": {"is_transposed": True, "chunks": 2},
        "clamped": {"activation": ClampedSwiGLU(1.0, 0.5, 0.0, is_interleaved=False)},
    }[kind]
    ours, eager = both(routing(T, foreign=2), save=save, **options)
    shape = {"bias": kind in ("bias-chunks", "GptOss"), "dtype": dtype}
    shape["turns"] = options.get("is_transposed", False)
    compare(ours, eager, lambda: leaves(**shape))


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


def adapters(dtype=torch.float32):
    """Draw gate_up and down as records of frozen weights."""
    found = [nn.Parameter(t.detach()) for t in leaves(dtype=dtype, rank=RANK)[2:]]
    return [LoRA(w.requires_grad_(False), a, b, 1.5) for w, a, b in (found[:3], found[3:])]


@pytest.mark.parametrize("save", LEVELS)
def test_bytes_and_flops_of_adapters(save, path):
    """They save nothing, and frozen weights take no GEMM for a gradient."""
    index, dtype = torch.rand(T, E, device=DEVICE).topk(K).indices, torch.bfloat16
    (x, scores, *_), weights = leaves(dtype=dtype), adapters(dtype)

    def call(x, scores, index):
        return experts(x, index, scores, *weights, save=save)

    products = {"inputs": 0, "gate": 1, "preact": 2}[save]
    expected = T * (2 * D + 12 * K + products * 2 * HIDDEN * K)
    assert saved_bytes(call, [x, scores, index]) == expected
    unit, low = T * D * HIDDEN * K, 2 * T * K * RANK
    # at "gate" gate and up have an adapter each
    sizes = [(HIDDEN, D)] * 2 if save == "gate" else [(2 * HIDDEN, D)]
    sizes.append((D, HIDDEN))
    assert flops(lambda: call(x, scores, index)) == 6 * unit + low * sum(n + k for n, k in sizes)
    y = call(x, scores, index)
    wanted = [x, scores, *(t for w in weights for t in (w.A, w.B))]

    def backward():
        torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)

    # dy B, that times A and x, x A' again, dy' that
    expected = 6 * unit + low * sum(2 * n + 3 * k for n, k in sizes)
    expected += (2 - products) * (2 * unit + low * HIDDEN)
    assert flops(backward) == expected
    if path == "aten" and DEVICE.type == "cpu":
        assert gemm_flops(backward) == expected


@pytest.mark.parametrize("kind", ["gate", "GptOss", "mixed"])
def test_adapters_equal_sums_of_weights(kind, path):
    """Adapters of another dtype are cast to that of the weight."""
    options, turns = {"save": "gate"}, kind == "GptOss"
    if turns:
        options |= {"activation": ClampedSwiGLU(limit=1.0), "is_transposed": True, "chunks": 2}
    ours, eager = both(routing(T, foreign=2), **options)

    def inputs():
        found = leaves(rank=RANK, bias=turns, turns=turns)
        if kind == "mixed":
            found = [t.bfloat16() if i in (0, 2, 5) else t for i, t in enumerate(found)]
        return [t.detach().requires_grad_() for t in found]

    compare(ours, eager, inputs)


def test_every_mask_of_adapters():
    """With weights frozen or not, at each level in turns; second derivatives, too."""
    shape = {"d": 3, "f": 2, "num": 3, "top_k": 2, "rank": 1}
    given = [t.detach().double().requires_grad_() for t in leaves((5,), **shape)]
    index = routing(5, num=3, top_k=2, foreign=1)
    expected = torch.autograd.grad(both(index)[1](*given).sin().sum(), given)
    for i, mask in enumerate(product((False, True), repeat=len(given) - 1)):
        # both weights have one flag
        wants = [*mask[:5], mask[2], *mask[5:]]
        inputs = [t.detach().requires_grad_(want) for t, want in zip(given, wants, strict=True)]
        y = both(index, save=LEVELS[i % 3])[0](*inputs)
        assert y.requires_grad == any(wants)
        if any(wants):
            found = torch.autograd.grad(y.sin().sum(), [t for t in inputs if t.requires_grad])
            known = [grad for grad, want in zip(expected, wants, strict=True) if want]
            torch.testing.assert_close(list(found), known)
    assert torch.autograd.gradgradcheck(both(index)[0], given)


@pytest.mark.parametrize("is_sliceable", [True, False])
@pytest.mark.parametrize("save", LEVELS)
def test_quantised_weights(save, is_sliceable, monkeypatch):
    """Dense while a GEMM reads them; of a class with slices one expert's at a time."""
    monkeypatch.setitem(quantised._registered, Int8Rows, (Int8Rows.dequantize, is_sliceable))
    index, (x, scores, *weights) = routing(T), leaves(dtype=torch.bfloat16)
    given = [quantise(w) for w in weights]
    dense = [(w.int_data.double() * w.scale.double()[..., None]) for w in given]
    lora = adapters(torch.bfloat16)[0]

    def call(fn, first, last, **options):
        def run(x, scores, index):
            a, b = lora.A.to(x.dtype), lora.B.to(x.dtype)
            weight = LoRA(first, a, b) if fn is experts else first.to(x.dtype) + b @ a
            return fn(
                x, index, scores, weight, last if fn is experts else last.to(x.dtype), **options
            )

        return run

    ours, eager = call(experts, *given, save=save), call(loop, *dense)
    compare(*(lambda *t, fn=fn: fn(*t, index) for fn in (ours, eager)), lambda: [x, scores])
    products = {"inputs": 0, "gate": 1, "preact": 2}[save]
    expected = T * (2 * D + 12 * K + products * 2 * HIDDEN * K)
    assert saved_bytes(ours, [x, scores, index]) == expected
    forget()
    y = ours(x, scores, index)
    y.sum().backward()
    # each was gone before the next was made, see `dequantize`
    assert Int8Rows.num_alive() == 0
    assert {rows for rows, _ in Int8Rows.sizes} == {1 if is_sliceable else E}
    forget()


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
        setattr(module, name, quantise(given[i]))
        given[i] = getattr(module, name).dequantize()
        forget()
    expected = loop(x, index, scores, given[0], given[2], given[1], given[3])
    torch.testing.assert_close(module(x, index, scores), expected)
    # what no gradient reads, x, is not saved
    expected = 4 * T * (K + 2 * HIDDEN * K) + 8 * T * K
    assert saved_bytes(module, [x, index, scores]) == expected


# nothing makes it dense
FLAT = QuantisedWeight(torch.Size((D, HIDDEN)), torch.float32, DEVICE, print)


def broken(**fields):
    """Return gate_up as a record of which a part does not fit."""
    parts = {"A": (E, RANK, D), "B": (E, 2 * HIDDEN, RANK)}
    given = {key: torch.zeros(shape, device=DEVICE) for key, shape in parts.items()}
    return {"gate_up": LoRA(torch.zeros(E, 2 * HIDDEN, D, device=DEVICE), **given | fields)}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"index": torch.zeros(T, K)}, TypeError, "index must be int64 or int32"),
        ({"index": torch.zeros(T, 0).long()}, ValueError, r"index must be \[24, 'K'\]"),
        ({"index": torch.zeros(T - 1, K).long()}, ValueError, r"index must be \[24, 'K'\]"),
        ({"index": torch.full((T, K), -1)}, ValueError, "72 negative elements"),
        ({"index": None}, TypeError, "index must be a tensor"),
        ({"scores": torch.zeros(T, K + 1)}, ValueError, "scores must be"),
        ({"down": torch.zeros(D, HIDDEN)}, ValueError, r"down must be \[E, D, F\]"),
        ({"gate_up": torch.zeros(E, HIDDEN, D)}, ValueError, r"gate_up must be \[6, 28, 10\]"),
        ({"gate_up_bias": torch.zeros(E, 3)}, ValueError, r"gate_up_bias must be \[6, 28\]"),
        ({"down": torch.zeros(E, D, HIDDEN).half()}, TypeError, "x and down must share a dtype"),
        ({"activation": "swigly"}, ValueError, "activation must be one of"),
        ({"activation": ClampedSwiGLU("x")}, TypeError, r"activation.alpha must be a number"),
        ({"is_transposed": "no"}, TypeError, "is_transposed must be True or False"),
        (broken(A=torch.zeros(E, RANK, 9)), ValueError, r"gate_up.A must be \[6, 4, 10\]"),
        (broken(A=torch.zeros(RANK, D)), ValueError, r"gate_up.A must be \[6, 'r', 10\]"),
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
    x, scores, gate_up, down = leaves()
    given = {"index": routing(T), "scores": scores, "gate_up": gate_up, "down": down} | change
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(error, match=f"^experts: .*{says}"):
        experts(x, **given)
