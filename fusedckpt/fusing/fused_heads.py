"""The loss of a causal language model of transformers, computed without its logits.

While such a model computes its loss, its output embedding keeps its input, and returns an empty
tensor in place of logits. The model's code scales that, or caps it, and gives it to its loss
function; ours computes `functional.linear_cross_entropy` from the input instead. `logits` of the
model's output is then None.

The scale and the cap are read once, in the first such call: there the output embedding returns a
few numbers, which show the values that reach the loss. A model that does anything else to its
logits is named, and computes them as before.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedckpt.autograd import dispatch, private
from fusedckpt.autograd.dispatch import autocast_dtype, cast_by
from fusedckpt.autograd.levels import LEVELS_OF
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Part, Swap, original_of, subclass
from fusedckpt.layers import fallbacks
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.layers.head import linear_cross_entropy
from fusedckpt.layers.notes import ModuleNotes, clear_notes, notes_of, set_notes
from fusedckpt.state.code_names import names_in_forward
from fusedckpt.state.rng import CPU, GeneratorCalls, RandomStates, of_device

# told by name: transformers is not imported
_LOSS = "transformers.loss.loss_utils", "ForCausalLMLoss"
# in place of logits in the first call: most show a scale, the last ones a cap
_PROBES = (0.0, 1e-3, -1e-3, 0.1, -3.0, 20.0, -1e5, 1e7)
# of the probes: one where a softcap bends little, and the largest
_LOW = 3
_LARGEST = -1
# of the values that reach the loss, which may be rounded to float32
_TOLERANCE = 1e-5
# attributes of the model: the `LogitMapping` that its loss gets, or the reason why it computes
# logits; whether evaluation skips logits, too


class LogitMapping(NamedTuple):
    """The function of its logits u that a model gives its loss.

    It is softcap tanh(scale u / softcap), or scale u without a softcap.
    """

    scale: float
    softcap: float | None
    # the names of autograd's nodes between, by which a later call is known to do the same
    ops: tuple[str, ...]


class _Refused(Exception):
    """The model does something to its logits that our loss cannot do; the message names it."""


@dataclass
class _LossCall:
    """One call of a model that computes its loss without logits."""

    # the function of the logits, None in the first call, which reads it
    mapping: LogitMapping | None
    # the input of the output embedding, once it was called
    hidden: Tensor | None = None
    # the dtype of autocast at that call
    autocast: torch.dtype | None = None
    # the tensor that the output embedding returned in place of logits
    logits: Tensor | None = field(default=None, repr=False)
    # whether the loss was computed
    has_loss: bool = False

    def logits_placeholder(self, head: nn.Module, x: Tensor) -> Tensor:
        """Keep the output embedding's input, and return a tensor in place of its logits."""
        if self.hidden is not None:
            raise _Refused("calls its output embedding several times")
        self.hidden = x
        # autocast leaves float64 as it is
        self.autocast = None if x.dtype == torch.float64 else autocast_dtype(x.device)
        if self.mapping is None:
            logits = _probes(x)
        else:
            dtype = self.autocast or x.dtype
            logits = torch.empty(*x.shape[:-1], 0, device=x.device, dtype=dtype)
        self.logits = logits.requires_grad_(torch.is_grad_enabled())
        return self.logits

    def mapping_to(self, result: Any) -> LogitMapping:
        """Return the function of the logits that the model gave to its loss."""
        if self.logits is None or not isinstance(result, Tensor):
            raise _Refused("does not pass the logits of its output embedding to its loss")
        if result.shape != self.logits.shape:
            shapes = f"{[*self.logits.shape[:-1]]} and {[*result.shape[:-1]]}"
            raise _Refused(f"selects rows of its logits before the loss ({shapes})")
        ops = tuple(_ops_of(result))
        if self.mapping is None:
            return _read_mapping(self.logits.detach().double(), result.detach().double(), ops)
        if ops != self.mapping.ops:
            raise _Refused("changes its logits in other ways than in its first step")
        return self.mapping


def _probes(x: Tensor) -> Tensor:
    """Return probes in place of the logits of x: each row has its own, so that moved rows show."""
    lead = x.shape[:-1]
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    rows = torch.arange(math.prod(lead), device=x.device, dtype=wide).view(*lead, 1)
    return torch.tensor(_PROBES, device=x.device, dtype=wide) * (1 + rows / rows.numel())


def _ops_of(result: Tensor) -> Iterator[str]:
    """Yield the names of the nodes that made a tensor of logits, casts excepted."""
    node = result.grad_fn
    while node is not None:
        if node.name() not in ("ToCopyBackward0", "torch::autograd::AccumulateGrad"):
            yield node.name()
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)


def _read_mapping(logits: Tensor, result: Tensor, ops: tuple[str, ...]) -> LogitMapping:
    """Return the mapping from probes in place of logits to the values that reached the loss."""
    small, largest = (logits[..., i].flatten()[0].item() for i in (_LOW, _LARGEST))
    small_result, largest_result = (result[..., i].flatten()[0].item() for i in (_LOW, _LARGEST))
    scale = small_result / small
    softcap = None
    if math.isfinite(largest_result) and abs(largest_result) < abs(scale * largest) / 2:
        softcap = abs(largest_result)
        # tanh bends a little at 0.1 already
        scale = softcap * math.atanh(min(small_result / softcap, 1.0 - 1e-12)) / small
    if not (math.isfinite(scale) and scale > 0) or softcap == 0.0:
        raise _Refused("changes its logits before the loss by more than a scale and a softcap")
    expected = scale * logits
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    if not torch.allclose(result, expected, rtol=_TOLERANCE, atol=1e-9):
        raise _Refused("changes its logits before the loss by more than a scale and a softcap")
    scale = 1.0 if abs(scale - 1) < 1e-9 else scale
    return LogitMapping(scale, softcap, ops)


class FusedHead(nn.Module):
    """Forward of an output embedding: while its model computes a loss, it notes its input."""

    _fusedckpt_prefix = "Fused"
    _parameters: Any
    save_levels = LEVELS_OF["head"]
    _fusedckpt: ModuleNotes

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits, or a tensor in their place."""
        call: _LossCall | None = self._fusedckpt.loss_call
        if call is None or not _may_skip(self, input):
            return super().forward(input)
        return call.logits_placeholder(self, input)

    def _fusedckpt_loss(self, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Compute a loss: the work of the module, which a plan may let run otherwise."""
        return run(*args)


def _may_skip(head: Any, x: Any) -> bool:
    """Whether a loss can be computed from the head's input and weights: the same on every rank."""
    if dispatch.is_traced(x) or not isinstance(x, Tensor) or not x.numel():
        return False
    tensors = [t for t in (x, head.weight, head.bias) if t is not None]
    has_one_dtype = len({t.dtype for t in tensors}) == 1 or autocast_dtype(x.device) is not None
    is_transformed = private.are_transforms_active() or private.forward_level() >= 0
    return dispatch.are_plain(*tensors) and has_one_dtype and not is_transformed


class FusedCausalModel(nn.Module):
    """Forward of a causal language model: with labels, in training, it computes no logits."""

    # a Trainer looks a model up by the name of its class
    _fusedckpt_prefix = ""
    _fusedckpt: ModuleNotes

    @staticmethod
    def _fusedckpt_members(original: type[nn.Module]) -> dict[str, Any]:
        """Return a forward with the signature of the model's, which a Trainer reads."""

        @functools.wraps(original.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # as it is now: libraries patch the class, also after `fuse`
            run = partial(original.forward, self, *args, **kwargs)
            return self._run_without_logits(run) if self._may_skip(args, kwargs) else run()

        return {"forward": forward}

    @property
    def loss_function(self) -> Any:
        """The model's loss, or ours of the hidden states."""
        function = super().loss_function  # type: ignore[misc]  # of transformers' models
        call = notes_of(self.get_output_embeddings()).loss_call  # type: ignore[operator]
        return function if call is None or call.hidden is None else partial(self._loss, call)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def _may_skip(self, args: Any, kwargs: Any) -> bool:
        """Whether a call computes a loss, and may do so without logits."""
        head: Any = self.get_output_embeddings()  # type: ignore[operator]  # of transformers' models
        if not isinstance(head, FusedHead) or torch.compiler.is_compiling() or dispatch.DISABLED:
            return False
        if not (self.training and torch.is_grad_enabled()) and not self._fusedckpt.always:
            return False
        if notes_of(head).original.kind.forward is not dispatch.own_forward(nn.Linear):
            fallbacks.note_fallback(head, NotFused("changed", "the forward of its class"))
            return False
        if dispatch.has_hooks(head):
            fallbacks.note_fallback(head, NotFused("hook", "its output embedding"))
            return False
        if isinstance(reason := self._fusedckpt.mapping, str):
            fallbacks.note_fallback(head, NotFused("logits", reason))
            return False
        if not is_causal_loss(super().loss_function):  # type: ignore[misc]
            return False
        try:
            bound = inspect.signature(type(self).forward).bind(self, *args, **kwargs)
        except TypeError:
            return False
        return bound.arguments.get("labels") is not None

    def _run_without_logits(self, run: Callable[[], Any]) -> Any:
        """Run the model's forward; the first time, probe its function of the logits."""
        head: Any = self.get_output_embeddings()  # type: ignore[operator]
        mapping = self._fusedckpt.mapping
        # one call in training says nothing about nodes that evaluation has not
        known = mapping if torch.is_grad_enabled() else None
        call = _LossCall(known)
        random_states = RandomStates(_generators(head))
        try:
            set_notes(head, loss_call=call)
            output = run()
            if call.hidden is not None and not call.has_loss:
                raise _Refused("computes its loss without its loss_function")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # only its words: its frames hold the tensors of the call
            reason = str(error) if isinstance(error, _Refused) else ""
            if known is not None and not reason:
                raise
            reason = reason or f"raised a {type(error).__name__} for probes in place of its logits"
        else:
            return output if call.hidden is None else _output_without_logits(output)
        finally:
            clear_notes(head, "loss_call")
        random_states.restore()
        output = run()
        reason = f"{type(self).__name__} {reason}"
        set_notes(self, mapping=reason)
        fallbacks.note_fallback(head, NotFused("logits", reason))
        warnings.warn(
            f"fuse(head=True): {reason}, so it computes its logits as before", stacklevel=3
        )
        return output

    def _loss(
        self,
        call: _LossCall,
        logits: Any,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return transformers' ForCausalLMLoss of the logits that the model did not compute."""
        head: Any = self.get_output_embeddings()  # type: ignore[operator]
        mapping = call.mapping_to(logits)
        if torch.is_grad_enabled():
            set_notes(self, mapping=mapping)
        call.has_loss = True
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        run = partial(
            _loss_of_rows,
            head.weight,
            head.bias,
            scale=mapping.scale,
            softcap=mapping.softcap,
            ignore_index=ignore_index,
            num_items=num_items_in_batch,
        )
        hidden = call.hidden
        assert hidden is not None
        with cast_by(hidden.device, call.autocast):
            rows = shift_labels.to(hidden.device).reshape(hidden.shape[:-1])
            loss = head._fusedckpt_loss(run, hidden, rows)
        return loss.to(torch.float32)


def _loss_of_rows(weight: Any, bias: Any, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, bias, **options)


def _output_without_logits(output: Any) -> Any:
    """Return a model's output with None in place of logits."""
    if isinstance(output, tuple):
        return output[0], None, *output[2:]
    return type(output)(**{**output, "logits": None})


def _generators(head: Any) -> list[GeneratorCalls]:
    device = head.weight.device
    # it is not to be read while a CUDA graph is captured
    is_read = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    return [CPU, *(of_device(device) if is_read else ())]


def is_causal_loss(function: Any) -> bool:
    """Whether a function is the loss of causal models in transformers."""
    return (getattr(function, "__module__", ""), getattr(function, "__name__", "")) == _LOSS


def find_heads(model: nn.Module, search: Search, always: bool) -> None:
    """Find the causal models of transformers in a model, and their output embeddings."""
    pairs = [(module, _head_of(module)) for module in model.modules()]
    pairs = [(module, head) for module, head in pairs if head is not None]
    if not pairs:
        raise ValueError(
            "fuse: head=True needs a model of transformers with an output embedding, and "
            f"{type(model).__name__} has none: compute its loss with fusedckpt.LinearCrossEntropy"
        )
    names = {module: name for name, module in search.modules.items()}
    for module, head in pairs:
        name = names.get(head)
        if name is None or not search.has(name, "head"):
            continue
        if (original := original_of(head)) is not None:
            if issubclass(type(head), FusedHead):
                search.report.keep(name, original.parts[""])
            continue
        if (reason := _obstacle(module, head)) is not None:
            search.report.leave(name, "head", reason, type(head).__name__)
            continue
        part = Part("head", f"{type(head).__name__} -> loss without logits", None)
        search.report.swap(name, part)
        head_swap = Swap("head", part.change, subclass(FusedHead, type(head)), parts={"": part})
        model_class = subclass(FusedCausalModel, type(module))
        notes = {"mapping": None, "always": always}
        model_swap = Swap("head", part.change, model_class, notes=notes)
        search.swaps += [(head, head_swap), (module, model_swap)]


def _head_of(module: nn.Module) -> nn.Module | None:
    """Return the output embedding that a model of transformers names itself, None for others."""
    find = getattr(type(module), "get_output_embeddings", None)
    if find is None or not hasattr(type(module), "loss_function"):
        return None
    head = module.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Module) else None


def _obstacle(module: nn.Module, head: nn.Module) -> NotFused | None:
    """Return why a model cannot compute its loss without logits, None if it may."""
    if type(head).forward is not dispatch.own_forward(nn.Linear) or "forward" in vars(head):
        return NotFused("head class")
    if not dispatch.are_plain(*head._parameters.values()):
        return NotFused("head weight")
    calls_loss = "loss_function" in names_in_forward(type(module))
    if not is_causal_loss(module.loss_function) or not calls_loss:
        return NotFused("head loss", type(module).__name__)
    return None
