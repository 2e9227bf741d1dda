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

# the attribute of a swapped module that has its `Original`, among it its class
MARK = "_fusedckpt_original"
# attribute of a module with the note of its last such call with gradients
NOTE = "_fusedckpt_fallback"

_AGAIN = "call fuse again"
_CHECKPOINT = "fusedckpt.checkpoint recomputes it"
_OWN_FORWARD = "the forward of its class"
_RECIPES = "fuse(model, recompute_elementwise=True) makes its result again in backward"
_UNHOOK = "remove the hook, or add it to a module around"
# by key: one clause, and the one thing to do about it
WORDS = {
    # calls of fused modules
    "arguments": ("called with arguments other than one tensor", "pass one tensor alone"),
    "child": ("{} was replaced by another module since it was fused", _AGAIN),
    "adapter": ("{}: only peft's plain LoRA is fused", "use a plain LoRA there"),
    "packed": ("{} packs up before gate, and is adapted or quantized", _CHECKPOINT),
    "hook": ("{}: it has a hook, or its forward was replaced", _UNHOOK),
    "hooked": ("{}: it has a hook, and would be called twice", _UNHOOK),
    "weight": ("{}, which only its own forward takes", "use plain parameters"),
    "changed": ("{} has changed since it was fused", _AGAIN),
    "dropout": ("{} applies dropout inside the block in training", 'save="inputs" recomputes it'),
    "input": ("its input is a {}, which only its own forward takes", "pass a plain tensor"),
    "cache": (
        "called with a {}, which its forward may change, as a cache of keys and values",
        "train with use_cache=False, unless adapters such as prefix tuning pass it",
    ),
    "module": (
        "called with a {}, a module, whose state its recompute would not bring back",
        "make that module a child of it",
    ),
    "writes itself": (
        "its forward writes its parameter {}, and would write it twice",
        "write it outside of the forward",
    ),
    "saves nothing": (
        "autograd saves nothing in its forward, which is a checkpoint of its own",
        "nothing is to be done",
    ),
    "again": (
        "its {} would save more than four times its result, and runs again in backward",
        "nothing is to be done; a kernel of it without dropout would run once",
    ),
    "waits": (
        "it waits for its first training call, which shows whether it saves much",
        "train a step, or fuse(model, example_inputs=...)",
    ),
    "unseen call": (
        "its last training call could not be looked into: {}",
        "call it once without, or fuse(model, example_inputs=...)",
    ),
    "in checkpoint": (
        "its first training call was inside a checkpoint, which runs it again anyway",
        "none is needed there; without the checkpoint, call fuse again",
    ),
    "twice": (
        "it saves much, and a second run of it in the first step gave another result",
        "let its forward give the same twice",
    ),
    "second": (
        "it saves much, and a second run of it in the first step raised a {}",
        "let its forward run twice",
    ),
    "memory": (
        "it saves much, and there was no memory for a second run of it in the first step",
        "fuse(model, example_inputs=...) with a small batch",
    ),
    "collective": (
        "it saves much, and holds a {}, whose collectives would run twice",
        "fuse(model, example_inputs=...) before sharding",
    ),
    "ranks": (
        "it saves much on some ranks alone in the first step",
        "fuse(model, example_inputs=...) with one batch",
    ),
    "around": (
        "its attention is written beside an MLP that is fused, in one forward",
        f"move attention to a module of its own, or {_CHECKPOINT}",
    ),
    "unseen": (
        "its attention is no call of torch's or transformers' functions, and saves little",
        'attn_implementation="sdpa" is one',
    ),
    "mode": (
        "a function mode that is not torch's is active, and may change functions",
        "leave the mode around its call",
    ),
    "logits": ("{}, and computes its logits", "call fusedckpt.functional.linear_cross_entropy"),
    "dtype": (
        "its input is {}, a dtype that was not proven equal, or not that of its weights",
        "cast both to one dtype",
    ),
    "disabled": ("FUSEDCKPT_DISABLE is set", "unset it"),
    # modules that no forward of ours computes
    "random": ("its forward draws random numbers", _CHECKPOINT),
    "values": ("its forward depends on the values of tensors", _CHECKPOINT),
    "function": ("its forward uses an autograd.Function, or switches autocast", _CHECKPOINT),
    "tensor hooks": ("its forward registers hooks on tensors", _CHECKPOINT),
    "writes": ("its forward writes to {}", _CHECKPOINT),
    "sets": ("its forward sets {}", _CHECKPOINT),
    "state": ("its forward reads {}, which may change", "keep it in a number or a flag"),
    "foreign": ("its forward reads a tensor that is no parameter", "register it as a parameter"),
    "inputs": ("its forward takes {} besides one tensor", _CHECKPOINT),
    "raised": ("its forward raised a {} for one tensor", _CHECKPOINT),
    "returns": ("its forward returns a {}", _CHECKPOINT),
    "result": ("its result is {}", _CHECKPOINT),
    "ops": ("its forward computes {}, not as an MLP that is fused", _CHECKPOINT),
    "varies": ("{} computes something else {}", _CHECKPOINT),
    "rule": ("its forward is no LayerNorm or RMSNorm that is fused, in {}", _RECIPES),
    "other norm": (
        "it is no LayerNorm or RMSNorm over its input's last dimension",
        _RECIPES,
    ),
    "beside": (
        "its linears and activation are no block, or are called beside other layers",
        _CHECKPOINT,
    ),
    "differs": ("{}", "report it as a bug, or pass verify=False to take it all the same"),
    "other values": (
        "a second run of its forward gives other values than the first",
        "write to no tensor through .data, NumPy or an address",
    ),
    "check dtype": ("it does not run in {}, the dtype of the check", "pass verify=False"),
    # experts
    "experts": (
        "its weights of three dimensions are not gate_up_proj and down_proj of experts",
        _CHECKPOINT,
    ),
    "parameters": ("its experts have other parameters: {}", _CHECKPOINT),
    "signature": ("its forward does not take x, an index and scores", _CHECKPOINT),
    "shapes": ("its weights have other shapes", _CHECKPOINT),
    "gating": ("its gating is none of ours", _CHECKPOINT),
    # heads of causal models
    "head class": ("its output embedding is no nn.Linear", "use fusedckpt.LinearCrossEntropy"),
    "head weight": (
        "its output embedding has a weight that is no plain tensor",
        "fuse before sharding or quantization",
    ),
    "head loss": (
        "{} computes another loss than ForCausalLMLoss",
        "use fusedckpt.LinearCrossEntropy",
    ),
    # parameters and layers as they are now
    "scripted": ("TorchScript compiled it, or a layer of it", "fuse before scripting"),
    "fsdp": ("its parameters are sharded by FSDP", "fuse before sharding"),
    "deepspeed": ("its parameters are sharded by DeepSpeed", "fuse before sharding"),
    "sharded": ("{} is sharded", "fuse before sharding, MLPs by fusedckpt.parallel.MLPParallel"),
    "lazy": ("its parameters are not initialized", "call the model once before"),
    "freed": ("the storage of its parameters was freed", "fuse while they have one"),
    "quantized": ("{}", "use plain parameters"),
    "dtypes": ("its weights have several dtypes: {}", "cast them to one"),
    "parametrized": ("{}: its weights are parametrized", "fuse after removing it"),
    "dense": ("{}", _CHECKPOINT),
    "linear": ("{} is a {}, a linear with its own forward", "use nn.Linear there"),
    "lora": ("it is LoRA around a {}", "use LoRA around nn.Linear"),
    "forward": ("its forward was replaced", f"bring back {_OWN_FORWARD}"),
    "attribute": ("it has an attribute {} already", "rename it"),
    "apart": ("it forms no block with {}, by which it is followed", _CHECKPOINT),
    "apart now": ("{} forms no block with its neighbors now", _AGAIN),
    "sequential": (
        "it is a subclass of nn.Sequential with its own forward",
        "use nn.Sequential, or its layers in a class of your own",
    ),
    "neighbor": (
        "another block of its Sequential is not to be fused",
        "name all its blocks, or none",
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
    if torch.is_grad_enabled() and not dispatch.is_recorded(None):
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
