"""What holds for every function alike: gradients for every mask, no writes, twins, ops, compile."""

from itertools import product

import pytest
import torch
from cases import CASES
from support import DEVICE, HALF, as_tuple, compare, randn, results, saved_bytes
from torch.utils.checkpoint import checkpoint

from fusedckpt.autograd import dispatch
from fusedckpt.blocks import block

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def masked(most: int) -> list:
    """Pair cases with masks: every one, or of more than `most` inputs each, and all but each."""
    pairs = []
    for case in CASES:
        # test_matches_eager has all
        masks = list(product((False, True), repeat=case.num_inputs))[1:-1]
        if case.num_inputs > most:
            masks = [m for m in masks if sum(m) in (1, case.num_inputs - 1)]
        pairs += [
            pytest.param(case, m, id=f"{case.name}-{''.join('01'[bit] for bit in m)}")
            for m in masks
        ]
    return pairs


def full_mask(case, mask):
    """Spread a mask over the inputs that are tensors."""
    bits = iter(mask)
    return tuple(shape is not None and next(bits) for shape in case.shapes((2,), 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64], ids=str)
@each
def test_matches_eager(case, dtype, path):
    if dtype == torch.float64 and "split" in case.name:
        pytest.skip("float64 has one variant")
    compare(case.fused, case.eager, lambda: case.inputs(dtype=dtype))


@pytest.mark.parametrize(("case", "mask"), masked(most=9))
def test_every_requires_grad_mask(case, mask):
    with dispatch.forced_path("aten"):
        compare(case.fused, case.eager, lambda: case.inputs(mask=full_mask(case, mask)))


@pytest.mark.parametrize(("case", "mask"), masked(most=3))
def test_requires_grad_masks_on_the_kernels(case, mask):
    compare(case.fused, case.eager, lambda: case.inputs(mask=full_mask(case, mask)))


@pytest.mark.parametrize(
    ("rows", "d", "f"),
    [((1,), 128, 431), ((3, 5), 70, 45), ((2, 3, 7), 1, 17), ((), 17, 1), ((130,), 45, 130)],
    ids=str,
)
@each
def test_odd_shapes(case, rows, d, f):
    compare(case.fused, case.eager, lambda: case.inputs(rows, d, f))


@pytest.mark.parametrize("rows", [(0,), (3, 0, 2)], ids=str)
@each
def test_zero_rows(case, rows, path):
    inputs = case.inputs(rows)
    found = results(
        case.fused, inputs, [torch.empty_like(y) for y in as_tuple(case.eager(*inputs))]
    )
    expected = results(
        case.eager, inputs, [torch.empty_like(y) for y in as_tuple(case.eager(*inputs))]
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@each
def test_nothing_given_is_written(case, path):
    inputs = case.inputs()
    douts = [torch.randn_like(y) for y in as_tuple(case.eager(*inputs))]
    before = [None if x is None else x.detach().clone() for x in [*inputs, *douts]]
    outputs = as_tuple(case.fused(*inputs))
    versions = [None if x is None else x._version for x in inputs]
    kept = [y.detach().clone() for y in outputs]
    torch.autograd.backward(outputs, douts)
    assert versions == [None if x is None else x._version for x in inputs]
    for old, new in zip([*before, *kept], [*inputs, *douts, *outputs], strict=True):
        assert old is None or torch.equal(old, new)


@each
def test_a_result_may_be_written_in_place(case, path):
    inputs = case.inputs((9,), 5, 7)
    leaves = [x for x in inputs if x is not None]
    found = []
    for fn in (case.fused, case.eager):
        outputs = as_tuple(fn(*inputs))
        # the sum of an add form is kept, in eager too
        outputs[0].mul_(2)
        found.append(torch.autograd.grad(sum(y.sum() for y in outputs), leaves))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@each
def test_backward_twice_gives_the_same_bits(case, path):
    inputs = case.inputs(dtype=torch.bfloat16)
    outputs = as_tuple(case.fused(*inputs))
    wanted = [x for x in inputs if x is not None]
    douts = [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, wanted, douts, retain_graph=True)
    second = torch.autograd.grad(outputs, wanted, douts)
    again = results(case.fused, inputs, douts)[len(outputs) :]
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@each
def test_gradcheck(case):
    inputs = case.inputs((3,), 4, 5, torch.float64)
    assert torch.autograd.gradcheck(case.fused, inputs)


@each
def test_gradgradcheck(case):
    inputs = case.inputs((3,), 4, 5, torch.float64)
    assert torch.autograd.gradgradcheck(case.fused, inputs)


def drops_inputs(case, mask):
    """Whether level preact keeps too little for a double backward."""
    if case.name.startswith("linear_act"):
        return not mask[1]
    if case.name.startswith("experts"):
        # of x, scores, two weights and their biases: the last bias alone does not read x
        return any(mask[:5]) and not mask[2]
    if case.name.startswith("mlp"):
        x, fc1, fc1_bias, fc2, _ = mask
        return (x or fc1_bias or fc2) and not fc1
    # of x, a layer norm's two, gate and up, all but the norm's bias have x saved
    return not any(mask[:-1][:2] + mask[:-1][3:] if "layer" in case.name else mask[:-1])


@pytest.mark.parametrize(("case", "mask"), masked(most=9))
def test_double_backward_of_every_mask(case, mask):
    """Where a level did not keep x it raises, and says what to do."""
    inputs = case.inputs((3,), 4, 5, torch.float64, full_mask(case, mask))
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if "preact" in case.name and drops_inputs(case, mask):
        with pytest.raises(RuntimeError, match="use save='inputs'"):
            torch.autograd.grad(case.fused(*inputs).sum(), wanted, create_graph=True)
        return
    found, expected = [], []
    for fn, into in ((case.fused, found), (case.eager, expected)):
        torch.manual_seed(1)
        outputs = [y for y in as_tuple(fn(*inputs)) if y.requires_grad]
        douts = [torch.randn_like(y).requires_grad_() for y in outputs]
        grads = torch.autograd.grad(outputs, wanted, douts, create_graph=True)
        second = torch.autograd.grad(
            sum(grad.sin().sum() for grad in grads), [*wanted, *douts], materialize_grads=True
        )
        into += [*grads, *second]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@each
def test_double_backward_runs_the_twin(case, monkeypatch):
    calls = []
    twin_gradients = block.twin_gradients
    monkeypatch.setattr(
        block, "twin_gradients", lambda *args: calls.append(1) or twin_gradients(*args)
    )
    inputs = case.inputs()
    wanted = [x for x in inputs if x is not None]
    outputs = as_tuple(case.fused(*inputs))
    torch.autograd.grad([y.sum() for y in outputs], wanted, retain_graph=True)
    assert not calls
    torch.autograd.grad([y.sum() for y in outputs], wanted, create_graph=True)
    assert calls


@each
def test_one_tensor_in_two_places(case):
    """Gradients of one tensor given twice add up, also through the double backward."""
    if not case.name.startswith("linear_act") or "no-bias" in case.name:
        pytest.skip("its inputs are not all of one shape")
    _, _, bias = case.inputs((45,), 45, 45, torch.float64)
    x = randn(45, 45, dtype=torch.float64)
    for create_graph in (False, True):
        ours, theirs = (
            torch.autograd.grad(fn(x, x, bias).square().sum(), x, create_graph=create_graph)[0]
            for fn in (case.fused, case.eager)
        )
        torch.testing.assert_close(ours, theirs)


@each
def test_keeps_nothing_without_grad(case, path):
    inputs = case.inputs()
    with torch.no_grad():
        assert saved_bytes(case.fused, inputs) == 0
        assert all(not y.requires_grad for y in as_tuple(case.fused(*inputs)))
    with torch.inference_mode():
        assert saved_bytes(case.fused, inputs) == 0


@each
def test_torch_func_runs_the_twin(case):
    inputs = case.inputs((6,), 5, 7, torch.float64)
    index = tuple(i for i, x in enumerate(inputs) if x is not None)

    def loss(fn, *args):
        return sum(y.square().sum() for y in as_tuple(fn(*args)))

    found = torch.func.grad(lambda *a: loss(case.fused, *a), index)(*inputs)
    expected = torch.func.grad(lambda *a: loss(case.eager, *a), index)(*inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    in_dims = tuple(0 if i == 0 else None for i in range(len(inputs)))
    # an index is of all tokens
    if "add" not in case.name and "experts" not in case.name:
        rows = as_tuple(torch.func.vmap(case.fused, in_dims)(*inputs))
        for ours, theirs in zip(rows, as_tuple(case.eager(*inputs)), strict=True):
            torch.testing.assert_close(ours, theirs)


@each
def test_forward_mode_runs_the_twin(case):
    inputs = case.inputs((6,), 5, 7, torch.float64)
    tangents = [None if x is None else torch.randn_like(x) for x in inputs]

    def jvp(fn):
        with torch.autograd.forward_ad.dual_level():
            duals = [
                None if x is None else torch.autograd.forward_ad.make_dual(x, t)
                for x, t in zip(inputs, tangents, strict=True)
            ]
            return [torch.autograd.forward_ad.unpack_dual(y).tangent for y in as_tuple(fn(*duals))]

    for ours, theirs in zip(jvp(case.fused), jvp(case.eager), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
@each
def test_compiles_without_a_graph_break(case, dynamic):
    torch._dynamo.reset()
    inputs = case.inputs((6,), 5, 7)
    douts = [torch.randn_like(y) for y in as_tuple(case.eager(*inputs))]
    compiled = torch.compile(case.fused, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = results(case.fused, inputs, douts)
    for ours, theirs in zip(results(compiled, inputs, douts), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@each
def test_inside_torchs_checkpoint(case, use_reentrant, path):
    inputs = case.inputs((9,), 5, 7)
    leaves = [x for x in inputs if x is not None]
    outputs = as_tuple(case.fused(*inputs))
    douts = [torch.randn_like(y) for y in outputs]
    expected = torch.autograd.grad(outputs, leaves, douts)
    again = as_tuple(checkpoint(case.fused, *inputs, use_reentrant=use_reentrant))
    # the reentrant one knows .backward() alone
    torch.autograd.backward(again, douts)
    for ours, theirs in zip(again, outputs, strict=True):
        assert torch.equal(ours, theirs)
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad)


@each
def test_autocast_as_eager(case, path):
    def under(fn):
        def call(*inputs):
            if inputs[0].dtype == torch.float64:
                return fn(*inputs)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return fn(*inputs)

        return call

    compare(under(case.fused), under(case.eager), lambda: case.inputs())


@each
def test_autocast_state_is_not_seen_in_backward(case):
    """A backward inside autocast computes what one outside does."""
    inputs = case.inputs()
    wanted = [x for x in inputs if x is not None]
    outputs = as_tuple(case.fused(*inputs))
    douts = [torch.randn_like(y) for y in outputs]
    outside = torch.autograd.grad(outputs, wanted, douts, retain_graph=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = torch.autograd.grad(outputs, wanted, douts, retain_graph=True)
        twin = torch.autograd.grad(outputs, wanted, douts, create_graph=True)
    for a, b, c in zip(outside, inside, twin, strict=True):
        assert torch.equal(a, b)
        # float32 apart, not bfloat16 apart
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


@each
def test_forced_aten_and_kernels_agree_on_what_is_kept(case):
    kept = []
    for forced in (None, "aten"):
        with dispatch.forced_path(forced):
            kept.append(saved_bytes(case.fused, case.inputs()))
    if "split" not in case.name:
        assert kept[0] == kept[1]
