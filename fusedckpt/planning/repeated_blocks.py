"""The repeated blocks of a model, at any depth: they are the units of its plans.

Backbones nest containers: a list of stages, and in each stage a list of blocks. A plan of stages
recomputes a whole stage at once, so the units are the blocks. A list inside of a block is another
matter if its entries run side by side, as experts and heads do: then the block is the unit. Names
of classes do not tell one from the other. A forward does: a block of a stage gets the output of the
block before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedckpt.autograd.private import num_nodes, number_of
from fusedckpt.planning.roles import assigned
from fusedckpt.reporting.step import Step
from fusedckpt.reporting.trial import tensors_of

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


def is_container(module: nn.Module, least: int = 2) -> bool:
    """Whether a module is a container of `least` modules or more, each computed on its own."""
    is_one_layer = getattr(module, "save_levels", None) is not None
    return isinstance(module, _CONTAINERS) and len(module) >= least and not is_one_layer


class ModelPart(NamedTuple):
    """A module into which a model falls."""

    name: str
    module: nn.Module
    # whether it is in a container
    is_entry: bool


class RepeatedBlocks:
    """Finds the containers with repeated blocks, and the units of a model.

    A block has two weights of two dimensions or more, and no repeated blocks inside: a convolution
    with its norm and activation is a layer. Blocks of one class are repeated if a container has two
    of them; another container may have one alone. closed: names of containers to take for parts of
    a block.
    """

    def __init__(self, model: nn.Module, closed: Collection[str] = ()):
        self._model = model
        self._closed = {model.get_submodule(name) for name in closed}
        # classes of blocks of which a container has two
        self._repeated = set[type]()
        # by module, whether it has repeated blocks inside
        self._known: dict[nn.Module, bool] = {}
        repeated = {kind for module in model.modules() for kind in self._kinds_in(module)}
        # for any other container one of these classes is enough
        self._repeated = repeated - {nn.Sequential}
        self._known.clear()

    def has_repeated(self, module: nn.Module) -> bool:
        """Whether a module is, or has inside, a container of repeated blocks."""
        if module not in self._known:
            inside = [self.has_repeated(child) for child in module.children()]
            self._known[module] = any(inside) or self._repeats(module)
        return self._known[module]

    def _repeats(self, module: nn.Module) -> bool:
        return len(self._kinds_in(module)) > 0

    def _kinds_in(self, module: nn.Module) -> list[type]:
        """Return the classes of the repeated blocks that are entries of a container."""
        if module in self._closed or not is_container(module, least=1):
            return []
        counts = Counter(type(entry) for entry in module.children() if self._is_block(entry))
        return [kind for kind, count in counts.items() if count > 1 or kind in self._repeated]

    def _is_block(self, module: nn.Module) -> bool:
        weights = (p for p in module.parameters() if sum(size > 1 for size in p.shape) > 1)
        return not self.has_repeated(module) and len([*weights]) > 1

    def nested(self) -> dict[str, list[str]]:
        """Return the containers of repeated blocks inside entries of others, with their entries."""
        return dict(self._nested("", self._model, False))

    def _nested(
        self, prefix: str, module: nn.Module, is_entry: bool
    ) -> Iterator[tuple[str, list[str]]]:
        """is_entry: whether the module is in a module that is an entry of a container."""
        for name, child in module.named_children():
            name = f"{prefix}{name}"
            if not self.has_repeated(child):
                continue
            if is_entry and self._repeats(child) and is_container(child):
                yield name, [f"{name}.{key}" for key, _ in child.named_children()]
            is_module = is_container(module, least=1) and not is_container(child, least=1)
            yield from self._nested(f"{name}.", child, is_entry or is_module)

    def parts(self) -> Iterator[ModelPart]:
        """Yield the modules into which the model falls."""
        count = len([*self._model.children()]) if is_container(self._model) else 0
        return self._parts("", self._model, count)

    def _parts(self, prefix: str, module: nn.Module, count: int) -> Iterator[ModelPart]:
        """count: of the modules in the innermost container around, 0 outside of any."""
        for name, child in module.named_children():
            name = f"{prefix}{name}"
            if self._is_opened(child, count):
                size = len([*child.children()]) if self._is_list(child, count) else count
                yield from self._parts(f"{name}.", child, size)
                continue
            # beside the containers of a stage, a module without parameters is code between blocks
            is_code = not any(True for _ in child.parameters())
            if not count or not is_code or is_container(module, least=1):
                yield ModelPart(name, child, count > 0)

    def _is_opened(self, module: nn.Module, count: int) -> bool:
        """Whether the modules in a module are looked at, one of `count` modules of a container."""
        if self.has_repeated(module):
            return True
        if self._is_list(module, count):
            return not _is_layers(module, count)
        return not count and any(map(is_container, module.modules()))

    def _is_list(self, module: nn.Module, count: int) -> bool:
        """Whether the entries of a module are in a container."""
        if is_container(module):
            return True
        if not is_container(module, least=1):
            return False
        # a Sequential of a single module is called, a ModuleList is not
        is_called = isinstance(module, nn.Sequential)
        if count and not is_called:
            return True
        (entry,) = module.children()
        is_stage = self.has_repeated(entry) or self._is_block(entry)
        return is_stage and self.has_repeated(self._model)


def _is_layers(module: nn.Module, count: int) -> bool:
    """Whether it is a Sequential of layers, one of `count` modules, that is no longer than that."""
    if not isinstance(module, nn.Sequential) or len(module) > count:
        return False
    # several with children of their own are a stage of blocks
    return sum(any(child.children()) for child in module) < 2


def side_by_side(step: Step, containers: Mapping[str, list[str]]) -> set[str]:
    """Run a forward; return the containers with entries that do not run one after the other.

    containers: by name the names of their entries. The forward saves nothing for backward.
    """
    calls = {name: _EntryCalls() for name in containers}
    roles = {
        step.model.get_submodule(entry): partial(calls[name].visit, entry)
        for name, entries in containers.items()
        for entry in entries
    }
    step, _ = step.fresh()
    with assigned(roles), torch.autograd.graph.saved_tensors_hooks(_drop, lambda x: x):
        step.model(*step.args, **step.kwargs)
    return {name for name in containers if not calls[name].is_chain()}


def _drop(tensor: Any) -> None:
    """Save nothing in the place of a tensor."""


class _EntryCalls:
    """The calls of the entries of a container in one forward."""

    def __init__(self) -> None:
        self._names = list[str]()
        self._is_chained = True
        # the number of nodes before the last call, and the nodes of its outputs
        self._last: tuple[float, set[Any]] = (0, set())

    def visit(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call an entry: a role."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        since, nodes = self._last
        if self._names:
            self._is_chained &= _reaches(_nodes_of([args, kwargs]), nodes, since)
        since = num_nodes()
        output = forward(*args, **kwargs)
        self._names.append(name)
        self._last = since, _nodes_of(output)
        return output

    def is_chain(self) -> bool:
        """Whether several entries ran, each once, on the output of the one before."""
        count = len(self._names)
        return self._is_chained and 1 < count == len(set(self._names))


def _nodes_of(tree: Any) -> set[Any]:
    """Return the nodes of autograd's graph that made the tensors in a tree."""
    return {x.grad_fn for x in tensors_of([tree]) if x.grad_fn is not None}


def _reaches(starts: Iterable[Any], ends: Collection[Any], since: float) -> bool:
    """Whether a path leads from nodes to others, over nodes that were made since a count."""
    todo = [*starts]
    seen = set[Any]()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node not in seen and number_of(node) >= since:
            seen.add(node)
            todo += [child for child, _ in node.next_functions if child is not None]
    return False
