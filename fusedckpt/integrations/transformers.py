"""transformers: a callback for its Trainer, our checkpoint under its gradient checkpointing, and
our experts as one of its implementations."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as stock
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fusedckpt.autograd import arguments, dispatch, levels, private
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.autograd.phases import default_stock
from fusedckpt.autograd.weak_map import WeakMap
from fusedckpt.checkpointing.entry import OPTIONS, checkpoint
from fusedckpt.checkpointing.regions import patterns_of
from fusedckpt.fusing.experts import gating_of, has_experts_parameters
from fusedckpt.fusing.fuse_report import FuseReport
from fusedckpt.fusing.fuser import fuse
from fusedckpt.fusing.swap import original_of
from fusedckpt.integrations.first_batch import at_first_batch
from fusedckpt.kernels.gating import Gating
from fusedckpt.layers.experts import experts

__all__ = ["FuseCallback", "register_experts", "use_checkpoint"]

_IS_REENTRANT = (
    "fusedckpt.checkpoint has no use_reentrant=True: pass "
    'gradient_checkpointing_kwargs={"use_reentrant": False} to use it'
)


class FuseCallback(TrainerCallback):
    """Fuse a Trainer's model, take our checkpoint, and plan and report on the first batch.

        Trainer(model, args, train_dataset=data, callbacks=[FuseCallback(save="preact")]).train()

    Given as `callbacks=` it fuses when the Trainer is made, before DDP, FSDP and torch.compile. A
    model that `model_init` makes in `train()` is fused after them, which FSDP does not allow: call
    `fuse` in `model_init`. On the first batch it runs a copy of a model that is neither sharded nor
    compiled, and fuses the modules that it finds so, see `example_inputs` of `fuse`. Budgets are
    those of the module inside DDP, without DDP's buckets.

    Args:
        checkpoint: whether `activation_checkpointing=True`, `gradient_checkpointing=True` in older
            releases of transformers, takes `fusedckpt.checkpoint`, with offload=True if that is
            among activation_checkpointing_kwargs; and whether checkpointing does that the model has
            without these arguments, and accelerate's activation_checkpointing of FSDP2, see
            `use_checkpoint`. Where it cannot, as with use_reentrant=True, checkpointing is
            unchanged, with one warning.
        save_regions: of that checkpoint.
        plan, report: as in `at_first_batch`, once for each `train()`. Under FSDP no plan: apply one
            to the model before the Trainer gets it.
        log: gets the FuseReport, Plan and MemoryReport, only of the first process.
        options: those of `fusedckpt.fuse`.

    Raises:
        ValueError: when training begins: plan or report with torch_compile on several processes.
    """

    def __init__(
        self,
        *,
        checkpoint: bool = True,
        save_regions: str | Sequence[str] = (),
        plan: Mapping[str, Any] | None = None,
        report: bool = False,
        log: Callable[[Any], Any] = print,
        **options: Any,
    ):
        self.checkpoint = checkpoint
        self.plan = plan
        self.report = report
        self.log = log
        self.options = options
        self.save_regions = patterns_of(save_regions)
        self._has_warned = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fuse: the one event before `accelerator.prepare`."""
        self._fuse(kwargs["model"], state)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take our checkpoint, and prepare for the first batch."""
        model = kwargs["model"]
        if not any(original_of(module) is not None for module in model.modules()):
            self._fuse(model, state)
        if self.checkpoint and (_is_checkpointed(args, model) or _wrappers(model)):
            self._use_checkpoint(model, state)
        # not even a hook: inside a module that DDP or FSDP compiles, one would end the compilation
        fuse_again = self._runs_a_copy(args, model)
        if self.plan is None and not self.report and not fuse_again:
            return
        if args.torch_compile and args.world_size > 1:
            raise ValueError(
                "FuseCallback: plan and report need one process, or torch_compile=False, got "
                f"torch_compile=True and {args.world_size} processes"
            )
        at_first_batch(
            model,
            fuse=self.options if fuse_again else None,
            plan=self.plan and {"accumulate": args.gradient_accumulation_steps, **self.plan},
            report=self.report,
            # one that accumulates gradients steps after the last micro-batch alone
            optimizer=getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]),
            log=self._log_of_first_batch(state),
        )

    def _runs_a_copy(self, args: TrainingArguments, model: nn.Module) -> bool:
        """Whether `fuse` may find more by running a copy of the model."""
        # inside of a checkpoint nothing is run again by itself
        if _is_checkpointed(args, model) or not self.options.get("attention", True):
            return False
        if args.torch_compile:
            return False
        is_sharded = any(map(private.is_fsdp_managed, model.modules()))
        is_sharded = is_sharded or not all(map(_is_whole, model.parameters()))
        return not {"example_inputs", "batch"} & self.options.keys() and not is_sharded

    def _use_checkpoint(self, model: nn.Module, state: TrainerState) -> None:
        try:
            functions = [function for *_, function in _checkpointing(model)]
            reason = _IS_REENTRANT if any(map(_is_reentrant, functions)) else None
        except ValueError as error:
            reason = str(error)
        if reason is None:
            use_checkpoint(model, self.save_regions)
        elif state.is_world_process_zero and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"FuseCallback: gradient checkpointing unchanged: {reason}", stacklevel=2)

    def _fuse(self, model: nn.Module, state: TrainerState) -> None:
        self._log(state)(fuse(model, **self.options))

    def _log_of_first_batch(self, state: TrainerState) -> Callable[[Any], Any]:
        log = self._log(state)

        def tell(result: Any) -> None:
            # the report of a model fused with the Trainer has been printed
            if not isinstance(result, FuseReport) or result.swapped:
                log(result)

        return tell

    def _log(self, state: TrainerState) -> Callable[[Any], Any]:
        return self.log if state.is_world_process_zero else lambda result: None


def _is_checkpointed(args: TrainingArguments, model: nn.Module) -> bool:
    """Whether a Trainer is to checkpoint, or the model does, as LLaMA-Factory has it."""
    # the name of newer releases, in which the older one is deprecated
    is_on = getattr(args, "activation_checkpointing", None)
    return bool(is_on or getattr(args, "gradient_checkpointing", False) or _flagged(model))


def _is_whole(parameter: torch.Tensor) -> bool:
    """Whether a parameter is no DTensor, and none of DeepSpeed's."""
    return dispatch.are_plain(parameter) and not hasattr(parameter, "ds_id")


def use_checkpoint(model: nn.Module, save_regions: str | Sequence[str] = ()) -> None:
    """Put `fusedckpt.checkpoint` where gradient checkpointing put torch's, with its options.

        model.activation_checkpointing_enable()
        use_checkpoint(model, save_regions=["attention"])

    It is `gradient_checkpointing_enable()` in older releases of transformers.
    Models of diffusers also work, after `enable_gradient_checkpointing()`: the function by which
    they checkpoint is called once, with a module that finds out which checkpoint calls it.

    Modules inside torch's `checkpoint_wrapper`, which accelerate uses for FSDP2, also work.

    With save_regions=["attention"] attention does not run again: a layer saves its input, and
    attention's output and log-sum-exp. A checkpoint inside of save_on_cpu, as with offload=True, or
    inside of torch's `offload_wrapper`, is taken as `checkpoint(..., offload=True)`.

    Disabling it ends it, enabling it anew brings torch's back.

    Raises:
        TypeError: `model` is not an nn.Module, or `save_regions` are not strings.
        ValueError: no gradient checkpointing is enabled, or it runs another function than torch's
            checkpoint; on the first call: use_reentrant=True.
    """
    arguments.module("use_checkpoint", "model", model)
    patterns = patterns_of(save_regions)
    for module, name, function in _checkpointing(model):
        keywords = {**function.keywords, "save_regions": patterns}
        setattr(module, name, partial(checkpoint, *function.args, **keywords))
    _, offload = private.activation_wrappers()
    for wrapper in model.modules():
        if isinstance(wrapper, offload) and (inner := _wrapped(wrapper)) is not None:
            # without save_on_cpu around
            wrapper.forward = partial(type(inner).__call__, inner)


# the attribute in which modules of transformers and diffusers have a checkpoint
_FLAGGED = "_gradient_checkpointing_func"
# the attribute in which torch's wrappers have it
_WRAPPED = "checkpoint_fn"


def _checkpointing(model: nn.Module) -> list[tuple[nn.Module, str, partial[Any]]]:
    """Return the modules that are checkpointed, and by which attribute they call which checkpoint.

    The checkpoint is a partial of torch's, or of ours, with its options.
    """
    places = [(module, _FLAGGED) for module in _flagged(model)]
    wrappers = _wrappers(model)
    places += [(wrapper, _WRAPPED) for wrapper in wrappers]
    if not places:
        raise ValueError(
            "use_checkpoint: no module has gradient_checkpointing set: call "
            "model.activation_checkpointing_enable(), or in older releases "
            "gradient_checkpointing_enable(), before"
        )
    # one function for all of them
    checkpoints: dict[Any, partial[Any]] = {}
    for module, name in places:
        function: Any = getattr(module, name, None)
        if function not in checkpoints:
            checkpoints[function] = _as_checkpoint(function)
    return [
        (module, name, _offloading(checkpoints[getattr(module, name)], wrappers.get(module, False)))
        for module, name in places
    ]


def _flagged(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", 0)]


def _wrappers(model: nn.Module) -> dict[nn.Module, bool]:
    """Return torch's wrappers of checkpointed modules; whether an OffloadWrapper is around each."""
    checkpoint_wrapper, offload_wrapper = private.activation_wrappers()
    modules = [*model.modules()]
    wrappers = {m: False for m in modules if isinstance(m, checkpoint_wrapper)}
    inner = [_wrapped(module) for module in modules if isinstance(module, offload_wrapper)]
    return {**wrappers, **{module: True for module in inner if module is not None}}


def _wrapped(wrapper: Any) -> nn.Module | None:
    """Return the CheckpointWrapper right inside of an OffloadWrapper."""
    kind, _ = private.activation_wrappers()
    # the only one
    module = next(wrapper.children())
    return module if isinstance(module, kind) else None


def _offloading(function: partial[Any], is_offloading: bool) -> partial[Any]:
    return partial(function, offload=True) if is_offloading else function


def _as_checkpoint(function: Any) -> partial[Any]:
    """Return a function that checkpoints as a partial of torch's checkpoint, or of ours."""
    if getattr(function, "func", None) in (stock.checkpoint, checkpoint):
        return function
    kind = _calls_checkpoint(function)
    keywords = {}
    if not kind and isinstance(function, partial) and function.keywords.keys() <= OPTIONS:
        # torch's checkpoint may get its options by the function
        keywords = function.keywords
        kind = _calls_checkpoint(partial(function.func, *function.args, use_reentrant=False))
    if not kind:
        raise ValueError(
            f"use_checkpoint: the model calls {function} where torch's checkpoint was expected: "
            "let it call torch.utils.checkpoint.checkpoint"
        )
    return _offloading(partial(checkpoint, **keywords), kind == "offload")


class _Probe(nn.Module):
    """Notes its calls: the arguments, and whether torch's checkpoint is around, and offloads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self._hooks = private.top_hooks()
        self._modes = _modes()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note a call, and return its first argument."""
        kind = default_stock(self._hooks) if _modes() == self._modes else ""
        self.calls.append((kind, kwargs, *args))
        return args[0]


def _modes() -> tuple[Any, ...]:
    modes = private.num_dispatch_modes(), private.num_function_modes()
    return *modes, private.is_any_autocast_on()


def _calls_checkpoint(function: Any) -> str:
    """Return "checkpoint" for a function that calls its first argument in one, and does no more.

    "offload" where save_on_cpu is around, "" for another function. The function is called with a
    module that looks around. Models of diffusers have such a function.
    """
    probe = _Probe()
    args = tuple(torch.zeros(1, requires_grad=True) for _ in range(2))
    try:
        with torch.enable_grad():
            y = function(probe, *args)
    except Exception:
        return ""
    if len(probe.calls) != 1 or len(probe.calls[0]) != 4:
        return ""
    kind, kwargs, *arguments = probe.calls[0]
    is_plain = not kwargs and y is args[0] and all(map(operator.is_, arguments, args))
    return kind if is_plain else ""


def _is_reentrant(function: partial[Any]) -> bool:
    return bool(function.keywords.get("use_reentrant"))


def register_experts(
    name: str = "fusedckpt", *, save: str | None = None, chunks: int | None = None
) -> None:
    """Register `fusedckpt.functional.experts` as an implementation of transformers' experts.

        register_experts()
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="fusedckpt")

    It is for expert parallelism, which transformers sets up while it loads a model: elsewhere
    `fuse(model)` swaps experts, and compares them first. A layer saves its input, the routing and
    its scores for backward.

    Args:
        name: the name of the implementation; one of this name is replaced.
        save, chunks: those of `fusedckpt.functional.experts`.

    Raises:
        TypeError, ValueError: `name` is not a string that is not empty, or an option is invalid. In
            a forward: the experts do not have the weights `gate_up_proj` and `down_proj`, or gate
            them in a way that is not known.
    """
    if not isinstance(name, str):
        arguments.wrong_type("register_experts", "name", "a string", name)
    if not name:
        raise ValueError("register_experts: expected a name, got an empty string")
    if save is not None:
        levels.check("register_experts", save, LEVELS_OF["experts"])
    if chunks is not None:
        arguments.integer("register_experts", "chunks", chunks, 1)
    # older releases of transformers do not have it
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415

    ALL_EXPERTS_FUNCTIONS.register(name, partial(_run_experts, save=save, chunks=chunks))


# how each module of experts gates: it depends on its class and on its numbers
_GATINGS = WeakMap[nn.Module, Gating]()


def _run_experts(
    module: Any,
    x: torch.Tensor,
    index: torch.Tensor,
    scores: torch.Tensor,
    save: str | None,
    chunks: int | None,
) -> torch.Tensor:
    """Run transformers' experts: x [T, D], index and scores [T, K]."""
    gating = _GATINGS.get(module)
    if gating is None:
        gating = _GATINGS.put(module, _gating(module))
    has_bias = module.has_bias
    return experts(
        x,
        index,
        scores,
        module.gate_up_proj,
        module.down_proj,
        activation=gating,
        gate_up_bias=module.gate_up_proj_bias if has_bias else None,
        down_bias=module.down_proj_bias if has_bias else None,
        is_transposed=module.is_transposed,
        save=save,
        chunks=chunks,
    )


def _gating(module: nn.Module) -> Gating:
    """Return how transformers' experts gate; raise where ours do not compute the same."""
    is_gated = has_experts_parameters(module) and getattr(module, "has_gate", True)
    gating = gating_of(module) if is_gated else None
    if gating is None or getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            "register_experts: expected experts with gate_up_proj [E, 2 F, D] and down_proj, a "
            f"known activation and no norm after them, got {type(module).__name__}: load the "
            'model with experts_implementation="grouped_mm"'
        )
    return gating
