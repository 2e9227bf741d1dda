"""One call of a module, made again and again: what it holds, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fusedckpt.autograd.private import function_of, pytree
from fusedckpt.memory import nbytes_of, saved_tensors, storage_ref
from fusedckpt.planning import roles
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.timeline import Watch, live_by_phase
from fusedckpt.reporting.trial import aliased, tensors_of

__all__ = [
    "Bytes",
    "Call",
    "NoGraph",
    "Run",
    "Times",
    "Unclear",
    "calls_of",
    "flows",
    "graph_of",
    "kind_of",
    "leaf_bytes",
    "made_of",
    "once",
    "seconds",
    "step_kind",
]

Run = Callable[[Any, Any], Any]
T = TypeVar("T")

# rounds of timing go on for so many seconds for each way to run, and so many at most
_SECONDS, _ROUNDS = 0.005, 6
# seconds after which nothing is timed again
_LONG = 1.0


class Bytes(NamedTuple):
    """What a call holds: made for backward; at worst in forward and in backward beyond that.

    given: of each argument that requires grad the bytes that are kept, all or none. returned: of
    each tensor that it made and returned those that are among what is made.
    """

    made: int
    forward: int
    backward: int
    given: tuple[int, ...]
    returned: tuple[int, ...]


class Times(NamedTuple):
    """The ms of a forward, and of that and its backward."""

    forward: float
    both: float


class NoGraph(Exception):
    """The call returns nothing that requires a gradient."""


class Unclear(Exception):
    """The call returns several tensors that require grad, of which some may not be used."""


class _Source(torch.autograd.Function):
    """Ends a graph: its backward makes the outputs' gradients, which nobody else holds then."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in outputs]
        # no bytes, which would count as the unit's
        return outputs[0].new_empty(0, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # zeros would be too easy on some kernels
        return tuple(torch.ones(s, dtype=d, device=on) for s, d, on in ctx.likes)


def made_of(returned: Iterable[Any], given: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that a call made, of what it returned: all, where it handed on each."""
    known, found = {*map(id, given)}, {id(x): x for x in returned if flows(x)}
    return [x for key, x in found.items() if key not in known] or [*found.values()]


def flows(x: Any) -> bool:
    """Whether it is a tensor that may require grad."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def graph_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph that made tensors."""
    seen: set[Any] = {None}
    todo: list[Any] = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def leaf_bytes(outputs: Iterable[Tensor], known: list[Tensor]) -> int:
    """Return the bytes of leaves that a forward made, and of their gradients.

    The graph of the outputs keeps them. known: leaves that live anyway.
    """
    ids = {*map(id, known)}
    leaves = [node.variable for node in graph_of(outputs) if hasattr(node, "variable")]
    made = [x for x in leaves if id(x) not in ids and not isinstance(x, nn.Parameter)]
    return nbytes_of([*made, *known]) - nbytes_of(known) + sum(map(_size, made))


def _is_fused(node: Any) -> bool:
    """Whether a node is a layer's function, of a module or called as it is."""
    function = function_of(node)
    return function is not None and function.__module__ == "fusedckpt.blocks.block"


class Call:
    """A module and the arguments that it gets.

    used: whether the loss depends on each of several tensors that the call makes and returns. None:
    it does; (): that is not known.
    """

    def __init__(
        self, module: nn.Module, args: Any, kwargs: Any, used: tuple[bool, ...] | None = None
    ):
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        parameters = [*self._trained.values()]
        # to others it adds
        self._made = [p for p in parameters if p.grad is None]
        # the names of those that got a gradient
        self.reached: set[str] = set()
        self._given = aliased(([*args], {**kwargs}))
        tensors = list(tensors_of(self._given))
        # of arguments that require grad all that a view keeps alive, and of what is returned
        self.given = tuple(nbytes_of([x]) for x in tensors if x.requires_grad)
        # tokens, as linears see them
        self.rows = max((x[..., 0].numel() for x in tensors if x.dim() and x.shape[-1]), default=0)
        self.output = 0
        # of leaves that it makes, and of their gradients
        self.leaves = 0
        # what the arguments are copies of
        self._sources: list[Tensor] = []
        # of tensors that it made and returned, which require grad
        self.differentiable: tuple[bool, ...] = ()
        # whether it was seen to write into an argument
        self.writes = False
        # whether functions of ours were seen in it, which a level tells what to keep
        self.is_fused = False
        self._used = used
        self.device = next((x.device for x in (*tensors, *parameters)), torch.device("cpu"))
        self._watch = Watch(module)

    def bytes(self, run: Run) -> Bytes:
        """Return what `run(args, kwargs)` and its backward hold."""
        args, kwargs = self._arguments()
        given = list(tensors_of((args, kwargs)))
        versions = [x._version for x in given]
        kept = returned = tuple[int, ...]()

        def step() -> None:
            nonlocal kept, returned
            self._watch.phase("forward")
            with saved_tensors() as saved:
                outputs, root = self._outputs(run, args, kwargs)
            wanted = [x for x in given if x.requires_grad]
            kept = tuple(n if x in saved else 0 for n, x in zip(self.given, wanted, strict=True))
            self.is_fused = self.is_fused or any(map(_is_fused, graph_of([root])))
            self.leaves = leaf_bytes([root], self._sources)
            # what several share counts with the first
            totals = [nbytes_of(outputs[:i]) for i in range(len(outputs) + 1)]
            made, own = ([storage_ref(x) for x in y] for y in (outputs, given))
            del outputs
            # torch's selective checkpoints hide what they keep
            keeps = [saved.holds(x) or not (x in own or x.expired()) for x in made]
            returned = tuple(
                b - a if k else 0 for (a, b), k in zip(pairwise(totals), keeps, strict=True)
            )
            torch.clear_autocast_cache()
            self._watch.phase("backward")
            root.backward(root.detach())
            self._watch.phase("end")

        before = self._gradients()
        live = live_by_phase(step, self.device)
        self.reached |= {name for name, found in self._gradients().items() if found != before[name]}
        self._clear()
        # into a tensor, or a container
        self.writes |= [x._version for x in given] != versions
        self.writes |= [*map(id, tensors_of((args, kwargs)))] != [*map(id, given)]
        # what lives between the two
        made = live["backward"][0]
        forward, backward = max(live["forward"]) - made, max(live["backward"]) - made
        return Bytes(made, forward, backward, kept, returned)

    def once(self, run: Run) -> None:
        """Run it with a graph, which is thrown away."""
        self._outputs(run, *self._arguments())

    def times(self, runs: Mapping[str, Run]) -> dict[str, Times]:
        """Return the least that each way to run takes."""
        start, spent, rounds = time.perf_counter(), 0.0, list[list[Times]]()
        # twice, as a first time is slower than others
        while len(rounds) < 2 or (spent < _SECONDS * len(runs) and len(rounds) < _ROUNDS):
            # in turns, so that what slows the machine down slows all of them
            rounds.append([self._timed(run) for run in runs.values()])
            if (spent := time.perf_counter() - start) > _LONG:
                break
        least = [Times(*map(min, zip(*times, strict=True))) for times in zip(*rounds, strict=True)]
        return dict(zip(runs, least, strict=True))

    def _timed(self, run: Run) -> Times:
        args, kwargs = self._arguments()
        start = seconds(self.device)
        root = self._outputs(run, args, kwargs)[1]
        middle = seconds(self.device)
        root.backward(root.detach())
        end = seconds(self.device)
        self._clear()
        return Times(1e3 * (middle - start), 1e3 * (end - start))

    def _arguments(self) -> tuple[Any, Any]:
        # as in a step, whose autocast casts weights anew
        torch.clear_autocast_cache()
        given = aliased(self._given)
        self._sources = [*tensors_of(given)]
        # as if another unit had computed them, at no cost in backward
        computed = {id(x): x.clone() for x in tensors_of(given) if x.requires_grad}
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: computed.get(id(x), x), given)
        return tuple(args), kwargs

    def _outputs(self, run: Run, args: Any, kwargs: Any) -> tuple[list[Tensor], Any]:
        """Run it; return the tensors that it made and returned, and where backward begins."""
        # not what it writes into them
        given = [*tensors_of((args, kwargs))]
        made = made_of(tensors_of([run(args, kwargs)]), given)
        self.differentiable = tuple(x.requires_grad for x in made)
        if not any(self.differentiable):
            raise NoGraph
        if self._used == () and sum(self.differentiable) > 1:
            raise Unclear
        reached = [x for x in made if x.requires_grad]
        if self._used is not None and len(self._used) == len(made):
            used = zip(made, self._used, strict=True)
            reached = [x for x, is_used in used if is_used and x.requires_grad] or reached
        self.output = sum(map(_size, reached))
        return made, _Source.apply(*reached)

    def _gradients(self) -> dict[str, int | None]:
        """Return by name what a backward changes that adds to the gradient, or makes it."""
        return {x: p.grad if p.grad is None else p.grad._version for x, p in self._trained.items()}

    def _clear(self) -> None:
        for parameter in self._made:
            parameter.grad = None


def calls_of(modules: Mapping[str, nn.Module], run: Callable[[], None]) -> dict[str, list[Any]]:
    """Return by name the forward, args and kwargs of each call of modules while `run` runs."""
    calls: dict[str, list[Any]] = {name: [] for name in modules}

    def noted(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls[name].append((forward, *aliased((args, kwargs))))
        return forward(*args, **kwargs)

    with roles.assigned({module: partial(noted, name) for name, module in modules.items()}):
        run()
    return calls


def seconds(device: torch.device) -> float:
    """Return the time at which the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # of one thread what it ran itself, whatever else the machine does
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time() if alone else time.perf_counter()


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


# what was timed, by all that it depends on
_known: dict[Any, Any] = {}


def once(key: Any, measure: Callable[[], T]) -> T:
    """Return what was measured first for this key."""
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = measure()
    return _known[key]


def kind_of(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what units that cost the same have in common."""
    shapes = [
        (name, tuple(p.shape), p.dtype, p.requires_grad, p.grad is None)
        for name, p in module.named_parameters()
    ]
    modes = [(type(child), *_flags(child)) for child in module.modules()]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return repr(module), tuple(shapes), tuple(modes), tuple(map(_like, leaves)), str(spec)


def _flags(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what may choose another way through a module. Numbers are not: many are its place."""
    kinds = bool, str, type(None)
    return [(name, value) for name, value in vars(module).items() if isinstance(value, kinds)]


def step_kind(step: Step) -> Any:
    """Return what steps that take the same time have in common."""
    kind = kind_of(step.model, step.args, step.kwargs)
    return kind, step.parameters()[0].device, torch.get_num_threads()


def _like(x: Any) -> Any:
    if isinstance(x, Tensor):
        strides = x.stride() if x.layout == torch.strided else x.layout
        return tuple(x.shape), strides, x.dtype, x.requires_grad, nbytes_of([x])
    # a flag may choose another way through the module
    return repr(x) if isinstance(x, (bool, int, float, str, type(None))) else type(x)
