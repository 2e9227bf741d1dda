"""Sequential against nn.Sequential: results, saved bytes, FLOPs, layers hooked or replaced."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict

import pytest
import torch
from support import DEVICE, compare, flops, randn, saved_bytes
from swap_cases import D, F, assert_equal, rows
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode
from zoo import Doubled

import fusedckpt
from fusedckpt import Sequential, reference
from fusedckpt.kernels.activations import ACTIVATIONS
from fusedckpt.layers import sequential as sequential_file
from fusedckpt.layers.sequential import runs
from fusedckpt.memory import saved_tensors


def mlp(activation: nn.Module | None = None, bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(D, F, bias), activation or nn.GELU(), nn.Linear(F, D, bias)]


def sequential(*layers: nn.Module, save: str = "inputs") -> Sequential:
    return Sequential(*layers, save=save).to(DEVICE, torch.float64)


def kinds(model: nn.Sequential) -> str:
    return " ".join(run.kind for run in runs(model))


def assert_as_torch(model: Sequential, x: torch.Tensor | None = None) -> None:
    """Hold a model against nn.Sequential of its very layers."""
    assert_equal(model, nn.Sequential(*model), rows() if x is None else x)


def vit(p: float, between: nn.Module | None = None, norm: bool = True) -> list[nn.Module]:
    """Layers as ViTs in one nn.Sequential have them."""
    norms = [nn.LayerNorm(D)] if norm else []
    first, act, last = mlp()
    layers = [*norms, first, act, nn.Dropout(p), last, nn.Dropout(p)]
    return layers if between is None else [m for layer in layers for m in (layer, between)][:-1]


def used_twice() -> list[nn.Module]:
    linear = nn.Linear(D, D)
    return [linear, nn.Tanh(), linear]


def gemma_norm() -> nn.Module:
    return fusedckpt.RMSNorm(D, offset=1.0, cast="gemma")


def bare_norm() -> nn.Module:
    return nn.LayerNorm(D, eps=0.1, elementwise_affine=False)


# layers, what they run as, and the elements per row kept at inputs and, besides, at preact
PATTERNS = {
    "mlp": (mlp, "mlp", D, F),
    "layer norm, mlp": (lambda: [nn.LayerNorm(D), *mlp()], "mlp", D, F),
    "bare norm, mlp": (lambda: [bare_norm(), *mlp()], "mlp", D, F),
    "rms norm, mlp": (lambda: [nn.RMSNorm(D, eps=0.1), *mlp(nn.SiLU(), False)], "mlp", D, F),
    "gemma norm, mlp": (lambda: [gemma_norm(), *mlp()], "mlp", D, F),
    "linear_act": (lambda: mlp()[:2], "linear_act", D, F),
    "layer norm, linear": (lambda: [nn.LayerNorm(D), nn.Linear(D, F)], "norm_linear", D, 0),
    "gemma norm, linear": (lambda: [gemma_norm(), nn.Linear(D, F)], "norm_linear", D, 0),
    "norm, linear_act": (lambda: [gemma_norm(), *mlp()[:2]], "layer linear_act", D, F),
    "norm, linear after": (
        lambda: [*mlp(), nn.RMSNorm(D), nn.Linear(D, 3)],
        "mlp norm_linear",
        2 * D,
        F,
    ),
    "in-place activation first": (
        lambda: [nn.Linear(D, D), *mlp(nn.ReLU(inplace=True))],
        "layer mlp",
        2 * D,
        F,
    ),
    "dropout between": (
        lambda: [*mlp()[:2], nn.Dropout(0.0), nn.Linear(F, D)],
        "mlp",
        D,
        F,
    ),
    "dropouts and identities": (lambda: vit(0.0, nn.Identity()), "mlp", D, F),
    "two dropouts": (
        lambda: [*mlp()[:2], nn.Dropout(0.0), nn.Dropout(0.0), nn.Linear(F, D)],
        "linear_act layer layer layer",
        D + F,
        F,
    ),
    "dropout before": (lambda: [nn.Dropout(0.0), *mlp()], "layer mlp", D, F),
    "dropout after one linear": (
        lambda: [nn.Linear(D, F), nn.Dropout(0.0), nn.GELU()],
        "layer layer layer",
        D + F,
        0,
    ),
    # of three linears the last two: the first and its activation save x alone
    "three linears": (
        lambda: [nn.Linear(D, D), nn.ReLU(), nn.Dropout(0.0), *mlp()],
        "linear_act layer mlp",
        2 * D,
        D + F,
    ),
    "four linears": (
        lambda: [*mlp(), nn.Tanh(), *mlp()],
        "mlp layer mlp",
        2 * D,
        2 * F,
    ),
    "linear used twice": (used_twice, "mlp", D, D),
    "our linear": (lambda: [fusedckpt.Linear(D, F), *mlp()[1:]], "mlp", D, F),
    # keeps its input, as does the activation after it
    "our linear with an activation": (
        lambda: [fusedckpt.Linear(D, F, activation="silu"), *mlp()[1:]],
        "layer layer layer",
        D + 2 * F,
        0,
    ),
    "nothing to fuse": (lambda: [nn.Linear(D, D)], "layer", D, 0),
    "nested": (lambda: [Sequential(*mlp()), *mlp()], "layer mlp", 2 * D, F),
    "in pieces": (
        lambda: [nn.LayerNorm(D), nn.Sequential(*mlp()[:2]), nn.Sequential(*mlp()[2:])],
        "mlp",
        D,
        F,
    ),
    "in deep pieces": (
        lambda: [
            nn.Sequential(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, F)), nn.GELU()),
            nn.Linear(F, D),
        ],
        "mlp",
        D,
        F,
    ),
    "in pieces without a block between": (
        lambda: [nn.Sequential(*mlp()[:2]), nn.Linear(F, D), nn.SiLU(), nn.Linear(D, D)],
        "layer mlp",
        D + 2 * F,
        D,
    ),
    "empty": (list, "", 0, 0),
}


@pytest.mark.parametrize("save", ["inputs", "preact"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_results_and_saved_bytes(pattern, save):
    make, runs_as, kept, kept_preact = PATTERNS[pattern]
    model = sequential(*make(), save=save)
    assert kinds(model) == runs_as
    assert_as_torch(model)
    x = rows()
    wanted = 8 * len(x) * (kept + (kept_preact if save == "preact" else 0))
    assert saved_bytes(model, [x]) == wanted
    with torch.no_grad():
        torch.testing.assert_close(model(x), nn.Sequential(*model)(x))


RATES = [(0.4, 0.25), (0.4, 0.0), (0.0, 0.25), (1.0, 0.25), (0.4, 1.0)]
NORMS = {"none": None, "layer": nn.LayerNorm, "rms": nn.RMSNorm}


def dropping(rates, norm=None, inplace=False, activation=None) -> Sequential:
    first, act, last = mlp(activation)
    drops = [nn.Dropout(p, inplace) for p in rates]
    norms = [] if norm is None else [norm(D)]
    return Sequential(*norms, first, act, drops[0], last, drops[1]).to(DEVICE)


def seeded(fn, *given):
    torch.manual_seed(5)
    return fn(*given)


@pytest.mark.parametrize(
    ("rates", "norm"),
    [*((rates, "layer") for rates in RATES), (RATES[0], "none"), (RATES[0], "rms")],
    ids=str,
)
def test_dropouts_draw_as_the_reference(path, rates, norm):
    model = dropping(rates, NORMS[norm], inplace=True, activation=nn.ReLU(inplace=True))
    assert kinds(model) == "mlp"
    names = [name for name, _ in model.named_parameters()]
    kind = "rms" if norm == "rms" else "layer"

    def fused(x, *weights):
        named = dict(zip(names, weights, strict=True))
        return seeded(torch.func.functional_call, model, named, (x,))

    def eager(x, *weights):
        spec = None
        if norm != "none":
            spec = fusedckpt.NormSpec(kind, *weights[:-4], eps=model[0].eps)
        drops = {"dropout": rates[0], "output_dropout": rates[1]}
        return seeded(lambda: reference.mlp(x, *weights[-4:], "relu", norm=spec, **drops))

    def inputs():
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        return [randn(5, D), *weights]

    compare(fused, eager, inputs)
    given = inputs()
    assert torch.equal(fused(*given) == 0, eager(*given) == 0)
    seeds = sum(rate > 0 for rate in rates)
    assert saved_bytes(model, [randn(5, D)]) == 4 * 5 * D + 8 * seeds


def test_each_dropout_goes_by_its_own_mode():
    model = dropping((0.4, 0.25), nn.LayerNorm).double()
    x = rows()
    for hidden, last in ((False, False), (True, False), (False, True)):
        model[3].train(hidden)
        model[5].train(last)
        assert kinds(model) == "mlp"
        assert saved_bytes(model, [x]) == 8 * len(x) * D + 8 * (hidden + last)
    model.eval()
    assert_as_torch(model)
    model.train()
    model[3].p, model[5].p = 0.0, 0
    assert_as_torch(model)
    model[3].p = 1.5
    assert kinds(model) == "layer linear_act layer layer layer"


@pytest.mark.parametrize("level", [{"save": "preact"}, {"chunks": 2}], ids=str)
def test_levels_and_chunks_of_an_mlp_with_dropouts(level):
    model = dropping((0.4, 0.25), nn.RMSNorm).double()
    x, saved = rows(), 8 * 5 * (D + F * ("save" in level)) + 16
    plain = seeded(model, x)
    for key, value in level.items():
        setattr(model, key, value)
    torch.testing.assert_close(seeded(model, x), plain)
    assert saved_bytes(model, [x]) == saved


@pytest.mark.parametrize("name", [name for name, act in ACTIVATIONS.items() if act.module])
def test_every_activation_module(name):
    act = ACTIVATIONS[name]
    for module in (act.module(**act.module_state), nn.ReLU(True), nn.SiLU(True)):
        for length, kind in ((2, "linear_act"), (3, "mlp")):
            model = sequential(*mlp(module)[:length])
            assert kinds(model) == kind
            assert_as_torch(model)


@pytest.mark.parametrize("shape", [(D,), (0, D), (2, 3, D), (2, 1, 2, D)], ids=str)
def test_shapes(shape):
    x = randn(*shape, dtype=torch.float64)
    if len(shape) == 3:
        # a norm over two dimensions
        model = sequential(nn.LayerNorm((3, D)), *mlp())
        assert kinds(model) == "layer mlp"
        assert_as_torch(model, x)
    model = sequential(nn.LayerNorm(D), *mlp(), nn.RMSNorm(D), nn.Linear(D, 3), nn.Tanh())
    assert_as_torch(model, x)
    assert_as_torch(model[4:6], x)
    for layers in (mlp(), mlp()[:2], [nn.RMSNorm(D), *mlp()[:1]]):
        model = sequential(*layers, nn.Hardtanh(inplace=True))
        assert kinds(model).endswith("layer")
        assert_as_torch(model, x)


def test_float32_on_every_path(path):
    layers = (nn.LayerNorm(D), *mlp(), nn.RMSNorm(D), nn.Linear(D, F), nn.Linear(F, D), nn.SiLU())
    model = sequential(*layers).float()
    assert kinds(model) == "mlp norm_linear linear_act"
    assert_equal(model, nn.Sequential(*model), randn(17, D), tol=1e-5)


@pytest.mark.parametrize(
    ("layers", "at_inputs", "at_preact"),
    [
        (lambda: mlp(), 7, 6),
        (lambda: [nn.RMSNorm(D), *mlp()], 7, 6),
        (lambda: mlp()[:2], 4, 3),
        (lambda: [nn.LayerNorm(D), nn.Linear(D, F)], 3, 3),
        (lambda: vit(0.0), 7, 6),
    ],
    ids=["mlp", "norm, mlp", "linear_act", "norm_linear", "dropouts"],
)
def test_flops(layers, at_inputs, at_preact):
    gemm, x = 2 * 5 * D * F, rows()
    for save, gemms in {"inputs": at_inputs, "preact": at_preact}.items():
        model = sequential(*layers(), save=save)
        assert flops(lambda model=model: model(x).sum().backward()) == gemm * gemms
        eager = nn.Sequential(*model)
        assert flops(lambda model=eager: model(x).sum().backward()) == gemm * at_preact


def test_state_dict_is_that_of_torch():
    named = OrderedDict(
        norm=nn.LayerNorm(D), fc=nn.Linear(D, F), act=nn.GELU(), out=nn.Linear(F, D)
    )
    model, eager = sequential(*mlp()), nn.Sequential(*mlp()).to(DEVICE, torch.float64)
    assert_equal(Sequential(named).double().to(DEVICE), nn.Sequential(named), rows())
    assert model.state_dict()._metadata == eager.state_dict()._metadata
    assert list(model.state_dict()) == list(eager.state_dict())
    eager.load_state_dict(model.state_dict(), strict=True)
    assert_equal(model, eager, rows())
    assert Sequential(OrderedDict(weight=nn.Tanh())).weight is not None


@pytest.mark.parametrize(
    ("layers", "shape", "match"),
    [
        (mlp, (5, D + 1), rf"mlp: fc1_weight expects {D} input features, x has {D + 1} \(x \[5,"),
        (mlp, (), "mlp: x must have at least one dimension"),
        (lambda: [*mlp()[:2], nn.Linear(3, D)], (5, D), f"fc2_weight expects 3 .*h has {F}"),
        (lambda: mlp()[:2], (5, 1), f"linear_act: weight expects {D} input features, x has 1"),
        (lambda: [bare_norm(), nn.Linear(3, 3)], (5, 3), rf"normalized_shape \[{D}\], got \[5, 3"),
        (lambda: [bare_norm(), nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)], (5, 3), "must end in"),
        (lambda: [nn.RMSNorm(3), nn.Linear(D, 3)], (5, D), r"must end in normalized_shape \[3\]"),
    ],
)
def test_wrong_shapes(layers, shape, match):
    model, x = sequential(*layers()), torch.zeros(shape, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=match):
        model(x)


def test_what_is_no_floating_tensor():
    class SumOfPair(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    model, x = sequential(SumOfPair(), *mlp()), rows()
    torch.testing.assert_close(model((x, x)), nn.Sequential(*model)((x, x)))
    for given, match in (
        ("x", "mlp: x must be a tensor, got str"),
        (torch.zeros(5, D, dtype=torch.int64, device=DEVICE), "x must be floating point, got"),
        (randn(5, D), "share a dtype"),
    ):
        with pytest.raises(TypeError, match=match):
            model[1:](given)


def test_compile_and_levels():
    torch._dynamo.reset()
    layers = nn.LayerNorm(D), *mlp(), nn.Dropout(0.0), nn.Linear(D, F), nn.SiLU()
    model, x = sequential(*layers), rows()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(compiled, nn.Sequential(*model), x)
    with torch._dynamo.config.patch(error_on_recompile=True), saved_tensors(exclude=[x]) as ours:
        y = compiled(x)
    torch.testing.assert_close(y, nn.Sequential(*model)(x))
    assert ours.nbytes == 8 * len(x) * D
    for level, elements in {"preact": 2 * D + 2 * F, "gate": 2 * D, "inputs": 2 * D}.items():
        with fusedckpt.saving(level):
            assert saved_bytes(model, [x]) == 8 * len(x) * elements


HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("index", range(4))
def test_hooks_on_a_child_fire(index, register):
    model, seen = sequential(nn.LayerNorm(D), *mlp()), []
    handle = getattr(model[index], register)(lambda *_: seen.append(index))
    expected = [
        "layer mlp",
        "layer layer layer layer",
        "norm_linear layer layer",
        "layer linear_act layer",
    ]
    assert kinds(model) == expected[index]
    assert_as_torch(model)
    # ours and nn.Sequential's
    assert seen == [index] * 2
    handle.remove()
    assert kinds(model) == "mlp"
    assert_as_torch(model)
    assert len(seen) == 2
    # and change results
    model[index].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model[index].register_forward_hook(lambda _, args, y: y * 3)
    model[index].register_full_backward_hook(lambda _, dx, dy: (dx[0] / 2,))
    assert_as_torch(model)


def test_hooks_on_all_modules():
    """They see every layer, and may change results; torch's own only count."""
    model, seen = sequential(*mlp(), nn.Flatten(0, 0)), []
    with FlopCounterMode(display=False):
        assert saved_bytes(model, [rows()]) == 8 * 5 * D
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda m, *_: seen.append(m)),
        nn.modules.module.register_module_forward_hook(lambda m, args, y: y * 1.5),
    ]
    try:
        assert_as_torch(model)
        assert seen.count(model[2]) == 2
    finally:
        for hook in hooks:
            hook.remove()
    assert saved_bytes(model, [rows()]) == 8 * 5 * D


@pytest.mark.parametrize("index", range(4))
def test_changed_child(index):
    """By a forward or a parametrization of its own, or by a hook that makes its weight."""

    model, x = sequential(nn.LayerNorm(D), *mlp()), rows()
    expected = model(x)
    model[index].forward = lambda x, child=model[index]: type(child).forward(child, x) * 2
    assert_as_torch(model, x)
    assert not torch.allclose(model(x), expected)
    del model[index].forward
    if index == 2:
        index = 1
    parametrize.register_parametrization(model[index], "weight", Doubled())
    assert kinds(model) != "mlp"
    assert_as_torch(model)
    parametrize.remove_parametrizations(model[index], "weight")
    assert kinds(model) == "mlp"
    assert_as_torch(model)


def test_child_replaced_after_construction():
    model, x = sequential(*mlp()), rows()
    before = model(x)
    model[1].approximate = "tanh"
    assert_as_torch(model, x)
    assert not torch.equal(model(x), before)
    for activation, runs_as in {
        nn.SiLU(): "mlp",
        nn.Softmax(-1): "layer layer layer",
        nn.LeakyReLU(0.3): "layer layer layer",
        nn.LeakyReLU(): "mlp",
        type("MyGELU", (nn.GELU,), {})(): "layer layer layer",
    }.items():
        model[1] = activation
        assert kinds(model) == runs_as
        assert_as_torch(model)
    model[1].forward = None
    model[1], model[2] = nn.Tanh(), type("MyLinear", (nn.Linear,), {})(F, 3)
    model.to(DEVICE, torch.float64)
    assert kinds(model) == "linear_act layer"
    assert_as_torch(model)


def in_pieces() -> Sequential:
    first, act, last = mlp()
    return sequential(nn.LayerNorm(D), nn.Sequential(first, act), nn.Dropout(0.0), last)


def give_our_norm(model: Sequential) -> None:
    norm = fusedckpt.RMSNorm(D, offset=1.0).to(DEVICE, torch.float64)
    model[0] = norm
    model(rows())
    norm.offset = 0.5


def give_settings_inside(model: Sequential) -> None:
    model[1] = Sequential(*model[1])
    model(rows())
    model[1].save = "preact"


# of a Sequential in pieces that was called before
CHANGES = {
    "an epsilon": lambda model: setattr(model[0], "eps", 0.5),
    "an offset": give_our_norm,
    "a form of an activation": lambda model: setattr(model[1][1], "approximate", "tanh"),
    "a form of no name": lambda model: setattr(model[1], "1", nn.LeakyReLU(0.3)),
    "a class": lambda model: setattr(model[3], "__class__", type("Own", (nn.Linear,), {})),
    "a rate": lambda model: setattr(model[2], "p", 1.5),
    "a layer inside": lambda model: model[1].append(nn.Tanh()),
    "a layer": lambda model: model.append(nn.Tanh()),
    "no layer": lambda model: model.__delitem__(slice(3, 4)),
    "a name": lambda model: model._modules.update(last=model._modules.pop("0")),
    "a hook": lambda model: model[1][0].register_forward_hook(lambda *_: None),
    "a hook around": lambda model: model[1].register_forward_hook(lambda *_: None),
    "a forward": lambda model: setattr(model[1][0], "forward", torch.nn.Identity()),
    "a level": lambda model: setattr(model, "save", "preact"),
    "chunks": lambda model: setattr(model, "chunks", 2),
    "settings inside": give_settings_inside,
}


def assert_planned_as_new(model: Sequential) -> None:
    planned, _ = sequential_file._runs_now(model)
    settings = sequential_file._Settings(model.save, model.chunks, None)
    assert planned == sequential_file._plan(runs(model), settings)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_call(change):
    """The runs are those of a Sequential that was never called."""
    model, x = in_pieces(), rows()
    model(x)
    CHANGES[change](model)
    assert_planned_as_new(model)
    if change == "a rate":
        return
    new = copy.deepcopy(model)
    torch.testing.assert_close(model(x), new(x), rtol=0, atol=0)
    assert saved_bytes(model, [x]) == saved_bytes(new, [x])
    if change != "a name":
        assert_as_torch(model, x)


@pytest.mark.parametrize("kind", [nn.Linear, nn.GELU, nn.LayerNorm])
def test_a_class_patched_after_the_first_call(kind, monkeypatch):
    model, x, forward = in_pieces(), rows(), kind.forward
    expected = model(x)
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)
    assert_as_torch(model, x)
    monkeypatch.undo()
    torch.testing.assert_close(model(x), expected)


def test_a_function_patched_after_the_first_call(monkeypatch):
    model, x, gelu = in_pieces(), rows(), nn.functional.gelu
    model(x)
    monkeypatch.setattr(nn.functional, "gelu", lambda *args, **kwargs: gelu(*args, **kwargs) * 2)
    assert_as_torch(model, x)


def test_a_swapped_norm_patched_after_the_first_call(monkeypatch):
    model = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, F)).to(DEVICE, torch.float64)
    x, forward = rows(), nn.RMSNorm.forward
    fusedckpt.fuse(model)
    expected = model(x)
    assert type(model[0]) is fusedckpt.RMSNorm
    bias = model[1].bias
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: forward(self, x) * 2)
    torch.testing.assert_close(model(x), (expected - bias) * 2 + bias)


def test_a_weight_of_a_class_after_the_first_call():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    model, x = in_pieces(), rows()
    expected = model(x)
    model[3].weight = nn.Parameter(model[3].weight.detach().as_subclass(Own))
    torch.testing.assert_close(model(x).as_subclass(torch.Tensor), expected)
    assert_planned_as_new(model)
    assert kinds(model) != "mlp"


def test_a_layer_joins_a_run_once_its_hook_is_gone():
    model, x = in_pieces(), rows()
    handles = [layer.register_forward_hook(lambda *_: None) for layer in (model[1], model[3])]
    saved = saved_bytes(model, [x])
    for handle in handles:
        handle.remove()
    assert saved_bytes(model, [x]) == 8 * len(x) * D < saved


def test_a_call_keeps_no_layer_alive():
    model = in_pieces()
    model(rows())
    layer = weakref.ref(model[3])
    model[3] = nn.Linear(F, D).to(DEVICE, torch.float64)
    assert layer() is None
    whole = weakref.ref(model)
    del model
    assert whole() is None


@pytest.mark.parametrize("save", ["inputs", "preact"])
def test_slices_and_single_layers(save):
    model = sequential(nn.LayerNorm(D), *mlp(), save=save)
    for part in (slice(1, 3), slice(1, None), slice(None, 2), slice(None), slice(0, 0)):
        assert type(model[part]) is Sequential
        assert model[part].save == save
        assert list(model[part]) == list(model)[part]
        assert_as_torch(model[part])
    for index, kind in enumerate((nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear)):
        assert type(model[index]) is kind
    assert_equal(model + nn.Sequential(nn.Tanh()), nn.Sequential(*model, nn.Tanh()), rows())
