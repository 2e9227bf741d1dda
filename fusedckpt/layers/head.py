"""Cross entropy and log-probabilities of a linear to classes, without its logits.

Logits exist for one chunk of rows at a time, in forward and again in backward: 4 GEMMs, where eager
takes 3 and saves logits and their log-softmax. At level "preact" the logits are saved, too: 3
GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fusedckpt.autograd import arguments, dispatch, private
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.blocks import validate
from fusedckpt.blocks.head import HeadOptions
from fusedckpt.blocks.layer_function import run_layer
from fusedckpt.blocks.operands import LoRA
from fusedckpt.kernels.cross_entropy import WIDTH, LogitRule

REDUCTIONS = ("none", "mean", "sum")


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
