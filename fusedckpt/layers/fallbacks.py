"""Reasons for modules and calls that do not run fused: a key, its subject, and words for both.

`fuse` gives a reason for each module that it leaves. A swapped module notes one for a call that
runs the forward of its own class; fused calls note nothing. A note is a constant that a call writes
and never reads, so that torch.compile needs no guard; reports turn it into words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedckpt.autograd import dispatch

# attribute of a module with the note of its last such call with gradients
NOTE = "_fusedckpt_fallback"

# remedies that are others in a model with recipes, see `FuseReport`
IN_ORDER = (
    "fuse(model, recompute_elementwise=True) recomputes its cheap functions, "
    "fusedckpt.checkpoint all of it"
)
RECIPES = "fuse(model, recompute_elementwise=True) makes its result again in backward"
CHECKPOINT = "fusedckpt.checkpoint recomputes it"
_AGAIN = "call fuse again"
_OWN_FORWARD = "the forward of its class"
_UNHOOK = "remove the hook, or register it on a parent module"
# by key: one clause, and the one thing to do about it
WORDS = {
    # calls of fused modules
    "arguments": ("it was called with other arguments than one tensor", "pass only one tensor"),
    "child": ("{} was replaced by another module since it was fused", _AGAIN),
    "adapter": ("{}: only peft's plain LoRA is fused", "use a plain LoRA there"),
    "packed": ("{} packs up before gate, and has adapters or is quantized", CHECKPOINT),
    "hook": ("{} has a hook, or its forward was replaced", _UNHOOK),
    "hooked": ("{} has a hook, which a recompute would call again", _UNHOOK),
    "weight": ("{}, which only its own forward takes", "use plain parameters"),
    "changed": ("{} has changed since it was fused", _AGAIN),
    "dropout": ("{} applies dropout between its linears in training", 'pass save="inputs"'),
    "input": ("its input is a {}, which only its own forward takes", "pass a plain tensor"),
    "cache": (
        "it was called with a {}, which its forward may change, as a cache of keys and values",
        "pass use_cache=False in training, unless an adapter such as prefix tuning needs it",
    ),
    "module": (
        "it was called with a {}, a module whose state the recompute would not restore",
        "call that module outside, and pass its result, or register it as a child",
    ),
    "writes itself": (
        "its forward writes its parameter {}, and the recompute would write it again",
        "write the parameter outside of the forward",
    ),
    "saves nothing": (
        "autograd saves nothing in its forward, which is a checkpoint already",
        "nothing needs to be done",
    ),
    "again": (
        "its {} would save more than four times its result, so it runs again in backward",
        "nothing needs to be done; a fused kernel of it without dropout would not run again",
    ),
    "waits": (
        "its first training call will show whether it saves enough to be fused",
        "run a training step, or call fuse(model, example_inputs=...)",
    ),
    "unseen call": (
        "fuse could not observe its last training call: {}",
        "run a training step without that, or call fuse(model, example_inputs=...)",
    ),
    "in checkpoint": (
        "its first training call was inside a checkpoint, which recomputes it already",
        "nothing needs to be done; if you remove the checkpoint, call fuse again",
    ),
    "twice": (
        "it saves much, but a second run of it in the first step gave another result",
        "make its forward give the same result each time",
    ),
    "second": (
        "it saves much, but a second run of it in the first step raised a {}",
        "make its forward run a second time without an error",
    ),
    "memory": (
        "it saves much, but a second run of it in the first step ran out of memory",
        "call fuse(model, example_inputs=...) with a small batch",
    ),
    "collective": (
        "it saves much, but it contains a {}, whose collectives would run again",
        "call fuse(model, example_inputs=...) before sharding",
    ),
    "ranks": (
        "it saves much only on some ranks in the first step",
        "call fuse(model, example_inputs=...) with the same batch on all ranks",
    ),
    "around": (
        "its forward computes attention and calls an MLP that is fused",
        f"move attention to a module of its own, or {CHECKPOINT}",
    ),
    "unseen": (
        "its attention calls no attention function of torch or transformers, and saves little",
        'call F.scaled_dot_product_attention, or pass attn_implementation="sdpa"',
    ),
    "no hooks": (
        "saved-tensor hooks were disabled, by which backward runs it again",
        "call it outside of torch.autograd.graph.disable_saved_tensors_hooks",
    ),
    "mode": (
        "a TorchFunctionMode of other code is active, and may change functions",
        "exit the mode before the call",
    ),
    "logits": ("{}, so the logits are computed", "call fusedckpt.functional.linear_cross_entropy"),
    "dtype": (
        "its input is {}, which is not the dtype of its weights, or one that fuse did not verify",
        "cast both to the same dtype",
    ),
    "disabled": ("FUSEDCKPT_DISABLE is set", "unset it"),
    # modules that no forward of ours computes
    "random": ("its forward draws random numbers", IN_ORDER),
    "values": ("its forward depends on the values of tensors", IN_ORDER),
    "function": ("its forward uses an autograd.Function, or switches autocast", IN_ORDER),
    "tensor hooks": ("its forward registers hooks on tensors", IN_ORDER),
    "writes": ("its forward writes to {}", IN_ORDER),
    "sets": ("its forward sets {}", IN_ORDER),
    "state": ("its forward reads {}, which may change", "store it as a number or a bool attribute"),
    "sizes": ("its forward compares the number of rows of its input with a number", IN_ORDER),
    "foreign": ("its forward reads a tensor that is not a parameter", "register it as a parameter"),
    "inputs": ("its forward takes {} in addition to one tensor", IN_ORDER),
    "raised": ("its forward raised a {} for one tensor", IN_ORDER),
    "returns": ("its forward returns a {}", IN_ORDER),
    "result": ("its result is {}", IN_ORDER),
    "ops": ("its forward computes {}, which no fused MLP does", IN_ORDER),
    "varies": ("{} computes another function {}", IN_ORDER),
    "rule": (
        "its forward does not compute a LayerNorm or RMSNorm that fuse knows, in {}",
        RECIPES,
    ),
    "other norm": (
        "it is not a LayerNorm or RMSNorm over the last dimension of its input",
        RECIPES,
    ),
    "beside": (
        "its linears and activation do not form an MLP, or its forward also calls other layers",
        IN_ORDER,
    ),
    "differs": (
        "{}",
        "report a bug with the module's code, or pass verify=False to fuse it unchecked",
    ),
    "other values": (
        "a second run of its forward gives other values than the first",
        "do not write tensors through .data, NumPy or data_ptr()",
    ),
    "check dtype": ("it does not run in {}, the dtype of the comparison", "pass verify=False"),
    # experts
    "experts": (
        "its weights of three dimensions are not gate_up_proj and down_proj, as of experts",
        IN_ORDER,
    ),
    "parameters": ("its experts have parameters that fuse does not know: {}", IN_ORDER),
    "signature": ("its forward does not take x, an index and scores", IN_ORDER),
    "shapes": ("its weights do not have the shapes of gate_up_proj and down_proj", IN_ORDER),
    "gating": ("its gating is not one that fuse knows", IN_ORDER),
    # heads of causal models
    "head class": ("its output embedding is not an nn.Linear", "use fusedckpt.LinearCrossEntropy"),
    "head weight": (
        "its output embedding has a weight that is not a plain tensor",
        "fuse before sharding or quantization",
    ),
    "head loss": (
        "{} computes another loss than ForCausalLMLoss",
        "use fusedckpt.LinearCrossEntropy",
    ),
    # parameters and layers as they are now
    "scripted": ("TorchScript compiled it or one of its layers", "fuse before scripting"),
    "fsdp": ("its parameters are sharded by FSDP", "fuse before sharding"),
    "deepspeed": ("its parameters are sharded by DeepSpeed", "fuse before sharding"),
    "sharded": (
        "{} is sharded",
        "fuse before sharding, and shard MLPs by fusedckpt.parallel.MLPParallel",
    ),
    "lazy": ("its parameters are not initialized", "call the model once before fuse"),
    "freed": ("the storage of its parameters was freed", "call fuse while they have storage"),
    "quantized": ("{}", "use plain parameters"),
    "dtypes": ("its weights have several dtypes: {}", "cast them to one dtype"),
    "parametrized": ("{} has parametrized weights", "fuse after remove_parametrizations"),
    "dense": ("{}", IN_ORDER),
    "linear": ("{} is a {}, a linear with its own forward", "use nn.Linear there"),
    "lora": ("it is LoRA around a {}", "use LoRA only around nn.Linear"),
    "forward": ("its forward was replaced", f"restore {_OWN_FORWARD}"),
    "attribute": ("its attribute {} has a name that fuse needs", "rename the attribute"),
    "apart": ("it cannot be fused with {}, the layer after it", IN_ORDER),
    "apart now": ("{} can no longer be fused with its neighbors", _AGAIN),
    "sequential": (
        "it is a subclass of nn.Sequential with its own forward",
        "use nn.Sequential, or put its layers into an nn.Module of your own",
    ),
    "neighbor": (
        "only= or skip= excludes other layers of its Sequential",
        "name all its linears, or none",
    ),
}


class NotFused(NamedTuple):
    """The reason why a module or a call does not run fused; str() gives the clause."""

    # one of WORDS
    key: str
    # the subject that the clause names, a tuple of several
    about: Any = ""

    def __str__(self) -> str:
        about = self.about if type(self.about) is tuple else (self.about,)
        return WORDS[self.key][0].format(*about)

    @property
    def remedy(self) -> str:
        """Return the one thing to do about it."""
        return WORDS[self.key][1]


def note_fallback(module: nn.Module, reason: tuple[str, Any]) -> None:
    """Note the reason of a call; one without gradients saves nothing, and is not noted."""
    if torch.is_grad_enabled() and not dispatch.is_traced(None):
        module.__dict__[NOTE] = reason


def take_fallback(module: nn.Module) -> NotFused | None:
    """Return a module's note, and forget it."""
    return module.__dict__.pop(NOTE, None)


def fallback_of(x: Any, **weights: Any) -> NotFused:
    """Return the reason of a call with a tensor of a class that only its own ops support."""
    for name, weight in weights.items():
        if not dispatch.are_plain(weight):
            return NotFused("weight", name)
    if not isinstance(x, Tensor):
        return NotFused("arguments")
    return NotFused("input", "nested tensor" if x.is_nested else type(x).__name__)


def refuse_script(module: nn.Module) -> Any:
    """Refuse torch.jit.script, which would compile the original forward."""
    raise TypeError("torch.jit.script: the model was fused, call fusedckpt.unfuse first")
