"""Random graphs, and random backwards through them: what eager gives, and nothing left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import DEVICE
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint as stock_checkpoint

import fusedckpt
from fusedckpt import NormSpec, functional, reference
from fusedckpt.autograd import private

D, F, ROWS = 3, 4, 2
# of leaves: two inputs, then weights
COUNTS = (2, 3, 2, 2, 4, 2)
stock = partial(stock_checkpoint, use_reentrant=False)


WRAPS: dict[str, Callable[..., Any]] = {
    "none": lambda fn, *args: fn(*args),
    "ours": fusedckpt.checkpoint,
    "stock": stock,
    "ours in ours": lambda fn, *a: fusedckpt.checkpoint(partial(fusedckpt.checkpoint, fn), *a),
    "ours in stock": lambda fn, *a: stock(partial(fusedckpt.checkpoint, fn), *a),
    "stock in ours": lambda fn, *a: fusedckpt.checkpoint(partial(stock, fn), *a),
}
REENTRANT = partial(stock_checkpoint, use_reentrant=True)


class Graph:
    """A graph drawn from a seed, of fused functions or of their eager references.

    leaves: what may be differentiated by; made: results, in the order in which they were made.
    """

    def __init__(self, seed: int, is_fused: bool, reentrant: bool = False):
        self.draw, self.is_fused = random.Random(seed), is_fused
        self.reentrant = reentrant
        torch.manual_seed(seed)
        shapes = [(ROWS, D), (F, D), (D, F), (D, D), (D,), (F,)]
        shapes = [shape for shape, count in zip(shapes, COUNTS, strict=True) for _ in range(count)]
        tensors = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes]
        self.leaves = [t.requires_grad_(self.draw.random() < 0.8) for t in tensors]
        for t in self.leaves[:2]:
            t.requires_grad_()
        self.made: list[Tensor] = [self.leaves[1], self.leaves[0] * 1]
        self.seen: list[tuple[int, Tensor]] = []
        self.is_batched = False
        for _ in range(self.draw.randint(2, 6)):
            self.step()

    def weight(self, *shape: int, absent: float = 0.0) -> Any:
        found = self.draw.choice([t for t in self.leaves[2:] if t.shape == shape])
        if self.draw.random() < absent:
            return None
        return found

    def step(self) -> None:
        """Add a function of what was made before, maybe checkpointed, maybe hooked."""
        inputs = [self.draw.choice(self.made) for _ in "xy"]
        fn = getattr(self, self.draw.choice(OPS))(functional if self.is_fused else reference)
        wrap = WRAPS[self.draw.choice([*["none"] * 3, *WRAPS])]
        if self.reentrant and self.draw.random() < 0.5:
            wrap = REENTRANT
        outputs = wrap(fn, *inputs)
        if isinstance(outputs, Tensor):
            self.made.append(outputs)
            self.look(outputs)
        else:
            # one function of ours may be several in eager: let each result have a node of its own
            self.made += [y * 1 for y in outputs]

    def look(self, y: Tensor) -> None:
        """Hook a result, or retain its gradient, now and then."""
        hook = self.draw.random()
        if not y.requires_grad:
            return
        if hook < 0.15:
            y.register_hook(partial(self.saw, len(self.made)))
        elif hook < 0.25:
            y.retain_grad()

    def saw(self, index: int, grad: Tensor | None) -> Tensor | None:
        if grad is not None and not self.is_batched:
            self.seen.append((index, grad.detach()))
        return None if grad is None else grad * 1.5

    def spec(self) -> NormSpec:
        if self.draw.random() < 0.5:
            return NormSpec("layer", self.weight(D, absent=0.2), self.weight(D, absent=0.5))
        return NormSpec("rms", self.weight(D, absent=0.2), None, 1e-6)

    def levels(self, first: Tensor, *levels: str) -> dict[str, str]:
        """Draw a level: "inputs" where the first weight is frozen, since create_graph needs it."""
        save = self.draw.choice(levels) if first.requires_grad else "inputs"
        return {"save": save} if self.is_fused else {}

    def linear(self, module: Any) -> Any:
        name = self.draw.choice(["gelu", "silu", "identity"])
        given = (self.weight(D, D), self.weight(D, absent=0.4), name)
        save = self.levels(given[0], "inputs", "preact")
        return lambda x, _: module.linear_act(x, *given, **save)

    def mlp(self, module: Any) -> Any:
        given = self.weight(F, D), self.weight(F, absent=0.4)
        given = *given, self.weight(D, F), self.weight(D, absent=0.4)
        norm = self.spec() if self.draw.random() < 0.4 else None
        save = self.levels(given[0], "inputs", "preact")
        adds = self.draw.random() < 0.5
        return lambda x, _: module.mlp(x, *given, norm=norm, residual=adds, **save)

    def gated(self, module: Any) -> Any:
        given = self.weight(F, D), self.weight(F, D), self.weight(D, F)
        norm = self.spec() if self.draw.random() < 0.4 else None
        save = self.levels(given[0], "inputs", "gate", "preact")
        adds = self.draw.random() < 0.5
        return lambda x, _: module.gated_mlp(x, *given, norm=norm, residual=adds, **save)

    def norm(self, module: Any) -> Any:
        weight = self.weight(D, absent=0.2)
        return lambda x, _: module.rms_norm(x, (D,), weight, 1e-6)

    def add_norm(self, module: Any) -> Any:
        given = self.weight(D, absent=0.2), self.weight(D, absent=0.2)
        return lambda x, residual: module.add_layer_norm(x, residual, (D,), *given)

    def projections(self, module: Any) -> Any:
        spec, weights = self.spec(), [self.weight(D, D), self.weight(D, D)]
        biases = [self.weight(D, absent=0.4) for _ in weights]
        return lambda x, _: module.norm_linear(x, spec, weights, biases)

    def joined(self, module: Any) -> Any:
        """Modules, which share the norm's input."""
        kinds = (fusedckpt.RMSNorm, fusedckpt.MLP) if self.is_fused else (torch.nn.RMSNorm, None)
        weight, given = self.weight(D), (self.weight(F, D), None, self.weight(D, F), None)
        norm = kinds[0](D, 1e-6)
        del norm.weight
        norm.weight = weight
        return lambda x, _: module.mlp(norm(x), *given)

    def mix(self, module: Any) -> Any:
        return lambda x, y: (x * y).sin() + y

    def halves(self, module: Any) -> Any:
        return lambda x, y: torch.cat([x, y], 1).chunk(2, 1)

    def sums(self) -> list[Tensor]:
        """Return one sum of each result that a gradient goes through."""
        return [y.sin().sum() for y in self.made if y.requires_grad]

    def named(self) -> list[Tensor]:
        """Return all that may be differentiated by."""
        return [t for t in [*self.leaves, *self.made] if t.requires_grad]


OPS = ["linear", "mlp", "gated", "norm", "add_norm", "projections", "joined", "mix", "halves"]


def some(draw: random.Random, count: int, most: int = 4) -> list[int]:
    return sorted(draw.sample(range(count), draw.randint(1, min(most, count))))


def grads_of(graph: Graph, draw: random.Random, retain: bool) -> list[Any]:
    """Differentiate by some of all tensors, leaves or not; now and then twice."""
    losses, named = graph.sums(), graph.named()
    loss = sum(losses[i] for i in some(draw, len(losses)))
    wanted = [named[i] for i in some(draw, len(named))]
    create = draw.random() < 0.3
    found = torch.autograd.grad(
        loss, wanted, create_graph=create, retain_graph=retain or create, allow_unused=True
    )
    reached = [grad for grad in found if grad is not None and grad.requires_grad]
    second: tuple[Any, ...] = ()
    wanted = [named[i] for i in some(draw, len(named))]
    if create and reached:
        loss = sum(grad.square().sum() for grad in reached)
        # what does not matter, twins may know in different ways
        second = torch.autograd.grad(loss, wanted, retain_graph=True, materialize_grads=True)
    return [*found, *second]


def backward_of(graph: Graph, draw: random.Random, retain: bool) -> list[Any]:
    """Accumulate into some tensors, or into all leaves."""
    losses, named = graph.sums(), graph.named()
    loss = sum(losses[i] for i in some(draw, len(losses)))
    wanted = [named[i] for i in some(draw, len(named))]
    if graph.reentrant or draw.random() < 0.3:
        loss.backward(retain_graph=retain)
        return [t.grad for t in named if t.is_leaf]
    loss.backward(inputs=wanted, retain_graph=retain)
    return [t.grad for t in wanted]


def batch_of(graph: Graph, draw: random.Random, retain: bool) -> list[Any]:
    """Differentiate one result by some tensors, for several gradients of it at once."""
    results = [y for y in graph.made if y.requires_grad]
    named, y = graph.named(), draw.choice(results)
    wanted = [named[i] for i in some(draw, len(named))]
    dys = torch.linspace(-1, 1, 3 * y.numel(), dtype=y.dtype, device=DEVICE).view(3, *y.shape)
    options = {"retain_graph": retain, "allow_unused": True}
    graph.is_batched = True
    try:
        return list(torch.autograd.grad(y, wanted, dys, is_grads_batched=True, **options))
    finally:
        graph.is_batched = False
        for tensor in named:
            # what was retained was a batch
            tensor.grad = None


def edges_of(graph: Graph, draw: random.Random, retain: bool) -> list[Any]:
    """Start at nodes within the graph, and end at some, as pipelines do."""
    results, named = [y for y in graph.made if y.requires_grad], graph.named()
    starts = [results[i] for i in some(draw, len(results), 2)]
    wanted = [get_gradient_edge(named[i]) for i in some(draw, len(named))]
    edges, dys = [get_gradient_edge(y) for y in starts], [torch.ones_like(y) for y in starts]
    return [*torch.autograd.grad(edges, wanted, dys, retain_graph=retain, allow_unused=True)]


def run(seed: int, is_fused: bool) -> tuple[list[Any], list[Any]]:
    """Run up to three backwards through a graph; return gradients, and what hooks saw."""
    draw = random.Random(seed)
    graph = Graph(seed, is_fused, reentrant=draw.random() < 0.15)
    count = draw.randint(1, 3)
    found: list[Any] = []
    for i in range(count):
        ways = [grads_of, grads_of, backward_of, batch_of, edges_of]
        # reentrant checkpoints are for backward() alone
        way = backward_of if graph.reentrant else draw.choice(ways)
        found += way(graph, random.Random(seed + i), i + 1 < count)
    retained = [y.grad for y in graph.made if y.requires_grad and y.retains_grad]
    return found, [*retained, *(part for pair in graph.seen for part in pair)]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert [x is None for x in ours] == [x is None for x in theirs]
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
        else:
            assert a == b


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.filterwarnings("ignore")
def test_some_gradients(seed, monkeypatch):
    """They are eager's; and they, and what hooks see, are those where all gradients are made."""
    found, seen = run(seed, True)
    assert_same(found, run(seed, False)[0])
    # as of an engine that does not tell what it wants
    monkeypatch.setattr(private, "current_node", lambda: None)
    assert_same([*found, *seen], [x for part in run(seed, True) for x in part])
