"""fuse: a swapped module follows the values outside of it that its code reads, and its code."""

import contextvars
import copy
import enum
import functools
import importlib
import os
import pathlib
import pickle
import sys
import threading
import time
import types
from os.path import getsize

import pytest
import torch
import torch.nn.functional as F
from own_mlps import D, H, is_fused
from support import DEVICE, randn
from torch import nn
from zoo import GatedMLP, LlamaRMSNorm

from fusedckpt import fuse, unfuse

SCALE = 1.0
UNUSED = 1.0
OPTIONS = {"scale": 1.0, "unused": 1.0}
SCALES = [1.0, 1.0]
MEMBERS = {1}
OBJECT = types.SimpleNamespace(scale=1.0)
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
LOSSES = []
COUNT = 0
HERE = sys.modules[__name__]


class Config:
    scale = 1.0

    @classmethod
    def current(cls):
        return cls.scale


class Kind(enum.Enum):
    PLAIN = 1


Kind.PLAIN.scale = 1.0


class Nested:
    def __init__(self):
        self.config = types.SimpleNamespace(scale=1.0)


NESTED = Nested()
FROM_PARTIAL = functools.partial(lambda options: options["scale"], {"scale": 1.0})


def by_default(scale=1.0, options={"scale": 1.0}):  # noqa: B006  # that is the case
    return scale * options["scale"]


def indirectly():
    return by_global()


def exists(value):
    return value is not None


EXISTS = exists


def by_helper():
    return 1.0 if exists(READ) else 0.5


def closure():
    scale = 1.0

    def read():
        return scale

    def write(value):
        nonlocal scale
        scale = value

    return read, write


CLOSED, WRITE = closure()


def by_global():
    return SCALE


def by_entry():
    return OPTIONS["scale"]


def by_list():
    return SCALES[-1]


def by_set():
    return 1.0 if 1 in MEMBERS else 0.5


def by_attribute():
    return OBJECT.scale


def by_vars():
    return vars(OBJECT)["scale"]


def by_any_name(parts=("sc", "ale")):
    return getattr(OBJECT, "".join(parts))


def by_getenv():
    return float(os.getenv("FUSEDCKPT_TEST_SCALE", "1"))


def by_nested_attribute():
    config = NESTED.config
    return config.scale


def by_class():
    return Config.current()


def by_context():
    return VARIABLE.get()


def by_environment():
    return float(os.environ.get("FUSEDCKPT_TEST_SCALE", "1"))


def by_thread():
    return getattr(LOCAL, "scale", 1.0)


def by_setting():
    return 1.0 if torch.get_default_dtype() == torch.float32 else 0.5


def by_backend():
    return 0.5 if torch.backends.cuda.matmul.allow_tf32 else 1.0


def by_threads():
    return 1.0 if torch.get_num_threads() == 1 else 0.5


def set_global(value, name="SCALE"):
    setattr(HERE, name, value)


def set_environment(value):
    os.environ["FUSEDCKPT_TEST_SCALE"] = str(value)


def set_setting(value):
    torch.set_default_dtype(torch.float64 if value != 1 else torch.float32)


def set_default(value):
    defaults: tuple = by_default.__defaults__ or ()
    defaults[1]["scale"] = value


# the function that reads, how the value is set, the name in the reason
READS = {
    "global": (by_global, set_global, "SCALE"),
    "through another function": (indirectly, set_global, "SCALE"),
    "entry": (by_entry, lambda v: OPTIONS.update(scale=v), "OPTIONS['scale']"),
    "list": (by_list, lambda v: SCALES.__setitem__(1, v), "SCALES[1]"),
    "longer list": (by_list, lambda v: SCALES.append(v) if v != 1 else SCALES.pop(), "SCALES"),
    "set": (by_set, lambda v: MEMBERS.discard(1) if v != 1 else MEMBERS.add(1), "MEMBERS"),
    "object": (by_attribute, lambda v: setattr(OBJECT, "scale", v), "OBJECT.scale"),
    "object in an object": (
        by_nested_attribute,
        lambda v: setattr(NESTED.config, "scale", v),
        "NESTED.config.scale",
    ),
    "a member of an enumeration": (
        lambda: Kind.PLAIN.scale,
        lambda v: setattr(Kind.PLAIN, "scale", v),
        "Kind.PLAIN.scale",
    ),
    "object's dict": (by_vars, lambda v: setattr(OBJECT, "scale", v), "OBJECT.scale"),
    "object, by any name": (by_any_name, lambda v: setattr(OBJECT, "scale", v), "OBJECT.scale"),
    "getenv": (by_getenv, set_environment, "environ[b'FUSEDCKPT_TEST_SCALE']"),
    "class": (by_class, lambda v: setattr(Config, "scale", v), "Config.scale"),
    "context": (by_context, VARIABLE.set, "VARIABLE"),
    "environment": (by_environment, set_environment, "environ[b'FUSEDCKPT_TEST_SCALE']"),
    "thread": (by_thread, lambda v: setattr(LOCAL, "scale", v), "LOCAL.scale"),
    "closure": (CLOSED, WRITE, "scale"),
    "default": (by_default, set_default, "by_default.__defaults__[1]['scale']"),
    "partial": (
        FROM_PARTIAL,
        lambda v: FROM_PARTIAL.args[0].update(scale=v),
        "args[0]['scale']",
    ),
    "setting of torch": (by_setting, set_setting, "get_default_dtype"),
    "setting of a backend": (
        by_backend,
        lambda v: setattr(torch.backends.cuda.matmul, "allow_tf32", v != 1),
        "torch.backends.cuda.matmul.allow_tf32",
    ),
    "number of threads": (
        by_threads,
        lambda v: torch.set_num_threads(1 if v == 1 else 2),
        "get_num_threads",
    ),
    "function": (
        by_global,
        lambda v: setattr(HERE, "by_global", (lambda: v) if v != 1 else READS["global"][0]),
        "by_global",
    ),
    # a name that pathlib's method has
    "exists": (
        by_helper,
        lambda v: setattr(HERE, "exists", (lambda value: False) if v != 1 else EXISTS),
        "exists",
    ),
}


READ = by_global


class ReadsScale(GatedMLP):
    """A number that code outside computes; the global READ is looked up in each call."""

    def hidden(self, x):
        scale = READ()
        h = super().hidden(x)
        return h if scale == 1.0 else h * scale


class NormReadsScale(LlamaRMSNorm):
    def forward(self, hidden_states):
        scale = READ()
        y = super().forward(hidden_states)
        return y if scale == 1.0 else y * scale


@pytest.mark.parametrize("kind", [ReadsScale, NormReadsScale])
@pytest.mark.parametrize(("read", "write", "name"), READS.values(), ids=list(READS))
def test_a_value_from_outside_is_read_in_each_call(kind, read, write, name, monkeypatch):
    monkeypatch.setattr(HERE, "READ", read)
    module, x = (kind(D, H) if kind is ReadsScale else kind(D)).to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    report = fuse(module, verify=False)
    assert report.swapped
    assert is_fused(module, x)
    copied = copy.deepcopy(module)
    try:
        write(0.5)
        for swapped in (module, copied):
            assert torch.equal(swapped(x), eager(x))
            assert not is_fused(swapped, x)
        module(x)
        assert name in str(report.fallbacks[""])
        assert report.fallbacks[""].key == "changed"
    finally:
        write(1.0)
        os.environ.pop("FUSEDCKPT_TEST_SCALE", None)
        vars(LOCAL).pop("scale", None)
    assert is_fused(module, x)


def by_clock():
    return 1.0 if time.time() > 0 else 0.5


def counting():
    global COUNT
    COUNT += 1
    return 1.0


def evaluating():
    return eval("SCALE")  # that is the case


def by_import():
    return importlib.import_module(__name__).SCALE


def by_file():
    return 0.5 if pathlib.Path("no such file").exists() else 1.0


def by_size():
    return 1.0 if getsize(__file__) else 0.5


def by_iterator(numbers=iter([1.0] * 1000)):  # noqa: B008  # that is the case
    return next(numbers)


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (by_clock, "state"),
        (counting, "writes"),
        (evaluating, "state"),
        (by_iterator, "state"),
        (by_import, "state"),
        (by_file, "state"),
        (by_size, "state"),
    ],
)
def test_a_value_that_cannot_be_compared_leaves_the_module(read, key, monkeypatch):
    monkeypatch.setattr(HERE, "READ", read)
    report = fuse(ReadsScale(D, H).to(DEVICE), verify=False, save="preact")
    assert report.swapped == {}
    assert report.left[""].key == key


def doubled(forward):
    """Return a forward that a library would assign to a class."""

    @functools.wraps(forward)
    def patched(self, x):
        return forward(self, x) * 2

    return patched


class OwnCall(nn.SiLU):
    pass


def patch_code(monkeypatch):
    """Replace code in place, as an editor's reload does."""
    before = GatedMLP.hidden.__code__
    monkeypatch.setattr(GatedMLP.hidden, "__code__", (lambda self, x: self.gate_proj(x)).__code__)
    assert GatedMLP.hidden.__code__ is not before


def of_class(kind, method="forward"):
    return lambda patch: patch.setattr(kind, method, doubled(getattr(kind, method)))


def of_function(name):
    function = getattr(F, name)
    return lambda patch: patch.setattr(F, name, lambda *args, **kw: function(*args, **kw) * 2)


ENCODER = functools.partial(
    nn.TransformerEncoderLayer, D, 2, H, dropout=0.0, batch_first=True, activation="gelu"
)
MODULES = {
    "MLP": lambda: GatedMLP(D, H),
    "own norm": lambda: LlamaRMSNorm(D),
    "RMSNorm": lambda: nn.RMSNorm(D),
    "LayerNorm": lambda: nn.LayerNorm(D),
    "Sequential": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H), nn.GELU()),
    "encoder layer": ENCODER,
}
# the module, what is patched, the name in the reason, "" where the report has no reason of its own
PATCHES = {
    "the class": ("MLP", of_class(GatedMLP), "GatedMLP.forward"),
    "a method": ("MLP", of_class(GatedMLP, "hidden"), "GatedMLP.hidden"),
    "the code of a method": ("MLP", patch_code, "GatedMLP.hidden"),
    "a child's class": ("MLP", of_class(nn.Linear), "Linear.forward"),
    "a child's call": ("MLP", of_class(nn.Linear, "__call__"), "Linear.__call__"),
    "all calls": ("MLP", of_class(nn.Module, "__call__"), "Linear.__call__"),
    "an activation's class": ("MLP", of_class(nn.SiLU), "SiLU.forward"),
    "a function of torch": ("MLP", of_function("silu"), "silu"),
    "an own norm": ("own norm", of_class(LlamaRMSNorm), "LlamaRMSNorm.forward"),
    "nn.RMSNorm": ("RMSNorm", of_class(nn.RMSNorm), "RMSNorm.forward"),
    "nn.LayerNorm": ("LayerNorm", of_class(nn.LayerNorm), "LayerNorm.forward"),
    "a norm in a Sequential": ("Sequential", of_class(nn.LayerNorm), None),
    "a linear in a Sequential": ("Sequential", of_class(nn.Linear), None),
    "an activation in a Sequential": ("Sequential", of_class(nn.GELU), None),
    "torch's rms_norm": ("RMSNorm", of_function("rms_norm"), "function of torch"),
    "torch's layer_norm": ("LayerNorm", of_function("layer_norm"), "function of torch"),
    "layer_norm of a Sequential": ("Sequential", of_function("layer_norm"), None),
    "linear of a Sequential": ("Sequential", of_function("linear"), None),
    "gelu of a Sequential": ("Sequential", of_function("gelu"), None),
    "nn.Sequential": ("Sequential", of_class(nn.Sequential), None),
    "a method of torch's layer": (
        "encoder layer",
        of_class(nn.TransformerEncoderLayer, "_ff_block"),
        "_ff_block",
    ),
}


@pytest.mark.parametrize(("name", "patch", "word"), PATCHES.values(), ids=list(PATCHES))
def test_a_class_that_is_patched_after_fuse(name, patch, word, monkeypatch):
    torch.manual_seed(0)
    module, x = MODULES[name]().to(DEVICE), randn(2, 3, D)
    eager = copy.deepcopy(module)
    report = fuse(module, verify=False, attention=False)
    assert report.swapped
    before = module(x)
    patch(monkeypatch)
    expected = eager(x)
    assert not torch.allclose(before, expected)
    found = module(x)
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad(y.sum(), [x, *m.parameters()], allow_unused=True)
        for y, m in ((found, module), (expected, eager))
    ]
    torch.testing.assert_close(*grads)
    if word is not None:
        assert any(word in str(reason) for reason in report.fallbacks.values())
    monkeypatch.undo()
    torch.testing.assert_close(module(x), before)


def test_a_forward_that_is_set_on_the_module_itself():
    module, x = GatedMLP(D, H).to(DEVICE), randn(3, D)
    fuse(module)
    module.forward = lambda x: x
    assert module(x) is x
    del module.forward
    assert is_fused(module, x)


def test_a_class_that_was_patched_before_is_fused_as_it_is(monkeypatch):
    """nn.LayerNorm with another forward is no LayerNorm."""
    monkeypatch.setattr(nn.LayerNorm, "forward", doubled(nn.LayerNorm.forward))
    module, x = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, H), nn.GELU()).to(DEVICE), randn(3, D)
    eager = copy.deepcopy(module)
    fuse(module, verify=False)
    torch.testing.assert_close(module(x), eager(x))


def test_a_pickle_follows_values_and_code(monkeypatch):
    monkeypatch.setattr(HERE, "READ", by_global)
    module, x = ReadsScale(D, H).to(DEVICE), randn(3, D)
    fuse(module)
    data = pickle.dumps(module)
    loaded = pickle.loads(data)  # our own
    assert is_fused(loaded, x)
    monkeypatch.setattr(HERE, "SCALE", 0.5)
    assert not is_fused(loaded, x)
    # a process that has another value from the beginning
    later = pickle.loads(data)  # our own
    assert not is_fused(later, x)
    torch.testing.assert_close(later(x), unfuse(copy.deepcopy(later))(x))
    monkeypatch.setattr(HERE, "SCALE", 1.0)
    monkeypatch.setattr(ReadsScale, "forward", lambda self, x: x * 2)
    assert not is_fused(pickle.loads(data), x)  # our own


def test_compiled_code_follows_values_and_code(monkeypatch):
    module, x = GatedMLP(D, H).to(DEVICE), randn(3, D)
    fuse(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))
    monkeypatch.setattr(GatedMLP, "hidden", lambda self, x: self.gate_proj(x))
    torch.testing.assert_close(compiled(x), module.down_proj(module.gate_proj(x)))


def test_constants_and_modules_that_are_not_assigned_cost_no_swap():
    """The other classes of tests and models are fused as before; here a logger and a lock."""
    module = ReadsTable(D, H).to(DEVICE)
    assert fuse(module).swapped == {"": "ReadsTable -> gated_mlp (silu)"}
    assert is_fused(module, randn(3, D))


LOCK = threading.Lock()
TABLE = {"silu": F.silu, "gelu": F.gelu}


class ReadsTable(GatedMLP):
    kind = "silu"

    def hidden(self, x):
        with LOCK:
            return TABLE[self.kind](self.gate_proj(x)) * self.up_proj(x)


def our_calls(fn):
    """Return how many functions of the package a call runs."""
    num_calls = 0

    def see(frame, event, argument):
        nonlocal num_calls
        num_calls += event == "call" and frame.f_globals.get("__name__", "").startswith(
            "fusedckpt."
        )

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return num_calls


@pytest.mark.parametrize(("make", "count"), [(MODULES["MLP"], 25), (MODULES["own norm"], 27)])
def test_python_work_of_a_warm_call(make, count):
    """Values from outside are compared in the reader's loop, by no function of ours."""
    module, x = make().to(DEVICE), randn(2 * D, D)
    fuse(module)
    module(x)
    assert our_calls(lambda: module(x)) == count


@pytest.mark.parametrize("name", ["gelu", "layer_norm", "group_norm", "linear"])
def test_recipes_end_where_a_function_of_torch_is_replaced(name, monkeypatch):
    """torch gives a function mode the function that has the name, which would apply twice."""
    torch.manual_seed(0)
    layers = nn.LayerNorm(D), nn.Linear(D, H), nn.GELU(), nn.GroupNorm(1, H)
    model, x = nn.Sequential(nn.Sequential(*layers)).to(DEVICE), randn(2, D)
    eager = copy.deepcopy(model)
    fuse(model, recipes=True, norm=False, mlp=False, linear=False)
    of_function(name)(monkeypatch)
    torch.testing.assert_close(model(x), eager(x))


def test_recipes_end_where_a_method_of_tensors_is_replaced(monkeypatch):
    class Squares(nn.Module):
        def forward(self, x):
            return x.pow(2)

    power = torch.Tensor.pow
    model, x = nn.Sequential(Squares(), nn.Linear(D, D)).to(DEVICE), randn(2, D)
    eager = copy.deepcopy(model)
    fuse(model, recipes=True)
    monkeypatch.setattr(torch.Tensor, "pow", lambda x, n: power(x, n) * 2, raising=False)
    torch.testing.assert_close(model(x), eager(x))
