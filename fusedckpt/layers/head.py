"""Cross entropy and log-probabilities of a linear to classes, without its logits.

Logits exist for one chunk of rows at a time, in forward and again in backward, which writes their
gradient over them: 4 GEMMs, where eager takes 3 and saves logits and their log-softmax. At level
"preact" the logits are saved, too, in one chunk: 3 GEMMs.

The program of a call gives the statistics of each row, and saves x, the target and these. The
functions make losses of them by torch's own ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from fusedckpt.autograd import arguments, dispatch, levels, private
from fusedckpt.autograd.dispatch import Context, Meta, Operand
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import eager, validate
from fusedckpt.blocks.builder import ONE_LINEAR, Builder, Linears, flat_of
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.blocks.program import Gradient, Op
from fusedckpt.blocks.writer import Writer
from fusedckpt.kernels import chosen, cross_entropy
from fusedckpt.kernels.cross_entropy import WIDTH, LogitRule

REDUCTIONS = ("none", "mean", "sum")
# logits of a chunk: as many bytes as this, or a fourth of the weight's
LOGIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Statistics(Op):
    """y [M, 4 + k] = log p(target), log-sum-exp, mean log p, entropy; log p(ids), where it reads k.

    Reads logits, a target and perhaps ids.
    """

    rule: LogitRule
    kernel: str
    dtype: torch.dtype = torch.float32
    # how many ids each row has
    num_ids: int = 0

    gradients = (("r0", ("r0", "r1", "r2", "y")),)

    def width(self, read: int, weight: Any) -> int:
        """Return how many statistics there are."""
        return WIDTH + self.num_ids

    def forward(self, code: Writer, reads: Sequence[Node], params: Sequence[Any]) -> list[Node]:
        """Write the statistics."""
        fn = chosen.statistics if self.num_ids else cross_entropy.statistics
        return [code.call(fn, *reads, self.rule, self.kernel)]

    def backward(self, code: Writer, grad: Gradient) -> dict[str, Node]:
        """Write the gradient over the logits."""
        fn = chosen.statistics_grad if self.num_ids else cross_entropy.statistics_grad
        reads = [grad.reads[slot] for slot in ("r0", "r1", "r2", "y") if slot in grad.reads]
        args = (grad.dy, *reads, self.rule, self.kernel)
        return {"r0": code.call(fn, *args, over={"dz": (reads[0],)})}

    def eager(self, reads: Sequence[Tensor], params: Sequence[Any]) -> Tensor:
        """Return the statistics in torch's ops."""
        fn = chosen.eager_statistics if len(reads) > 2 else cross_entropy.eager_statistics
        return fn(*reads, self.rule)  # type: ignore[arg-type]  # logits, target and ids


class HeadOptions(NamedTuple):
    """The options of a head, as of any call of linears, with a target, and ids."""

    # the name in errors
    name: str
    # how logits come from the linear
    rule: LogitRule
    # into how many chunks rows are cut, None for as many as LOGIT_BYTES says
    chunks: int | None = None
    # the level of a call, None for the default
    save: str | None = None
    # the name of the weight
    linears: Linears = Linears(ONE_LINEAR)
    # whether a module asks, which may run its own forward
    is_module: bool = False
    # the types in `rule`, as True equals 1
    kinds: tuple[type, ...] = ()
    # whether a call has ids
    has_ids: bool = False
    # seeds of its own dropouts: it has none
    num_seeds: int = 0

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call."""
        ids = (Operand("ids"),) if self.has_ids else ()
        return (Operand("x"), Operand("target"), *ids, *self.linears.operands)

    def check(self, override: str | None) -> str:
        """Return the save level; refuse invalid options."""
        name = self.name
        rule = self.rule
        arguments.number(name, "scale", rule.scale)
        if rule.softcap is not None:
            arguments.number(name, "softcap", rule.softcap)
            if rule.softcap <= 0:
                arguments.wrong_value(name, "softcap", "a positive number", rule.softcap)
        arguments.integer(name, "ignore_index", rule.ignore_index, least=-(2**63))
        if self.chunks is not None:
            arguments.integer(name, "chunks", self.chunks, 1)
        return levels.level_of(name, self.save, override, "inputs", LEVELS_OF["head"])

    def reference(self, x: Any, between: Any, linears: Sequence[tuple[Any, Any]]) -> Tensor:
        """Return the statistics by torch's own ops; between: the target, and ids."""
        target, *ids = between
        z = eager.linear(x, *linears[0])
        return Statistics(self.rule, "aten").eager((z, target.unsqueeze(-1), *ids), ())

    def split_packed(self, linears: Any, saves_half: bool) -> None:
        """Return None: no weight is packed."""

    def saved_gemms(self, adapters: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the GEMM that makes the logits, where they are saved."""
        return (0,) if self.check(levels.override.level) == "preact" else ()

    def make_call(self, context: Context, x: Any, target: Any, *metas: Any) -> Any:
        """Refuse a call with parts that do not fit; return None where only eager may run."""
        level = self.check(context.level)
        name = self.name
        ids, metas = (metas[:1], metas[1:]) if self.has_ids else ((), metas)
        linears = self.linears.of(metas)
        validate.check_tensors(name, (Operand("x"), *self.linears.operands), (x, *flat_of(linears)))
        by_names = dict(zip(ONE_LINEAR, linears, strict=True))
        validate.check_linears(name, x, by_names, None, 1, adds=False)
        self._check(x, target, *ids)
        dtype = context.compute_dtype(x.dtype)
        validate.check_multiplied(name, context, dtype, by_names)
        if context.reference_only:
            return None
        b = Builder(context, dtype)
        classes = linears[0].weight.shape[0]
        on_aten = dispatch.is_aten(x.device, dtype, classes)
        wide = torch.promote_types(dtype, torch.float32)
        num_ids = ids[0].shape[-1] if ids else 0
        op = Statistics(self.rule, "aten" if on_aten else "triton", wide, num_ids)
        z = b.apply(b.linear(*ONE_LINEAR, linears[0]), None, "x", "z")
        b.add(op, "y", (z, "target", "ids") if ids else (z, "target"))
        level = level if context.grad else "inputs"
        chunks = self.chunks or 1
        if level == "inputs" and self.chunks is None:
            rows = math.prod(x.shape[:-1])
            chunks = max(chunks, head_chunks_for(rows, classes, x.shape[-1], dtype))
        # in a checkpoint's recompute not all logits are to exist at once
        how: Any = {
            "level": level,
            "level_in_checkpoint": "inputs",
            "chunks": chunks,
            "casts": True,
        }
        fields = {"dtype": dtype, "gemm_outputs": ("z",), "saved_beside": ("y",)}
        column = target._replace(shape=torch.Size((*target.shape, 1)))
        inputs = {"x": x, "target": column, **({"ids": ids[0]} if ids else {})}
        return b.build(name, inputs, ["y"], fields, **how)

    def _check(self, x: Meta, target: Meta, ids: Meta | None = None) -> None:
        rows = list(x.shape[:-1])
        if ids is not None:
            validate.check_integers(self.name, "ids", ids, x, (torch.int64,))
            if list(ids.shape[:-1]) != rows or len(ids.shape) != len(x.shape) or not ids.shape[-1]:
                raise ValueError(
                    f"{self.name}: ids must be {[*rows, 'k']} with k >= 1, as x is "
                    f"{list(x.shape)}, got {list(ids.shape)}"
                )
        validate.check_integers(self.name, "target", target, x, (torch.int64,))
        if target.shape != x.shape[:-1]:
            raise ValueError(
                f"{self.name}: target must be {rows}, as x is {list(x.shape)}, got "
                f"{list(target.shape)}"
            )


def head_chunks_for(rows: int, classes: int, d: int, dtype: torch.dtype) -> int:
    """Return into how many chunks rows are cut, from shapes alone.

    Each chunk reads the weight, and adds to a float32 gradient as large: a large weight takes few.
    """
    size = classes * dtype.itemsize
    return max(1, math.ceil(rows * size / max(LOGIT_BYTES, size * d // 4, 1)))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | LoRA,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    num_items: Tensor | float | None = None,
    save: str | None = None,
    chunks: int | None = None,
) -> Tensor:
    """Return F.cross_entropy(softcap(scale * F.linear(x, weight, bias)).float(), target).

    Args:
        x: [..., D], float32, bfloat16, float16 or float64.
        weight: [V, D], of x's dtype; under autocast of any dtype but float64. Or a `LoRA` record,
            or a quantized weight, as in `mlp`.
        target: [...], int64, from 0 to V - 1, or ignore_index.
        bias: [V] or None.
        ignore_index: the target of tokens without a loss.
        reduction: "none", "sum" or "mean", over the tokens that are not ignored; the mean of none
            is NaN.
        label_smoothing: as F.cross_entropy has it.
        scale, softcap: z = softcap tanh(scale u / softcap) of the linear's outputs u; without a
            softcap z = scale u.
        z_loss: adds z_loss * logsumexp(z) ** 2 to a token's loss.
        num_items: divides the sum, in place of the number of tokens with a loss; of "mean" only.
        save: "inputs" (the default), or "preact": also the linear's outputs.
        chunks: into how many chunks the tokens are cut; by default so that a chunk's logits take
            64 MiB, or a fourth of the weight's bytes; one where logits are saved. Gradients of
            weights then add up in float32.

    Returns:
        A scalar, or [...] for reduction="none"; float32, or float64 of float64.

    Saves x, target and the statistics, D elements and 24 bytes per token; backward
    runs the linear once more. At "preact" it saves V elements more, and runs no linear again. Rows
    are computed in float32.

    Raises:
        ValueError: invalid shapes, devices or options, or a target out of range; on a GPU such a
            target fails an assertion on the device.
        TypeError: target is not int64, or tensors are not dense, not floating point, or of
            different dtypes.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009,
    which recomputes logits in backward likewise.
    """
    name = "linear_cross_entropy"
    _check(name, reduction, label_smoothing, z_loss, num_items)
    rule = LogitRule(scale, softcap, ignore_index=ignore_index)
    options = HeadOptions(name, rule, chunks, save, kinds=tuple(map(type, rule)))
    statistics = _statistics(options, x, weight, target, bias)
    loss = (label_smoothing - 1) * statistics[..., 0]
    if label_smoothing:
        loss = loss - label_smoothing * statistics[..., 2]
    if z_loss:
        loss = loss + z_loss * statistics[..., 1].square()
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / ((target != ignore_index).sum() if num_items is None else num_items)


def token_logprobs(
    x: Tensor,
    weight: Tensor | LoRA,
    target: Tensor | None,
    bias: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    save: str | None = None,
    chunks: int | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Return log_softmax(softcap(scale * F.linear(x, weight, bias)) / temperature) at the targets.

    Args:
        target: [...], int64, or None where there are ids.
        ids: [..., k], int64, k classes of each token, equal ones too: a teacher's best, in
            distillation.
        entropy: return the entropy of each token's distribution too; all are differentiable.
        temperature: divides the logits, after the softcap.
        ignore_index: a target, or an id, with log-probability zero. All results of a token are zero
            where its target is ignored, or, without targets, all of its ids are.

    Returns:
        The results that are asked for, a tuple if several: log-probabilities of targets [...],
        entropy [...], log-probabilities of ids [..., k]; float32, or float64 of float64.

    Saves 12 bytes per id more than `linear_cross_entropy`; where there are no targets, 8 bytes per
    token in their place. The other arguments and the errors are those of `linear_cross_entropy`;
    an id out of range is a ValueError as a target is, and so are no ids for a token.
    """
    name = "token_logprobs"
    arguments.number(name, "temperature", temperature)
    if temperature <= 0:
        arguments.wrong_value(name, "temperature", "a positive number", temperature)
    has_entropy = arguments.flag(name, "entropy", entropy)
    rule = LogitRule(scale, softcap, 1 / temperature, ignore_index, has_entropy)
    kinds = tuple(map(type, rule))
    options = HeadOptions(name, rule, chunks, save, kinds=kinds, has_ids=ids is not None)
    has_target = target is not None or ids is None
    if not has_target:
        target = _first_counted(options, ids)
    statistics = _statistics(options, x, weight, target, bias, ids)
    # copies, which may be changed in place: backward reads the statistics
    results = [statistics[..., 0].clone()] if has_target else []
    if has_entropy:
        results.append(statistics[..., 3].clone())
    if ids is not None:
        results.append(statistics[..., WIDTH:].clone())
    return results[0] if len(results) == 1 else tuple(results)


def _first_counted(options: HeadOptions, ids: Any) -> Tensor:
    """Return each token's first id that is not ignored, as its target; ignore_index of none."""
    validate.check_tensor(options.name, "ids", ids)
    if isinstance(ids, Tensor) and not ids.shape[-1:].numel():
        # refused with the shapes of all
        return ids.new_empty(ids.shape[:-1])
    is_counted = ids != options.rule.ignore_index
    return ids.gather(-1, is_counted.byte().argmax(-1, keepdim=True)).squeeze(-1)


def _check(name: str, reduction: Any, smoothing: Any, z_loss: Any, num_items: Any) -> None:
    """Refuse options of the loss."""
    arguments.choice(name, "reduction", reduction, REDUCTIONS)
    arguments.probability(name, "label_smoothing", smoothing)
    arguments.number(name, "z_loss", z_loss)
    if num_items is not None and reduction != "mean":
        raise ValueError(f"{name}: num_items needs reduction='mean', got {reduction!r}")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"{name}: num_items must be one number, got {list(num_items.shape)}")
    elif num_items is not None:
        arguments.number(name, "num_items", num_items)


def _statistics(
    options: HeadOptions,
    x: Tensor,
    weight: Any,
    target: Any,
    bias: Any,
    ids: Tensor | None = None,
) -> Tensor:
    """Return [..., 4], with ids [..., 4 + k]: see `kernels/cross_entropy.py`."""
    validate.check_tensor(options.name, "target", target)
    between = (target,) if ids is None else (target, ids)
    if ids is not None:
        validate.check_tensor(options.name, "ids", ids)
    prepare = partial(_columns, options, x, weight)
    return run_layer(options, x, between, [(weight, bias)], prepare)


def _columns(
    options: HeadOptions, x: Any, weight: Any, target: Tensor, *ids: Tensor
) -> tuple[Tensor, ...]:
    """Return the target as a column, [..., 1], and ids; refuse values that are no classes."""
    # ids first: without targets these are ids
    for key, classes in (*[("ids", t) for t in ids], ("target", target)):
        is_read = type(classes) is Tensor and classes.device.type != "meta"
        if is_read and not private.are_transforms_active() and not dispatch.is_traced(x):
            _check_range(options, key, classes, weight)
    return (target.unsqueeze(-1), *ids)


def _check_range(options: HeadOptions, key: str, target: Tensor, weight: Any) -> None:
    """Refuse targets that are no classes; on another device than a CPU without waiting for it."""
    while isinstance(weight, LoRA):
        weight = weight.weight
    classes = weight.shape[0]
    ignored = options.rule.ignore_index
    counted = target != ignored
    if target.device.type != "cpu":
        # a gather asserts on the device
        target.new_zeros(1).expand(classes).gather(0, (target * counted).flatten())
        return
    fits = ((target >= 0) & (target < classes)) | ~counted
    if not bool(fits.all()):
        worst = target[~fits][0].item()
        raise ValueError(
            f"{options.name}: {key} must be from 0 to {classes - 1}, or ignore_index {ignored}, "
            f"got {worst}"
        )


class LinearCrossEntropy(nn.Linear):
    """The head of a model and its loss: nn.Linear, with the same parameters and state_dict.

        loss = F.cross_entropy(F.linear(input, weight, bias).float(), target)

    Saves the input [..., D] and the targets, 8 bytes a token; save="preact" also saves the logits.
    Backward recomputes the logits in chunks. Keyword arguments and errors are those of
    `functional.linear_cross_entropy`.
    """

    save_levels = LEVELS_OF["head"]
    function: Callable[..., Any] = staticmethod(linear_cross_entropy)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        name = type(self).__name__
        tensors = ("input", "x", "weight", "target", "bias", "ids")
        known = [key for key in signature(self.function).parameters if key not in tensors]
        for key in options:
            arguments.choice(name, "options", key, known)
        sizes = {"in_features": in_features, "out_features": out_features}
        arguments.linear_sizes(name, sizes, bias, device, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.options = options

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]  # two
        """Return the function's result for [..., in_features] and targets [...]."""
        return self.function(input, self.weight, target, self.bias, **self.options)

    def extra_repr(self) -> str:
        """Describe the layer as nn.Linear does, with the options of the loss."""
        return ", ".join([super().extra_repr(), *[f"{k}={v}" for k, v in self.options.items()]])


class TokenLogprobs(LinearCrossEntropy):
    """The head of a model for reinforcement learning and distillation, which saves no logits.

    `functional.token_logprobs` as a module: nn.Linear, with the same parameters and state_dict.
    """

    function = staticmethod(token_logprobs)

    def forward(  # type: ignore[override]  # two, or three
        self, input: Tensor, target: Tensor | None = None, ids: Tensor | None = None
    ) -> Any:
        """Return the function's results for [..., in_features], targets [...], ids [..., k]."""
        return self.function(input, self.weight, target, self.bias, **{**self.options, "ids": ids})
