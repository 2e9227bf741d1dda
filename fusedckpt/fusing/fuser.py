"""Replace layers of a model in place by those that save only their inputs, and back.

A swap changes a module's class and nothing else: the module object, its Parameters, hooks,
children and state_dict are unchanged.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from fusedckpt.autograd import arguments, levels
from fusedckpt.autograd.levels import LEVELS
from fusedckpt.blocks import validate
from fusedckpt.deprecated import renamed_arguments
from fusedckpt.fusing.find_swaps import Matcher, SwapFinder
from fusedckpt.fusing.first_step import find_waiting, stopped_waiting
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.fused_heads import find_heads
from fusedckpt.fusing.match_shared import find_shared
from fusedckpt.fusing.mixers import arguments_of, find_mixers
from fusedckpt.fusing.norms import copying_inputs
from fusedckpt.fusing.recipe_models import find_recipe_model, gain_on_batch
from fusedckpt.fusing.search import Names, Search, patterns
from fusedckpt.fusing.swap import made_of, original_of, undo
from fusedckpt.layers import fallbacks
from fusedckpt.layers.norm import LayerNorm, RMSNorm
from fusedckpt.layers.notes import notes_of
from fusedckpt.layers.sequential import Sequential


@renamed_arguments(batch="example_inputs", recipes="recompute_elementwise")
def fuse(
    model: nn.Module,
    *,
    save: str = "inputs",
    store: str | None = None,
    chunks: int | None = None,
    only: Names = None,
    skip: Names = None,
    norm: bool = True,
    mlp: bool = True,
    linear: bool = True,
    attention: bool = True,
    experts: bool = True,
    head: bool | str = False,
    verify: bool = True,
    example_inputs: Any = None,
    recompute_elementwise: bool = False,
) -> FuseReport:
    """Replace layers of `model` in place by fused ones, which save less for the backward pass.

    They are found by their computation, not by their classes:

    - norms: RMSNorms that round as torch, Llama or Gemma do, LayerNorms that round as torch does,
      over one dimension, with their epsilon, if any, in an attribute; nn.RMSNorm and nn.LayerNorm;
    - MLPs and gated MLPs: two or three linears (gate and up may be packed, weights may lie as
      [in, out]), an activation of `functional.linear_act`, dropouts; a linear with its activation;
    - an nn.Sequential with [norm,] linear, activation, linear, or part of that;
    - experts with transformers' parameters, `gate_up_proj` and `down_proj` of three dimensions;
    - modules that call F.scaled_dot_product_attention, flash_attn or transformers' attention
      functions: while training they save their input, and attention's output and log-sum-exp; at
      other levels those with norms of queries and keys also save their linears' outputs;
    - mixers: modules that call a scan (transformers' kernels, fla, mamba_ssm, a function that
      `region(fn, "scan")` returned) or causal_conv1d. At level "inputs" they save their input, and
      the scan's result;
    - convolutions, batch and group norms, activations, dropouts and average pools of torch's, and
      sums of two of their results: they save recipes of results that the layers before them make
      again, if these have 256 KiB or more.

    A module gets a subclass of its class, or fusedckpt's class for one of torch's. A call that was
    not proven equal (another dtype, a child replaced or hooked since) runs the original forward.
    Parameter objects, hooks, module names and the state_dict are unchanged; `unfuse` restores the
    classes. A module that is fused already is unchanged.

    Args:
        model: any module, which may itself be a norm, an MLP or a Sequential.
        save: the level of blocks with an activation: "inputs", "gate", "preact", see `functional`.
            In blocks without a gate "gate" means "inputs".
        store: None, or "int8": norms, MLPs, linears, and attention modules that run again, keep
            their inputs in nine bits a value, see below.
        chunks: into how many chunks MLPs cut their tokens, see `functional.mlp`. With None every
            call chooses by its shapes.
        only, skip: one name of a module or pattern of fnmatch, or a list of them.
        norm, mlp, linear, attention, experts: whether norms, MLPs, linears with a norm or
            activation, attention modules and mixers, and experts are swapped.
        head: whether causal language models of transformers compute their loss in training without
            logits, as `functional.linear_cross_entropy` does: then `logits` of their output is
            None. A scale and a softcap of logits are read in the first step; a model that does
            anything else to them is named there, and computes them as before. "always": also
            in evaluation with labels.
        example_inputs: arguments of the model, as a dict, a tuple, or one tensor. Only a run shows
            which modules call attention or a scan through a helper, and which save more than four
            times the bytes of their inputs and result. With example inputs a copy of the model
            runs once, without gradients, and the fused copy runs twice, for the report's line on
            the bytes that `recompute_elementwise` would save. Without them, the first training
            call of each such module decides: the module runs a second time in that call, with the
            same loss, gradients and random states.
        verify: before a swap, compare outputs and gradients of the fused module with the
            original's, on random inputs and weights: the error against float64 may be twice the
            original's plus 8 epsilons. A module that differs is left and named. Forwards of unknown
            classes are recorded on meta tensors in any case. The model itself is not run;
            gradients, buffers and RNG state do not change.
        recompute_elementwise: whether results of cheap functions anywhere in the model, norms,
            activations, dropouts, gates and sums, are made again in backward where their inputs are
            saved anyway, instead of saved. That costs some time on the CPU for each function, so
            tensors below 1 MiB are left; it applies to eager training without saved-tensor hooks of
            others.

    store="int8" keeps a code of 8 bits for each value of an input, and a scale of 16 for each 16
    values that lie together, as `checkpoint` does: 9/16 of bfloat16's bytes, 9/32 of float32's. The
    forward is exact; backward is that of the rounded inputs. Linears, MLPs, experts and attention
    behind a fused norm read the norm of its rounded input, and save nothing themselves: a
    tensor is packed once for all of its readers. These stay as they are: leaves, tensors without a
    gradient, views of larger ones, those of less than 1,024 elements or other dtypes, outputs that
    their own operation has saved (softmax, attention), inputs of a router, and of experts and heads
    without a norm, GEMM outputs of other levels, attention's output and log-sum-exp, all inputs
    inside of a checkpoint or under hooks on saved tensors. An input that code of the model saves as
    well, as a linear of `skip` does, is kept by both. No choice of a router is made again.
    Errors of gradients against float64, by parameter, are at most twice eager's in bfloat16, but
    for 8 of 764 in 11 small models, weights of norms whose input has channels 50 to 1,000 times
    larger: 2.0 to 4.1; and for decays of a scan that runs again (Mamba 2): 3.4. Of a result that a
    norm makes again, a write without a version is an error only where it changes 64 elements by
    more than a quarter. Under torch.compile `store` does nothing.

    Returns:
        The modules swapped, fused before, and left with the reason, and the bytes saved per token.
        Printed after a step the report also names modules that did not run fused, and why, and the
        modules that the first training step has shown; before, these are `undecided`.

    Raises:
        TypeError: `model` is not an nn.Module, names, `save` or `store` are not strings, or
            `chunks` not an int.
        ValueError: `save` is not a level, `store` is another string, `chunks` is below 1, a pattern
            of `only` matches nothing, or head=True for a model without an output embedding of
            transformers.
        After an error the model is unchanged.
    """
    _check_module("fuse", model)
    levels.check("fuse", save, LEVELS)
    levels.check_store("fuse", store)
    validate.check_layer_options("fuse", False, chunks)
    if head not in (False, True, "always"):
        raise ValueError(f'fuse: head must be True, False or "always", got {head!r}')
    search = Search(
        modules=dict(model.named_modules()),
        save=save,
        store=store,
        only=patterns("only", only),
        skip=patterns("skip", skip),
        kinds={
            "norm": norm,
            "mlp": mlp,
            "linear": linear,
            "attention": attention,
            "experts": experts,
            "head": bool(head),
        },
    )
    with stopped_waiting(model) as former:
        # all are found before anything is touched
        SwapFinder(search, Matcher(save, chunks, verify)).find()
        find_mixers(model, search, example_inputs)
        if head:
            find_heads(model, search, always=head == "always")
        search.check()
    search.report.watch(model)
    if linear:
        find_shared(search)
    if arguments.flag("fuse", "recompute_elementwise", recompute_elementwise):
        find_recipe_model(model, search)
    if example_inputs is None:
        # the outermost class of the model
        find_waiting(model, search, former)
    _apply(search)
    if example_inputs is not None and not recompute_elementwise:
        gain = gain_on_batch(model, *arguments_of(example_inputs))
        search.report.notes.extend([gain] if gain else [])
    return search.report


def _apply(search: Search) -> None:
    """Change the classes of the modules that were found."""
    store = search.store
    names = {module: name for name, module in search.modules.items()}
    for module, swap in search.swaps:
        swap = copying_inputs(names.get(module, ""), swap, search.modules)
        swap.storing(store).apply(module)
    if store is not None:
        search.report.notes.append(f"store={store!r}: inputs are kept in nine bits a value")


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: restore every original class, and return the model.

    Works after training, deepcopy, pickling and loading. Layers that were constructed as
    fusedckpt's stay.
    Between the forward and the backward of a checkpoint around fused modules it changes the
    recompute, and that backward raises CheckpointError.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: a fused module has changed its class since, by parametrization or sharding.
            Nothing is changed then.
    """
    _check_module("unfuse", model)
    if not any(original_of(module) is not None for module in model.modules()):
        warnings.warn(
            f"unfuse: no module of the model is fused, so this {type(model).__name__} stays: "
            "pass the model that fuse changed",
            stacklevel=2,
        )
    with stopped_waiting(model):
        swapped = [(name, m) for name, m in model.named_modules() if original_of(m) is not None]
        for name, module in swapped:
            _check_class(name, module)
    for _, module in swapped:
        fallbacks.take_fallback(module)
        undo(module)
    return model


def _check_class(name: str, module: nn.Module) -> None:
    """Refuse a module whose class other code has changed since it was fused."""
    original_class = notes_of(module).original.kind
    if _class_before_fuse(type(module), original_class) not in (
        original_class,
        LayerNorm,
        RMSNorm,
        Sequential,
    ):
        where = name or "the model"
        became = type(module).__name__
        raise ValueError(
            f"unfuse: other code made {where} a {became} after fuse: undo that before unfuse"
        )


def _class_before_fuse(kind: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that `fuse` changed; the class of a plan's role is returned as it is."""
    while kind is not original and (made := made_of(kind)) is not None:
        ours, base = made
        if getattr(ours, "_fusedckpt_is_role", False):
            # a plan is applied
            break
        kind = base
    return kind


def _check_module(name: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be an nn.Module, got {type(model).__name__}")
