"""Names of torch that are private: all in one file, found by this torch, and spared where not."""

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as stock
from without import WRAPPER

import fusedckpt
from fusedckpt.autograd import private
from fusedckpt.fusing import recording

PACKAGE = Path(fusedckpt.__file__).parent
# not in torch 2.11, or not in each later one
OPTIONAL = {"_C._autograd._make_saved_tensor", "_C._get_graph_exec_group"}


def test_this_torch_has_all_names():
    missing = {name for name, found in private.PROBED.items() if not found}
    assert missing <= (OPTIONAL if torch.__version__ < "2.13" else set())
    assert len(private.PROBED) > 30
    assert private.SEES_HOOKS
    assert private.SEES_BATCHES


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_gradients_without_a_name():
    """Of each name in turn, in a process of its own: see `without.py`."""
    names = [*private.PROBED, WRAPPER]
    command = [sys.executable, str(Path(__file__).with_name("without.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found.keys() == set(names)
    wrong = {name: text for name, text in found.items() if text != "right"}
    assert not wrong, "\n".join(wrong.values()).encode().decode("unicode_escape")


def phases_of(run):
    """Return the phase, and how many tensors are wanted, of each saved tensor in a checkpoint."""
    found = []

    def fn(x):
        pack = private.top_hooks()[0]
        found.append((private.stock_phase(pack), private.num_wanted(pack)))
        return x.sin()

    run(fn).sum().backward()
    return found


def test_phases_of_torchs_checkpoint():
    x = torch.randn(3, requires_grad=True)
    found = phases_of(lambda fn: stock(fn, x, use_reentrant=False))
    assert found == [("forward", None), ("recompute", 1)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.stock_phase(private.top_hooks()[0]) is None


def grads(run, layer, x):
    return torch.autograd.grad(run(layer, x).square().sum(), [x, *layer.parameters()])


def layer_and_x():
    torch.manual_seed(0)
    return fusedckpt.MLP(6, 8, dtype=torch.float64), torch.randn(4, 6).double().requires_grad_()


def eager(mlp, x):
    return mlp.fc2(torch.nn.functional.gelu(mlp.fc1(x)))


def ours(mlp, x):
    return fusedckpt.checkpoint(mlp, x)


@pytest.mark.parametrize("name", ["_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"])
def test_without_torchs_switches(monkeypatch, name):
    monkeypatch.delattr(torch.utils.checkpoint, name)
    assert None in private.stock_switches()
    torch.testing.assert_close(grads(ours, *layer_and_x()), grads(eager, *layer_and_x()))


def test_without_the_closure_of_torchs_hooks(monkeypatch):
    """A hook without the variables of torch's: the layer does its work in the recompute."""
    assert private.num_wanted(lambda tensor: tensor) is None
    monkeypatch.setattr(private, "num_wanted", lambda pack: None)

    def checkpointed(mlp, x):
        return stock(mlp, x, use_reentrant=False)

    torch.testing.assert_close(grads(checkpointed, *layer_and_x()), grads(eager, *layer_and_x()))


def test_without_schemas(monkeypatch):
    """Fuse leaves what it cannot read, which has the same gradients."""

    def fails(op):
        raise AttributeError("_schema")

    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    x = torch.randn(4, 6).double().requires_grad_()
    expected = grads(lambda m, x: m(x), model, x)
    monkeypatch.setattr(recording, "schema_of", fails)
    fusedckpt.fuse(model)
    torch.testing.assert_close(grads(lambda m, x: m(x), model, x), expected)
    assert private.schema_of(torch.ops.aten.add_.Tensor).is_mutable


def test_without_parts_of_distributed_modules():
    class Style:
        def _prepare_input_fn(self):
            """Of two that torch's have."""

    assert private.fsdp_parameters(nn.Linear(2, 2)) == []
    assert private.unsharded_of(object()) is None
    at_input, at_output = private.style_functions(Style)
    assert at_input is at_output is not Style._prepare_input_fn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for style in (ColwiseParallel, RowwiseParallel):
        assert private.style_functions(style)[0] is style._prepare_input_fn


# what others name of torch: dicts of a module and their like, and what is documented so
PUBLIC = {
    *("_parameters", "_buffers", "_modules", "_get_name", "_version", "_base"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
    # of named tuples
    *("_replace", "_fields", "_asdict"),
    # torch.fx
    "_rename",
}
# of Python, and of other libraries, each beside a probe of its own
FOREIGN = {
    *("_getframe", "_gradient_checkpointing_func", "_sharding_config"),
    *("_hf_quantized_needs_local_tp", "_attn_implementation"),
    *("_experts_implementation", "_apply_gate"),
    # the child of our own wrapper, named as torch's names its own
    "_checkpoint_wrapped_module",
}


LOOK_UPS = ("getattr", "hasattr", "attrgetter", "methodcaller")


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def own_names(trees):
    """Return the names that the library itself defines or sets."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_names(tree):
    """Yield private names that a file imports, reads as attributes, or names to getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fusedckpt"):
            path = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from filter(is_private, path)
        elif isinstance(node, ast.Import):
            yield from filter(is_private, (p for a in node.names for p in a.name.split(".")))
        elif isinstance(node, ast.Attribute):
            yield from filter(is_private, [node.attr])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UPS:
            texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
            yield from filter(is_private, [text for text in texts if isinstance(text, str)])


def test_no_other_file_names_what_is_private():
    files = {p: ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.glob("**/*.py"))}
    own = own_names(files.values()) | PUBLIC | FOREIGN | {n for n in dir(builtins) if is_private(n)}
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in files.items()
        if path.name != "private.py"
        for name in private_names(tree)
        if name not in own
    }
    assert not found
