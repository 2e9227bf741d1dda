"""Tensors that are not plain: of classes with ops of their own, nested, sharded, of inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import DEVICE, as_tuple, randn, saved_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zoo import SwiGLU

import fusedckpt
from fusedckpt import NormSpec, functional, reference

D, H, N = 4, 6, 3
KNOWN = (F.linear, F.rms_norm, F.layer_norm)


class Packed(Tensor):
    """A weight that only F.linear and the norms can read, as a quantized one is."""

    # whether anything else raises: not while modules are built
    strict = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KNOWN:
            args, kwargs = torch.utils._pytree.tree_map(unpacked, (args, kwargs or {}))
            return func(*args, **kwargs)
        if cls.strict:
            raise NotImplementedError(f"{func} of a packed weight")
        return super().__torch_function__(func, types, args, kwargs)


def unpacked(value: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor) / 2 if isinstance(value, Packed) else value


@pytest.fixture
def strict(monkeypatch):
    return lambda: monkeypatch.setattr(Packed, "strict", True)


def pack(weight: Tensor) -> Packed:
    return (weight.detach() * 2).as_subclass(Packed)


class RootNorm(nn.Module):
    """An RMSNorm of a class of its own, as models have it."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight, self.eps)


def fused(model: nn.Module) -> nn.Module:
    fusedckpt.fuse(model)
    assert type(model).__name__.startswith("Fused")
    return model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: fusedckpt.Linear(D, H, activation="gelu"),
    "RMSNorm": lambda: fusedckpt.RMSNorm(D, offset=1.0, cast="torch"),
    "LayerNorm": lambda: fusedckpt.LayerNorm(D),
    "MLP": lambda: fusedckpt.MLP(D, H, norm=nn.RMSNorm(D), residual=True),
    "GatedMLP": lambda: fusedckpt.GatedMLP(D, H, norm=nn.LayerNorm(D), save="preact"),
    "NormLinear": lambda: fusedckpt.NormLinear(nn.RMSNorm(D), nn.Linear(D, H), nn.Linear(D, N)),
    "Sequential": lambda: fusedckpt.Sequential(
        nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)
    ),
    "fused MLP": lambda: fused(SwiGLU(D, H)),
    "fused norm": lambda: fused(RootNorm()),
}


def matrices(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (child, name)
        for child in module.modules()
        for name, p in child._parameters.items()
        if p is not None
    ]


@pytest.mark.parametrize("name", MODULES)
def test_modules_run_what_they_stand_for(name, strict):
    """Each parameter in turn is of a class that knows F.linear and the norms alone."""
    torch.manual_seed(0)
    x = randn(N, D)
    for index in range(len(matrices(MODULES[name]()))):
        module = MODULES[name]().to(DEVICE)
        expected = as_tuple(module(x))
        child, key = matrices(module)[index]
        child._parameters[key] = pack(child._parameters[key])  # type: ignore[assignment]
        if key == "weight" and name == "RMSNorm":
            # eager adds the offset to it
            module.offset, expected = 0.0, as_tuple(F.rms_norm(x, (D,), module.weight))
        strict()
        found = as_tuple(module(x))
        Packed.strict = False
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.as_subclass(Tensor), other)
        torch.autograd.grad(sum(y.sum() for y in found), x)


def arguments() -> dict[str, list[Any]]:
    x, w, v = randn(N, D), randn(H, D), randn(D, H)
    return {
        "linear_act": [x, w, randn(H), "silu"],
        "mlp": [x, w, randn(H), v, randn(D), "gelu"],
        "gated_mlp": [x, w, randn(H, D), v],
        "norm_linear": [x, NormSpec("rms", randn(D, requires_grad=False)), [w, v.mT], None],
        "rms_norm": [x, (D,), randn(D)],
        "layer_norm": [x, (D,), randn(D), randn(D)],
    }


def replaced(args: list[Any], change: Callable[[Any], Any], index: int) -> list[Any]:
    """The arguments with one tensor, or the first of a list of them, changed."""
    value = args[index]
    new = [change(value[0]), *value[1:]] if isinstance(value, list) else change(value)
    return [*args[:index], new, *args[index + 1 :]]


def tensor_indices(args: list[Any]) -> list[int]:
    return [i for i, value in enumerate(args) if isinstance(value, (Tensor, list))]


@pytest.mark.parametrize("name", arguments())
def test_functions_run_the_eager_equivalent(name, strict):
    args = arguments()[name]
    for index in tensor_indices(args)[1:]:
        given = replaced(args, pack, index)
        plain = replaced(args, lambda value: value.detach(), index)
        expected = as_tuple(getattr(reference, name)(*plain))
        strict()
        found = as_tuple(getattr(functional, name)(*given))
        Packed.strict = False
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.as_subclass(Tensor), other)


def test_results_have_the_class_that_eager_gives_them():
    class Named(Tensor):
        pass

    x, w = randn(N, D).as_subclass(Named), randn(H, D)
    assert type(functional.linear_act(x, w)) is Named
    assert type(fusedckpt.MLP(D, H, device=DEVICE)(x)) is Named


def test_a_parameter_with_a_name_of_its_own_is_a_plain_one():
    class Sliced(nn.Parameter):
        pass

    w = Sliced(randn(H, D).detach())
    x = randn(N, D)
    assert saved_bytes(lambda x: functional.linear_act(x, w), [x]) == x.nbytes
    linear = fusedckpt.Linear(D, H, False, DEVICE, activation="gelu")
    linear.weight = w
    assert saved_bytes(linear, [x]) == x.nbytes


@pytest.fixture
def mesh():
    if DEVICE.type != "cpu":
        pytest.skip("one process of gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_dtensors(mesh):
    """Functions refuse them by name; modules run as their eager children do."""
    x, w = randn(N, D), randn(H, D)
    spread = distribute_tensor(w.detach(), mesh, [Shard(0)])
    for given in ((distribute_tensor(x, mesh, [Replicate()]), w), (x, spread)):
        with pytest.raises(TypeError, match=r"linear_act: (x|weight) .*a DTensor: pass its"):
            functional.linear_act(*given)
    for name, build in MODULES.items():
        module = build()
        expected = as_tuple(module(x))
        for child, key in matrices(module):
            local = child._parameters[key]
            assert local is not None
            spread = distribute_tensor(local.detach(), mesh, [Replicate()])
            child._parameters[key] = nn.Parameter(spread)
        found = as_tuple(module(distribute_tensor(x, mesh, [Replicate()])))
        for mine, other in zip(found, expected, strict=True):
            assert isinstance(mine, DTensor), name
            torch.testing.assert_close(mine.to_local(), other)
        found[0].sum().backward()
        assert all(p.grad is not None for p in list(module.parameters())[:1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_input(layout):
    rows = [randn(2, D), randn(N, D)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    with pytest.raises(TypeError, match=r"mlp: x must be a dense tensor, got a .*[nN]ested"):
        functional.mlp(x, randn(H, D), None, randn(D, H), None)
    linear = fusedckpt.Linear(D, H, device=DEVICE, activation="relu")
    block = fusedckpt.MLP(D, H, device=DEVICE, residual=True)
    chain = fusedckpt.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, N)).to(DEVICE)
    for module in (linear, block, chain):
        for mine, row in zip(module(x).unbind(), rows, strict=True):
            torch.testing.assert_close(mine, module(row))


def outcome(function: Callable[..., Any], args: list[Any]) -> list[Tensor] | str:
    """Outputs and gradients; or why there are none."""
    given = [v for a in args for v in (a if isinstance(a, list) else [a]) if isinstance(v, Tensor)]
    leaves = [v for v in given if v.requires_grad]
    try:
        ys = as_tuple(function(*args))
    except RuntimeError as error:
        return str(error)
    total = sum(y.sum() for y in ys)
    return [*ys, *(torch.autograd.grad(total, leaves) if leaves else ())]  # type: ignore[list-item]


def drawn(name: str) -> list[Any]:
    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    return [[*map(copied, a)] if isinstance(a, list) else copied(a) for a in arguments()[name]]


@pytest.mark.parametrize("name", arguments())
def test_inference_tensors(name, path):
    """Each argument in turn is one: ours works where eager does, and says what torch says."""
    indices = tensor_indices(arguments()[name])
    with torch.inference_mode():
        inference = drawn(name)
    # of the others: all, one after x, and none
    for kept in (indices, indices[1:2], indices[-1:], []):
        worked = []
        for index in indices:
            args = drawn(name)
            for other in set(kept) - {index}:
                for tensor in args[other] if isinstance(args[other], list) else [args[other]]:
                    tensor.requires_grad_()
            args[index] = inference[index]
            expected = outcome(getattr(reference, name), args)
            found = outcome(getattr(functional, name), args)
            if isinstance(expected, str):
                assert "Inference tensors cannot be saved for backward" in expected
                assert found == expected
            else:
                torch.testing.assert_close(found, expected)
                worked.append(index)
        assert worked == indices or kept


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch's RMSNorm refuses it there")
def test_a_norm_of_an_inference_tensor_before_a_layer():
    with torch.inference_mode():
        x = randn(N, D)
    norm, linear = fusedckpt.RMSNorm(D, device=DEVICE), fusedckpt.Linear(D, H, device=DEVICE)
    linear(norm(x)).sum().backward()
    expected = torch.autograd.grad(
        F.linear(F.rms_norm(x, (D,), norm.weight), linear.weight).sum(), norm.weight
    )
    torch.testing.assert_close(norm.weight.grad, expected[0])
