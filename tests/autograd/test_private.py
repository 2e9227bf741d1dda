"""Names of torch that are private: all in `private*.py`, found by this torch, spared where not."""

import ast
import builtins
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as stock

import fusedckpt
from fusedckpt.autograd import private
from fusedckpt.fusing import match_mlps

# in which names are taken away together, a process each
GROUPS = 7
PACKAGE = Path(fusedckpt.__file__).parent
# not before torch 2.14; not in torch 2.11, or not in each later one
NEW = {
    "utils.checkpoint._current_user_saved_tensors_hooks",
    "cuda.CUDAGraph.get_currently_capturing_graph",
}
OPTIONAL = {
    "_C._autograd._make_saved_tensor",
    "_C._autograd.SavedTensor.unpack_hook.fget",
    "_C._get_graph_exec_group",
}


def test_this_torch_has_all_names():
    missing = {name for name, found in private.PROBED.items() if not found}
    optional = OPTIONAL if torch.__version__ < "2.13" else set()
    assert missing <= (optional | NEW if torch.__version__ < "2.14" else set())
    assert len(private.PROBED) > 30
    assert private.SEES_HOOKS
    assert private.SEES_BATCHES


def wrong_without(groups):
    """Return the errors of groups of names that are missing: see `without.py`."""
    command = [sys.executable, str(Path(__file__).with_name("without.py")), *groups]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert results.keys() == set(groups)
    return {group: text for group, text in results.items() if text != "right"}


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_gradients_without_names():
    """Without a group of names at a time; of a group that fails, without each of its names."""
    names = [*private.PROBED]
    # neighbors in `private` serve one feature, and its first fallback would hide the others
    groups = [",".join(names[start::GROUPS]) for start in range(GROUPS)]
    assert len({name for group in groups for name in group.split(",")}) == len(names) > 40
    wrong = wrong_without(groups)
    for group in [*wrong]:
        # where each name alone is right, it is the group that is not
        wrong |= wrong_without(group.split(","))
    assert not wrong, "\n".join(wrong.values()).encode().decode("unicode_escape")


def test_phases_of_torchs_checkpoint():
    x, found = torch.randn(3, requires_grad=True), []

    def fn(x):
        pack = private.top_hooks()[0]
        # and how many tensors are wanted
        found.append((private.stock_phase(pack), private.num_wanted(pack)))
        return x.sin()

    stock(fn, x, use_reentrant=False).sum().backward()
    assert found == [("forward", None), ("recompute", 1)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.stock_phase(private.top_hooks()[0]) is None
    assert private.num_wanted(lambda tensor: tensor) is None


# of a module, a name that is missing
MISSING = {
    "debug": (torch.utils.checkpoint, "_checkpoint_debug_enabled", None),
    "early stop": (torch.utils.checkpoint, "_enable_checkpoint_early_stop", None),
    # without the variables of torch's: the layer does its work in the recompute
    "closure": (private, "num_wanted", lambda pack: None),
    # fuse leaves what it cannot read
    "schemas": (match_mlps, "schema_of", lambda op: op._no_such_schema),
}


@pytest.mark.parametrize("name", MISSING)
def test_without_a_part(monkeypatch, name):
    holder, attribute, value = MISSING[name]
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    x = torch.randn(4, 6).double().requires_grad_()
    leaves = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), leaves)
    if value is None:
        monkeypatch.delattr(holder, attribute)
        assert None in private.stock_switches()
    else:
        monkeypatch.setattr(holder, attribute, value)
    fusedckpt.fuse(model)
    # torch's own checkpoint needs its switches
    for wrap in (fusedckpt.checkpoint, stock)[: 1 if value is None else 2]:
        y = wrap(model, x, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), leaves), expected)


def test_without_parts_of_distributed_modules():
    assert private.fsdp_parameters(nn.Linear(2, 2)) == []
    assert private.unsharded_of(object()) is None


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
    *("_getframe", "_gradient_checkpointing_func", "_attn_implementation"),
    *("_experts_implementation", "_apply_gate", "_bit_generator"),
    *("_local_mapping", "_global_mapping"),
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
        if not path.name.startswith("private")
        for name in private_names(tree)
        if name not in own
    }
    assert not found
