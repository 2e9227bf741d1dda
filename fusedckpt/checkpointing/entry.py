"""`checkpoint`: the public function, and the calls that it makes a segment of.

Under torch.compile a call is torch's own checkpoint; where nothing is saved for backward, a plain
call of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import Tensor

from fusedckpt.autograd import arguments, private
from fusedckpt.autograd.levels import check_store, saving
from fusedckpt.autograd.private import uncompiled
from fusedckpt.checkpointing.attention import SAVED_CONTEXTS, is_asked
from fusedckpt.checkpointing.calls import Call, Checkpointed, Contexts, Options
from fusedckpt.checkpointing.regions import patterns_of, warn_of_no_region
from fusedckpt.checkpointing.segment import Segment, is_plain_call


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = stock.noop_context_fn,
    determinism_check: str = "default",
    debug: bool | str = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    preserve_python_rng: bool = True,
    save_regions: str | Sequence[str] = (),
    offload: bool = False,
    store: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return function(*args, **kwargs), saving its arguments and running it again in backward.

        y = fusedckpt.checkpoint(block, x)

        @fusedckpt.checkpoint(save_regions="attention")
        def run(x): ...

    A drop-in for torch.utils.checkpoint.checkpoint(..., use_reentrant=False), with its results and
    the arguments of the newest torch. Without a function it returns a decorator, which takes
    functions, methods and modules. The differences:

    - Fused layers at any level save nothing in the forward, and their GEMM outputs in the
      recompute, so that backward recomputes no GEMM. A fused layer that ends the segment is not
      recomputed.
    - A recompute runs only if backward needs a recomputed tensor, and its tensors are freed at the
      end of that backward. Saved tensors may be read twice.
    - The RNG state is restored on every device of the tensors in args and kwargs, and of any
      torch.Generator among them.
    - Buffers of modules are restored after their call in the recompute, so that BatchNorm updates
      once. Those that a forward both reads and writes, as spectral norm's, have the values before
      it in the recompute, and so have parameters without gradients, and tensors up to 64 KiB in
      attributes: they are copied, in a module's first call those up to 64 KiB.
    - Backward raises if a tensor argument, or a parameter that autograd saved, was modified in
      place since the forward, as it does without a checkpoint.
    - It also raises if such a parameter was replaced by one with other values, which the recompute
      would read. `torch.func.functional_call` replaces parameters until it returns: call it inside
      `function`, and pass its parameters as arguments.

    Args:
        function: a function or module that computes the same each time it is called.
        args, kwargs: its arguments, the same objects each time. Other state that it reads is
            neither checked nor restored.
        use_reentrant: False or None; True is torch's other implementation.
        preserve_rng_state: give the recompute the random numbers of the forward.
        context_fn: returns two context managers, for the forward and for the recompute, such as
            torch.utils.checkpoint.create_selective_checkpoint_contexts makes.
        determinism_check: "default" compares shape, dtype and device of recomputed tensors, and the
            parameters that they are computed from, with the forward's; "none" compares nothing.
        debug: copy the output of every module in `function`, run the recompute to its end,
            and raise if any bit differs, with the name of the first such module and the operations
            of both runs. "samples": at little cost, compare 64 elements of each tensor that the
            recompute brings back, and raise at the end of that backward where any differs by more
            than rounding. Each recompute waits for the GPU. If a tensor differs, `function` runs
            once more: memory that an operation saves unwritten, as ctc_loss does, is not compared.
        early_stop: end the recompute with the last tensor that backward needs.
        respect_saved_tensors_hooks: whether tensors that a selective `context_fn` saves go through
            the hooks on saved tensors around, such as save_on_cpu. None is False, with torch's
            warning where there are such hooks. Before torch 2.14 they do not.
        preserve_python_rng: also give the recompute the states of `random` and `numpy.random`.
        save_regions: patterns (fnmatch) of the names of regions that the recompute does not run
            again, see `region`. Calls of F.scaled_dot_product_attention and of flash_attn's and
            transformers' attention functions are regions named "attention", those of transformers'
            kernels of mixers and of fla's and mamba_ssm's Functions regions named "scan".
        offload: copy the tensor arguments, and the outputs of saved regions, to host memory until
            backward, except those of the latest segment. The copies run on a separate stream, into
            pinned memory of at most half of the memory that is available. These stay on the device:
            tensors below 1 MiB, leaves, views of larger storages, and tensors of several segments.
            It does nothing on a CPU and other devices without streams, while a CUDA graph is
            captured, inside of another checkpoint and other hooks on saved tensors, and under
            torch.compile: `report` says so.
        store: None, or "int8": keep arguments in nine bits a value, and recompute from these. The
            results are those of `function`, and gradients those of a point nearby: see below.

    store="int8" keeps a code of 8 bits for each value, and a scale of 16 for each 16 values that
    lie together: 9/16 of bfloat16's bytes, also of those that offload=True copies, and 9/32 of
    float32's. The error of a value is at most 1/250 of the largest of its 16. If one value is much
    larger, the others keep more digits, and its error is at most 1/125. NaN and infinities stay.
    Errors of gradients against float64, by parameter, are at most twice eager's in bfloat16, but
    for 2 of 764 in 11 small models, most with channels 50 to 1,000 times larger: 2.07 and 2.45.
    Packed are float32, bfloat16 and float16 tensors of 1,024 elements and more that an operation
    made, with a gradient, in memory of their own; once, if several segments get them. These stay as
    they are: leaves, masks, indices, views of larger tensors, other dtypes, Tensor subclasses
    (DTensor), tensors in containers, outputs of regions. A router that reads a rounded input may
    choose other experts than in the forward: make it a region, or do not round there. Backward
    raises where 64 elements of a saved tensor of indices differ, on a GPU one or two steps late,
    unless determinism_check="none". The comparisons of `debug` need the arguments themselves, which
    it keeps. Under torch.compile `store` does nothing.

    torch's set_checkpoint_debug_enabled and set_checkpoint_early_stop override these. Under
    torch.compile this is torch's own checkpoint; under no_grad, torch.func and forward-mode AD a
    plain call.

    Raises:
        ValueError: use_reentrant is True, determinism_check, debug or store is unknown, debug comes
            with a context_fn, or a call without a function has other arguments than options.
        TypeError: `function` is not callable, `save_regions` or `store` are not strings, or
            `offload` is not a flag.
        torch.utils.checkpoint.CheckpointError: in backward: the recompute differs from the forward,
            or would read another parameter, or store="int8" changed its choice of indices.
        RuntimeError: in backward: an argument or a parameter was modified in place.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    if use_reentrant:
        advice = "pass use_reentrant=False, or call torch.utils.checkpoint.checkpoint"
        raise ValueError(f"checkpoint: use_reentrant=True is not supported: {advice}")
    samples = debug == "samples"
    if isinstance(debug, str) and not samples:
        raise ValueError(f"checkpoint: debug must be True, False or 'samples', got {debug!r}")
    if offload is not True and offload is not False:
        offload = arguments.flag("checkpoint", "offload", offload)
    if store is not None:
        check_store("checkpoint", store)
    options = Options(
        preserve_rng_state=preserve_rng_state,
        preserve_python_rng=preserve_python_rng,
        determinism_check=determinism_check,
        early_stop=early_stop,
        debug=bool(debug) and not samples,
        context_fn=context_fn,
        save_regions=patterns_of(save_regions),
        samples=samples,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        offload=offload,
        rounds=store is not None,
        packs=store is not None,
    )
    if function is not None or args:
        return run_checkpoint(options, function, args, kwargs)
    if kwargs:
        names = ", ".join(kwargs)
        raise ValueError(f"checkpoint: pass a function, or only options of checkpoint, got {names}")
    return partial(Checkpointed, partial(run_checkpoint, options))


# the names that a call of `checkpoint` takes for itself
OPTIONS = frozenset(checkpoint.__kwdefaults__ or ())


def run_checkpoint(options: Options, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return function(*args, **kwargs), whose keywords may be names of options."""
    if not torch.compiler.is_compiling():
        return _run(options, function, args, kwargs)
    contexts = options.context_fn
    if contexts is stock.noop_context_fn and is_asked(options.save_regions):
        contexts = SAVED_CONTEXTS
    # Dynamo does not take these defaults where they are named
    rest: dict[str, Any] = {}
    if contexts is not stock.noop_context_fn:
        rest["context_fn"] = contexts
    if private.user_hooks is not None and options.respect_saved_tensors_hooks is not None:
        rest["respect_saved_tensors_hooks"] = options.respect_saved_tensors_hooks
    taken = {name: kwargs.pop(name) for name in {*OPTIONS, "function"} & {*kwargs}}
    # fused layers save nothing of their own; torch 2.11 takes no such change in the function
    with saving("inputs"):
        return stock.checkpoint(
            partial(function, **taken) if taken else function,
            *args,
            use_reentrant=False,
            determinism_check=options.determinism_check,
            debug=options.debug,
            early_stop=options.early_stop,
            preserve_rng_state=options.preserve_rng_state,
            **rest,
            **kwargs,
        )


def _checked(options: Options) -> Options:
    """Return the options with torch's switches, where they are set."""
    debug, early_stop = private.stock_switches()
    if debug is not None or early_stop is not None:
        options = options._replace(
            debug=options.debug if debug is None else debug,
            early_stop=options.early_stop if early_stop is None else early_stop,
        )
    contexts = options.context_fn
    if contexts is not stock.noop_context_fn:
        if not callable(contexts):
            arguments.wrong_type("checkpoint", "context_fn", "callable", contexts)
        if options.debug or options.samples:
            raise ValueError(
                f"checkpoint: debug and context_fn exclude each other, got {contexts}: pass one"
            )
    if options.packs and (options.debug or options.samples):
        # comparisons are of a recompute with the arguments themselves
        options = options._replace(rounds=False, packs=False)
    check = options.determinism_check
    arguments.choice("checkpoint", "determinism_check", check, ("default", "none"))
    return options


# where torch.compile falls back to eager, it is to compile neither this nor `function` in pieces
@uncompiled
def _run(options: Options, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not callable(function):
        arguments.wrong_type("checkpoint", "function", "callable", function)
    options = _checked(options)
    if is_plain_call():
        return function(*args, **kwargs)
    # the objects that a partial holds are arguments like others
    while isinstance(function, partial):
        args = (*function.args, *args)
        kwargs = {**function.keywords, **kwargs}
        function = function.func
    segment = Segment(options)
    # where no argument needs a gradient, perhaps nothing does
    save: Any = segment.save_argument_late
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            save = segment.save_argument if options.packs else segment.save_exactly
    output = segment.run(Call(function, args, kwargs, options, save), args, kwargs)
    if options.save_regions and not (segment.has_matched or segment.refuses or options.samples):
        warn_of_no_region(function, options.save_regions)
    return output
