"""Contracts of all functions: values and gradients, no writes, the eager reference."""

import random
from functools import partial
from itertools import product

import pytest
import torch
from adapted_cases import ADAPTED, ALL
from cases import CASES
from support import DEVICE, HALF, as_tuple, compare, leaves_of, results, saved_bytes
from torch.utils.checkpoint import checkpoint

import fusedckpt
from fusedckpt.autograd import dispatch
from fusedckpt.blocks import layer_function

each = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
on_aten = pytest.mark.usefixtures("on_aten")
DTYPES = [torch.float32, *HALF, torch.float64]
SHAPES = [((1,), 128, 431), ((3, 5), 70, 45), ((2, 3, 7), 1, 17), ((), 17, 1), ((130,), 45, 130)]


def masks_of(case, most):
    """Return every mask over inputs; of more than `most`: each alone, all but each, and some."""
    count = case.num_inputs
    found = list(product((False, True), repeat=count))[1:]
    if count > most:
        some = random.Random(case.name).sample(found, 6)
        found = [mask for mask in found if sum(mask) in (1, count - 1) or mask in some]
    for mask in found:
        bits = iter(mask)
        yield tuple(shape is not None and next(bits) for shape in case.shapes((2,), 3, 4))


@each
@on_aten
def test_aten_matches_eager(case):
    for dtype in DTYPES:
        if dtype != torch.float64 or "split" not in case.name:
            compare(case.fused, case.eager, lambda dtype=dtype: case.inputs(dtype=dtype))
    for sizes in SHAPES if case in CASES else SHAPES[::2]:
        compare(case.fused, case.eager, lambda sizes=sizes: case.inputs(*sizes))


@pytest.mark.parametrize("index", range(len(ALL)), ids=lambda index: ALL[index].name)
def test_kernels_match_eager(index):
    """Of dtypes and of odd shapes, each case has some."""
    case = ALL[index]
    # test_experts.py has experts of several tiles; so many rows that few draws are enough scores
    sizes = {"rows": (33,), "d": 40, "f": 36} if "experts" in case.name else {}
    compare(case.fused, case.eager, lambda: case.inputs(**sizes, dtype=DTYPES[index % 3]))
    if case in CASES and "experts" not in case.name:
        compare(case.fused, case.eager, lambda: case.inputs(*SHAPES[index % 5]))


def assert_masks(case, most, dtype, sizes, **tolerances):
    """Hold the gradients of every mask against those of all inputs."""
    inputs = case.inputs(*sizes, dtype)
    douts = [torch.randn_like(y) for y in as_tuple(case.eager(*inputs))]
    expected = iter(results(case.eager, inputs, douts)[len(douts) :])
    expected = [None if x is None or not x.requires_grad else next(expected) for x in inputs]
    wanted = [x is not None and x.requires_grad for x in inputs]
    for mask in masks_of(case, most):
        mask = [a and b for a, b in zip(mask, wanted, strict=True)]
        given = [
            None if x is None else x.detach().requires_grad_(flag)
            for x, flag in zip(inputs, mask, strict=True)
        ]
        found = results(case.fused, given, douts)[len(douts) :]
        theirs = [grad for grad, flag in zip(expected, mask, strict=True) if flag]
        torch.testing.assert_close(found, theirs, **tolerances)


@each
@on_aten
def test_aten_takes_every_requires_grad_mask(case):
    assert_masks(case, 9 if case in CASES else 5, torch.float64, ((5,), 6, 7))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_requires_grad_masks_on_the_kernels(case):
    assert_masks(case, 3, torch.float32, ((9,), 17, 21), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [(0,), (3, 0, 2)], ids=str)
@each
def test_zero_rows(case, rows, path):
    inputs = case.inputs(rows)
    douts = [torch.empty_like(y) for y in as_tuple(case.eager(*inputs))]
    found, expected = (results(fn, inputs, douts) for fn in (case.fused, case.eager))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each
def test_nothing_given_is_written_and_a_rerun_has_the_same_bits(case, path):
    inputs = case.inputs((9,), 35, 37, torch.bfloat16)
    douts = [torch.randn_like(y) for y in as_tuple(case.eager(*inputs))]
    before = [None if x is None else x.detach().clone() for x in [*inputs, *douts]]
    outputs = as_tuple(case.fused(*inputs))
    versions = [None if x is None else x._version for x in inputs]
    kept = [y.detach().clone() for y in outputs]
    first, second = (
        torch.autograd.grad(outputs, leaves_of(inputs), douts, retain_graph=retain)
        for retain in (True, False)
    )
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, leaves_of(inputs), douts)
    assert versions == [None if x is None else x._version for x in inputs]
    for old, new in zip([*before, *kept], [*inputs, *douts, *outputs], strict=True):
        assert old is None or torch.equal(old, new)
    again = results(case.fused, inputs, douts)[len(outputs) :]
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@each
def test_a_result_may_be_written_in_place(case, path):
    inputs = case.inputs((9,), 5, 7)
    found = []
    for fn in (case.fused, case.eager):
        outputs = as_tuple(fn(*inputs))
        # the sum of an add form is kept, in eager too
        outputs[0].mul_(2)
        found.append(torch.autograd.grad(sum(y.sum() for y in outputs), leaves_of(inputs)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def drops_inputs(case, mask):
    """Whether level preact keeps too little for a double backward."""
    if case.name.startswith("linear_"):
        return not mask[1]
    if case.name.startswith("experts"):
        # of x, scores, two weights and their biases: the last bias alone does not read x
        return any(mask[:5]) and not mask[2]
    if case.name.startswith("mlp"):
        x, fc1, fc1_bias, fc2, _ = mask
        return (x or fc1_bias or fc2) and not fc1
    # of x, a layer norm's two, gate and up, all but the norm's bias have x saved
    return not any(mask[:-1][:2] + mask[:-1][3:] if "layer" in case.name else mask[:-1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@on_aten
def test_double_backward_of_every_mask(case):
    """Where a level did not keep x it raises, and says what to do."""
    for mask in masks_of(case, 6):
        inputs = case.inputs((3,), 4, 5, torch.float64, mask)
        wanted = leaves_of(inputs)
        if "preact" in case.name and drops_inputs(case, mask):
            with pytest.raises(RuntimeError, match="use save='inputs'"):
                torch.autograd.grad(case.fused(*inputs).sum(), wanted, create_graph=True)
            continue
        found = []
        for fn in (case.fused, case.eager):
            torch.manual_seed(1)
            outputs = [y for y in as_tuple(fn(*inputs)) if y.requires_grad]
            douts = [torch.randn_like(y).requires_grad_() for y in outputs]
            grads = torch.autograd.grad(outputs, wanted, douts, create_graph=True)
            total, by = sum(grad.sin().sum() for grad in grads), [*wanted, *douts]
            found.append([*grads, *torch.autograd.grad(total, by, materialize_grads=True)])
        torch.testing.assert_close(*found)


@each
@on_aten
def test_double_backward_runs_the_reference(case, monkeypatch):
    calls, reference_gradients = [], layer_function.reference_gradients
    monkeypatch.setattr(
        layer_function,
        "reference_gradients",
        lambda *args: calls.append(1) or reference_gradients(*args),
    )
    inputs = case.inputs((3,), 4, 5)
    sums = [y.sum() for y in as_tuple(case.fused(*inputs))]
    torch.autograd.grad(sums, leaves_of(inputs), retain_graph=True)
    assert not calls
    torch.autograd.grad(sums, leaves_of(inputs), create_graph=True)
    assert calls


@each
def test_keeps_nothing_without_grad_and_as_much_on_either_path(case):
    kept = []
    for forced in (None, "aten"):
        with dispatch.forced_path(forced):
            inputs = case.inputs((9,), 5, 7)
            with torch.no_grad():
                assert saved_bytes(case.fused, inputs) == 0
                assert all(not y.requires_grad for y in as_tuple(case.fused(*inputs)))
            with torch.inference_mode():
                assert saved_bytes(case.fused, inputs) == 0
            kept.append(saved_bytes(case.fused, inputs))
    assert kept[0] == kept[1] or "split" in case.name


@each
def test_torch_func_runs_the_reference(case):
    if "dropout" in case.name or "both" in case.name:
        pytest.skip("transforms draw torch's own")
    inputs = [None if x is None else x.detach() for x in case.inputs((6,), 5, 7, torch.float64)]
    index = tuple(i for i, x in enumerate(inputs) if x is not None and i not in frozen_of(case))

    def loss(fn, *args):
        return sum(y.square().sum() for y in as_tuple(fn(*args)))

    found, expected = (
        torch.func.grad(partial(loss, fn), index)(*inputs) for fn in (case.fused, case.eager)
    )
    torch.testing.assert_close(found, expected)
    in_dims = tuple(0 if i == 0 else None for i in range(len(inputs)))
    # a gate, a residual and an index are of all tokens
    if not any(word in case.name for word in ("add", "gated_rms", "experts")):
        rows = as_tuple(torch.func.vmap(case.fused, in_dims)(*inputs))
        torch.testing.assert_close(rows, as_tuple(case.eager(*inputs)))
    tangents = [None if x is None else torch.randn_like(x) for x in inputs]

    def jvp(fn):
        with torch.autograd.forward_ad.dual_level():
            duals = [
                x if x is None or i in frozen_of(case) else make_dual(x, t)
                for i, (x, t) in enumerate(zip(inputs, tangents, strict=True))
            ]
            return [torch.autograd.forward_ad.unpack_dual(y).tangent for y in as_tuple(fn(*duals))]

    make_dual = torch.autograd.forward_ad.make_dual
    torch.testing.assert_close(jvp(case.fused), jvp(case.eager))


def frozen_of(case):
    """Return the places of quantized weights."""
    return getattr(case, "frozen", ())


CHECKPOINTS = {
    "ours": fusedckpt.checkpoint,
    "stock": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


@each
def test_inside_checkpoints(case, path):
    """In each kind on ATen, in one on the kernels."""
    kinds = [*CHECKPOINTS.values()]
    for checkpointed in kinds if path == "aten" else [kinds[ALL.index(case) % len(kinds)]]:
        assert_checkpointed(case, checkpointed)


def assert_checkpointed(case, checkpointed):
    inputs = case.inputs((9,), 5, 7)
    outputs = as_tuple(case.fused(*inputs))
    douts = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, leaves_of(inputs), douts)

    def followed(*given):
        return tuple(y * 1 for y in as_tuple(case.fused(*given)))

    for fn in (case.fused, followed):
        again = as_tuple(checkpointed(fn, *inputs))
        # the reentrant one knows .backward() alone
        torch.autograd.backward(again, douts)
        for ours, theirs in zip(again, outputs, strict=True):
            assert torch.equal(ours, theirs)
        for leaf, grad in zip(leaves_of(inputs), expected, strict=True):
            assert torch.equal(leaf.grad, grad)
            leaf.grad = None


@each
def test_autocast_as_eager(case, path):
    if path == "triton" and (case in ADAPTED or CASES.index(case) % 2):
        pytest.skip("its kernels are those of other cases")

    def under(fn):
        def call(*inputs):
            if inputs[0].dtype == torch.float64:
                return fn(*inputs)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return fn(*inputs)

        return call

    # a tile of the interpreter each way: dtypes are asked about
    sizes = ((30,), 62, 60) if path == "triton" else ()
    compare(under(case.fused), under(case.eager), lambda: case.inputs(*sizes))


@each
@on_aten
def test_autocast_state_is_not_seen_in_backward(case):
    """A backward inside autocast computes what one outside does."""
    inputs = case.inputs((9,), 35, 37)
    wanted, outputs = leaves_of(inputs), as_tuple(case.fused(*inputs))
    douts = [torch.randn_like(y) for y in outputs]
    outside = torch.autograd.grad(outputs, wanted, douts, retain_graph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = torch.autograd.grad(outputs, wanted, douts, retain_graph=True)
        if "preact" in case.name and case in ADAPTED:
            # its second derivatives need an x that is not saved
            return
        twin = torch.autograd.grad(outputs, wanted, douts, create_graph=True)
    for a, b, c in zip(outside, inside, twin, strict=True):
        assert torch.equal(a, b)
        # float32 apart, not bfloat16 apart
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
