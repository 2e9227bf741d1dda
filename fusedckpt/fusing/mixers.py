"""Attention and mixers: to run their forward again is better than to save it.

A mixer is a module that mixes tokens. They are found by the functions that their code calls: the
code of a class's forward, of its other methods and of callable objects in its attributes that are
called there, and of functions of the user's package or file that these call. A softmax and a matrix
product are attention written by hand: in this code, or in modules of any name without weights that
it calls.

A function that only other code chooses, out of a table, shows in a run. With a batch, a copy of the
model runs. It shares the parameters and nothing else, so the forward changes nothing of the model.
The tensors that autograd would save are counted, and not kept. Without a batch the first training
step is observed, see `first_step`. This finds

- the innermost modules with weights in which a function of attention or of a mixer is called, by
  any code;
- those whose own operations save more than MOST_TIMES_OUTPUT times their inputs and their result,
  if a second run of them gives the same.
"""

from __future__ import annotations

import copy
import dis
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fusedckpt.autograd.dispatch import is_plain
from fusedckpt.autograd.private import pytree, remove_global_hook, storage_key
from fusedckpt.checkpointing import scans
from fusedckpt.checkpointing.attention import NAME, watching_functions
from fusedckpt.checkpointing.call_state import CallState, modules_in
from fusedckpt.checkpointing.regions import MOST_TIMES_OUTPUT
from fusedckpt.checkpointing.scans import CONVOLUTION, SCAN
from fusedckpt.checkpointing.written_buffers import COPIED_NBYTES
from fusedckpt.fusing import reasons
from fusedckpt.fusing.recomputed_modules import LEARNED, Recomputed
from fusedckpt.fusing.replica import copied_inputs, running_copy_of, shared_in_copies, undisturbed
from fusedckpt.fusing.search import Search
from fusedckpt.fusing.swap import Part, Swap, original_of, subclass
from fusedckpt.layers.fallbacks import NotFused
from fusedckpt.memory import nbytes_of
from fusedckpt.state import rng
from fusedckpt.state.code_names import (
    class_attributes,
    codes_in,
    functions_reached,
    names_in,
    values_named,
)

# functions of attention, and of diffusers, which choose one of them
_ATTENTION = frozenset(
    ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS", "flex_attention")
    + ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func")
    + ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "dispatch_attention_fn")
    + ("varlen_attn",)
)
# of attention written by hand: a softmax between two products
_SOFTMAXES = "softmax", "entmax", "sparsemax"
# those of losses and of discrete choices
_NO_SOFTMAXES = "log_softmax", "gumbel_softmax"
_MATRIX_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
# modules with one of these are not run again as a whole
_NOT_RERUN = (nn.ModuleList, nn.Embedding, nn.Conv2d, nn.Conv3d)


def find_mixers(model: nn.Module, search: Search, batch: Any) -> None:
    """Find attention and mixers outside of swapped modules, which are not mostly an MLP."""
    known = {*search.inside, *(module for module, _ in search.swaps)}
    mlps = [module for module, swap in search.swaps if swap.kind == "mlp"]
    mixers = _mixers(model, search, batch)
    for name in [name for name in mixers if _is_mostly(search.modules[name], mlps)]:
        # the block may call the forward of attention itself, so that the run saw the block alone
        inside = {n: k for n, k in mixers_in_code(search.modules).items() if _is_inside(n, name)}
        if inside:
            del mixers[name]
            mixers |= inside
    for name, kinds in mixers.items():
        module = search.modules[name]
        if module in known or original_of(module) is not None:
            continue
        # at other levels they are not swapped
        if not search.has(name, "attention") or search.save != "inputs":
            continue
        swap = recomputing_swap(module, kinds, search.save)
        if _is_mostly(module, mlps):
            swap = NotFused("around")
        if isinstance(swap, NotFused):
            search.report.leave(name, "attention", swap, type(module).__name__)
            continue
        search.report.run_again(name, swap.parts[""])
        search.swaps.append((module, swap))


def blocks_around(search: Search) -> Iterator[str]:
    """Yield the names of blocks with code that calls attention, around a module that does so, too.

    A run tells which of the two is called: a block may call the layers of the module inside.
    """
    found = {m for m, swap in search.swaps if issubclass(swap.new_class, Recomputed)}
    taken = {m for m, swap in search.swaps if swap.parts}
    mlps = [module for module, swap in search.swaps if swap.kind == "mlp"]
    for name, module in search.modules.items():
        if not name or module in taken or module in search.inside or not is_own(module):
            continue
        inner = [*module.modules()]
        if found.isdisjoint(inner) or any(isinstance(m, _NOT_RERUN) for m in inner):
            continue
        if NAME in kinds_called(module) and not _is_mostly(module, mlps):
            yield name


def _is_mostly(module: nn.Module, mlps: Sequence[nn.Module]) -> bool:
    """Whether MLPs that are fused have half of a module's parameters or more.

    They would run again with it. A small one costs little, such as that of Swin V2's biases.
    """
    layers = set(module.modules())
    inner = {p for mlp in mlps if mlp in layers for p in mlp.parameters()}
    return 2 * sum(p.numel() for p in inner) >= sum(p.numel() for p in module.parameters()) > 0


def recomputing_swap(
    module: nn.Module, kinds: frozenset[str], save: str, is_gathered: bool = False
) -> Swap | NotFused:
    """Return the swap of a module that runs again, and calls these kinds of functions.

    is_gathered: whether it runs, so that FSDP2 has gathered its parameters.
    """
    kind = type(module)
    notes = {"save": save, "mixes": kinds, **LEARNED}
    reason = reasons.of_storage(module)
    if is_gathered and reason == NotFused("fsdp"):
        reason = None
    reason = reason or reasons.of_swap(module, {}, [])
    if reason is not None:
        return reason
    part = Part("attention", f"{kind.__name__} -> recomputed{_exceptions(kinds)}", None)
    return Swap("attention", part.change, subclass(Recomputed, kind), notes=notes, parts={"": part})


def _mixers(model: nn.Module, search: Search, batch: Any) -> dict[str, frozenset[str]]:
    """Return the names of attention modules and mixers, and kinds of functions that they call."""
    in_code = mixers_in_code(search.modules)
    if batch is None or not search.kinds["attention"]:
        return in_code
    # a layer that shares a recipe may be part of a module that saves much
    originals = ((m, original_of(m)) for m in search.modules.values())
    fused = (m for m, original in originals if original is not None and original.parts)
    swapped = {*search.inside, *fused, *(module for module, _ in search.swaps)}
    in_run = mixers_in_run(model, *arguments_of(batch), swapped)
    if isinstance(in_run, str):
        search.report.notes.append(f"attention and mixers were found by their code, as {in_run}")
        return in_code
    search.report.notes.append("attention and mixers were found by running the batch")
    search.report.own_bytes.update(in_run.own_bytes)
    return {**in_run.kinds, **_not_reached(in_code, in_run.kinds)}


def _not_reached(
    in_code: Mapping[str, frozenset[str]], in_run: Mapping[str, frozenset[str]]
) -> dict[str, frozenset[str]]:
    """Return the modules in parts of the model that the run did not reach."""
    return {
        name: kinds
        for name, kinds in in_code.items()
        if not any(_is_inside(name, other) or _is_inside(other, name) for other in in_run)
    }


def _is_inside(inner: str, outer: str) -> bool:
    """Whether a name is that of a module inside of another one, or the same."""
    return f"{inner}.".startswith(f"{outer}.")


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: a dict of them, a tuple, or one tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    return tuple(batch), {}


def _exceptions(kinds: frozenset[str]) -> str:
    """Return the words for the functions that do not run again."""
    names = ["attention itself"] * (NAME in kinds) + ["its scan"] * (SCAN in kinds)
    return f" but for {' and '.join(names)}" if names else ""


class _Calls(NamedTuple):
    """The calls in the code of a method, and in that of the functions that it calls."""

    # the kinds of functions that mix tokens
    kinds: frozenset[str] = frozenset()
    # whether there is a matrix product
    has_product: bool = False
    # whether there is a softmax
    has_softmax: bool = False
    # all names in the code
    names: frozenset[str] = frozenset()


def mixers_in_code(modules: Mapping[str, nn.Module]) -> dict[str, frozenset[str]]:
    """Return the names of the modules that mix tokens, and the kinds of functions they call.

    Of several, one inside another, it is the innermost with weights.
    """
    kinds_by_name = dict[str, frozenset[str]]()
    for name, module in modules.items():
        if kinds := kinds_called(module):
            while name and not any(p.dim() > 1 for p in modules[name].parameters()):
                # a module for the call alone
                name = name.rpartition(".")[0]
            kinds_by_name[name] = kinds_by_name.get(name, frozenset()) | kinds
    inner = innermost(kinds_by_name)
    # a whole model runs more than attention
    is_whole = any(isinstance(m, (nn.Embedding, nn.ModuleList)) for m in modules.values())
    return inner if inner or is_whole else kinds_by_name


def innermost(kinds_by_name: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Leave out the model itself, and modules around others."""
    return {
        name: kinds
        for name, kinds in kinds_by_name.items()
        if name and not any(other.startswith(f"{name}.") for other in kinds_by_name)
    }


def kinds_called(module: nn.Module) -> frozenset[str]:
    """Return the kinds of functions that a module's code, or a callable object in it, calls."""
    if isinstance(module, nn.MultiheadAttention):
        return frozenset((NAME,))
    # in attributes, as diffusers' processors are
    classes = [type(value) for value in vars(module).values() if callable(value)]
    functions = [kind for x in vars(module).values() if (kind := _kind_of(x)) is not None]
    calls = _calls_in(type(module), "forward")
    kinds = calls.kinds.union(functions, *(_calls_in(kind, "__call__").kinds for kind in classes))
    if NAME in kinds:
        return kinds
    inside = [calls, *_calls_inside(module, calls.names)]
    is_by_hand = any(x.has_product for x in inside) and any(x.has_softmax for x in inside)
    return kinds | {NAME} if is_by_hand else kinds


def _calls_inside(module: nn.Module, names: Collection[str]) -> Iterator[_Calls]:
    """Yield the calls of functions in a module's attributes, and of modules without weights."""
    for name, value in vars(module).items():
        if name in names and (called := _name_of(value)):
            yield _Calls(has_product=called in _MATRIX_PRODUCTS, has_softmax=_is_softmax(called))
    for name, child in module.named_children():
        if name not in names or any(True for _ in child.parameters()):
            continue
        for inner in child.modules():
            if isinstance(inner, (nn.Softmax, nn.Softmax2d)):
                yield _Calls(has_softmax=True)
            else:
                yield _calls_in(type(inner), "forward")


def _name_of(fn: Any) -> str:
    """Return the name of a function, also of a partial of it; "" for other objects."""
    if isinstance(fn, partial):
        return _name_of(fn.func)
    return fn.__name__ if isinstance(fn, (FunctionType, BuiltinFunctionType)) else ""


def _is_softmax(name: str) -> bool:
    """Whether a name is that of a softmax over scores, or one of its kind."""
    lower = name.lower()
    return any(word in lower for word in _SOFTMAXES) and lower not in _NO_SOFTMAXES


def _mixes(fn: Any) -> bool:
    return _kind_of(fn) is not None


def _kind_of(fn: Any) -> str | None:
    """Return the kind of a function, also of a partial of it; None where it mixes no tokens."""
    kind = scans.kind_of(fn)
    if kind is None and isinstance(fn, partial):
        return _kind_of(fn.func)
    is_function = isinstance(fn, (FunctionType, BuiltinFunctionType))
    return NAME if is_function and fn.__name__ in _ATTENTION else kind


@cache
def _calls_in(kind: type, method: str) -> _Calls:
    """Return the calls in a method's code, and in that of the functions that it calls."""
    kinds = set[str]()
    all_names = set[str]()
    has_product = False
    for fn in functions_reached(kind, method, ends=_mixes):
        names = {*names_in(fn.__code__)}
        values = [*values_named(fn, names), *class_attributes(kind, names)]
        # under other names, too
        all_names |= {*names, *map(_name_of, values)}
        has_product = has_product or _has_product_operator(fn.__code__)
        kinds.update(mixing for value in values if (mixing := _kind_of(value)) is not None)
    has_product = has_product or not _MATRIX_PRODUCTS.isdisjoint(all_names)
    has_softmax = any(map(_is_softmax, all_names))
    if not _ATTENTION.isdisjoint(all_names) or (has_product and has_softmax):
        kinds.add(NAME)
    return _Calls(frozenset(kinds), has_product, has_softmax, frozenset(all_names))


def _has_product_operator(code: CodeType) -> bool:
    """Whether code has the operator of a matrix product."""
    return any(
        instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"
        for part in codes_in(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname.startswith("BINARY_")
    )


class MixersInRun(NamedTuple):
    """The result of a run of a copy of a model."""

    # by the name of a module to run again, kinds of functions; none where no function marks it
    kinds: dict[str, frozenset[str]]
    # by the name of a module, the bytes that its own functions saved
    own_bytes: dict[str, int]


def mixers_in_run(
    model: nn.Module, args: Any, kwargs: Any, swapped: Collection[nn.Module] = ()
) -> MixersInRun | str:
    """Return the modules to run again, by name; or why the run failed.

    args, kwargs: the model's arguments; swapped: its modules that will save little anyway.
    """
    try:
        copied = copy.deepcopy(model, shared_in_copies(model))
    except Exception as error:
        return f"a copy of the model raised {type(error).__name__}: {error}"
    names = {module: name for name, module in copied.named_modules()}
    observer = _CopyObserver({m for m, n in names.items() if model.get_submodule(n) in swapped})
    try:
        with running_copy_of(model):
            observer.run(copied.train(), *copied_inputs(args, kwargs))
    except Exception as error:
        return f"the model raised {type(error).__name__}: {error}"
    heavy = {module: set[str]() for module in observer.heavy}
    kinds_by_module = {**heavy, **observer.kinds}
    kinds_by_name = {names[m]: frozenset(k) for m, k in kinds_by_module.items() if m in names}
    return MixersInRun(innermost(kinds_by_name), observer.own_bytes(names))


class RunObserver:
    """Sees the modules that run where functions are called, or tensors are saved."""

    def __init__(self, swapped: Collection[nn.Module]) -> None:
        self._swapped = swapped
        # by module, the kinds of functions that are called while it is the innermost with weights
        self.kinds: dict[nn.Module, set[str]] = {}
        self._running: list[RunningModule] = []
        # by module, the bytes that its own functions saved in its calls
        self._own_bytes = Counter[nn.Module]()
        # the storages of parameters and buffers, which are not counted
        self._parameters: set[int] = set()
        # the thread that is observed; None during a second run
        self._thread: int | None = threading.get_ident()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Observe the modules of a model that run inside."""
        members = [*model.parameters(), *model.buffers()]
        self._parameters = {storage_key(t.untyped_storage()) for t in members if _is_dense(t)}
        hooks = (
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, with_kwargs=True, always_call=True),
        )
        counting = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        try:
            with counting, watching_functions(self._note_function):
                yield
        finally:
            for hook in hooks:
                remove_global_hook(hook)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Note that a module begins to run."""
        if threading.get_ident() == self._thread:
            self._running.append(self._begun(module, args))

    def _begun(self, module: nn.Module, args: Any) -> RunningModule:
        is_asked = self._asks(module)
        return RunningModule(module, {}, Before(module, args) if is_asked else None)

    def _asks(self, module: nn.Module) -> bool:
        """Whether it is to be decided of a module that begins to run."""
        raise NotImplementedError

    def own_bytes(self, names: Mapping[nn.Module, str]) -> dict[str, int]:
        """Return the bytes that modules' own functions saved, by the names of these modules."""
        return {names[m]: nbytes for m, nbytes in self._own_bytes.items() if m in names}

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> Any:
        """Decide about a module that has run; return another result for it, if there is one.

        torch passes neither keywords nor a result where the module raised.
        """
        if threading.get_ident() != self._thread or not self._running:
            return None
        if self._running[-1].module is not module:
            return None
        running = self._running.pop()
        self._own_bytes[module] += sum(nbytes for _, nbytes in running.saved.values())
        return self._decide(running, args, kwargs, output)

    def _decide(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> Any:
        raise NotImplementedError

    def pack(self, tensor: Tensor) -> Any:
        """Count a tensor that is saved; keep nothing."""
        self._count(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return a saved tensor."""
        raise RuntimeError("the model runs a backward in its forward")

    def saves_much(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether a call saved more than MOST_TIMES_OUTPUT times its inputs and its result."""
        results = _tensors_in(output)
        saved = sum(nbytes for _, nbytes in running.saved.values())
        # a router's result is small, and so are its saved tensors
        largest = max(
            nbytes_of(filter(_is_dense, tensors))
            for tensors in (results, _tensors_in((args, kwargs)))
        )
        return bool(results) and saved > MOST_TIMES_OUTPUT * largest

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Observe nothing inside."""
        thread = self._thread
        self._thread = None
        try:
            yield
        finally:
            self._thread = thread

    def may_run_again(self, module: nn.Module) -> bool:
        """Whether a module is no layer of torch's, holds no block, and looks at no pictures."""
        if not is_own(module):
            return False
        blocks = (part in self._swapped and has_matrix(part) for part in module.modules())
        return not any(blocks) and not any(isinstance(m, _NOT_RERUN) for m in module.modules())

    def _count(self, tensor: Tensor) -> None:
        """Add a saved tensor to the innermost module with weights."""
        if threading.get_ident() != self._thread or not _is_dense(tensor):
            return
        if any(running.module in self._swapped for running in self._running):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        running = self._innermost()
        if running is not None and key not in self._parameters:
            # a weak reference keeps the address from being used for another storage
            running.saved[key] = StorageWeakRef(storage), storage.nbytes()

    def _innermost(self) -> RunningModule | None:
        # a module without weights exists for the call alone
        with_weights = (r for r in reversed(self._running) if has_matrix(r.module))
        return next(with_weights, None)

    def _note_function(self, kind: str) -> None:
        if kind not in (NAME, SCAN, CONVOLUTION) or threading.get_ident() != self._thread:
            return
        running = self._innermost()
        if running is not None:
            self.kinds.setdefault(running.module, set()).add(kind)


class _CopyObserver(RunObserver):
    """Observes a run of a copy of the model."""

    def __init__(self, swapped: Collection[nn.Module]) -> None:
        super().__init__(swapped)
        # modules with own operations that save much
        self.heavy: set[nn.Module] = set()
        # modules whose operations do not, or that do not give the same in a second run
        self._light: set[nn.Module] = set()

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a model on a batch."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with undisturbed(device), self.watching(model):
            model(*args, **kwargs)

    def _asks(self, module: nn.Module) -> bool:
        return module not in self._light and self.may_run_again(module)

    def _decide(self, running: RunningModule, args: Any, kwargs: Any, output: Any) -> None:
        module, _, before = running
        if before is None:
            return
        if self._is_heavy(running, before, args, kwargs, output):
            self.heavy.add(module)
        else:
            self.heavy.discard(module)
            self._light.add(module)

    def _is_heavy(
        self, running: RunningModule, before: Before, args: Any, kwargs: Any, output: Any
    ) -> bool:
        """Whether a call saved much, and a second run of it gives the same."""
        if not self.saves_much(running, args, kwargs, output):
            return False
        module = running.module
        with self.unobserved():
            try:
                with before.restored(), torch.no_grad():
                    again = type(module).forward(module, *args, **kwargs)
            except Exception:  # arbitrary code of others
                return False
        return repeat_alike(again, output)


class RunningModule(NamedTuple):
    """A module that runs."""

    module: nn.Module
    # the tensors that its own operations save, by storage: a weak reference, and bytes
    saved: dict[int, tuple[StorageWeakRef, int]]
    # the state before it ran, where it is to be decided of it
    before: Before | None


class Before:
    """The state before a call of a module."""

    def __init__(self, module: nn.Module, args: Sequence[Any]):
        self._modules = modules_in(module, args)
        self._state = CallState(self._modules, args)
        self._random = rng.RandomStates(rng.everywhere())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring the state back meanwhile, after the call; a run inside changes none of it."""
        self._state.end()
        with self._random.restored(), self._state.restored():
            for module in self._modules:
                # they are put back with the others; kernels may write them uncounted
                buffers = {n: _copied(module, b) for n, b in module._buffers.items()}
                module._buffers.update(buffers)
            yield


def _copied(module: nn.Module, buffer: Tensor | None) -> Tensor | None:
    """Return a copy of a buffer of statistics, or of a small one; another one as it is."""
    is_statistic = type(module).__module__.startswith("torch.")
    if buffer is None or not (is_statistic or buffer.nbytes <= COPIED_NBYTES):
        return buffer
    return buffer.detach().clone()


def is_own(module: nn.Module) -> bool:
    """Whether a module with a weight is of no class of torch's or ours."""
    return not type(module).__module__.startswith(("torch.", "fusedckpt.")) and has_matrix(module)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module, or one inside, has a weight of two dimensions or more."""
    return any(p.dim() > 1 for p in module.parameters())


def _is_dense(tensor: Tensor) -> bool:
    return is_plain(type(tensor)) and tensor.layout == torch.strided and not tensor.is_nested


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def repeat_alike(again: Any, before: Any) -> bool:
    """Whether the results of two runs of a module are the same tensors, up to rounding."""
    pairs = zip(_tensors_in(again), _tensors_in(before), strict=False)
    return len(_tensors_in(again)) == len(_tensors_in(before)) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in pairs
    )
