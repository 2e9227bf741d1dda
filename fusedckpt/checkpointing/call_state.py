"""The state that a module's forward reads and changes: noted at a call, brought back later.

It notes the attributes of the module and of those inside, of their classes, of plain objects in
them and among the arguments, and the contents of plain containers in all of these: by reference,
without a copy of a tensor. So a recompute finds a counter, a popped argument, a scheduler or an
option of a config as the forward did, and leaves all of them as they are. So it does with global
containers and tensors, and with global variables that the code of the forward assigns.

Tensors are not copied but for those that the forward itself writes in place, see
`written_tensors`. A parameter or buffer that other code wrote since is an error, by its name. Other
state, such as that of global objects, is not noted: samples of the saved tensors tell where it has
changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.jit import ScriptModule

from fusedckpt.autograd import private
from fusedckpt.autograd.backward import versions_of
from fusedckpt.checkpointing.written_tensors import Buffer, WrittenTensors
from fusedckpt.state.holders import ATOMS, contents_of, has, put_back
from fusedckpt.state.noted import NotedState
from fusedckpt.state.variables import NO_VARIABLES, variables_of, variables_of_functions

# of attributes that `fuse` adds, which no forward writes
_OURS = "_fusedckpt"
# dicts of a module, of which a forward may replace some entries
_MEMBERS = "_parameters", "_buffers", "_modules"
# of attributes that a forward may call
_HELD = FunctionType, MethodType, partial
# classes of the parts of most tuples among arguments
_FLAT = ATOMS | {Tensor}

# a container or the attributes of an object, and its contents at some time
_Contents = tuple[Any, Any]
_Versions = list[tuple[Tensor, int]]


class _NotedModule(NamedTuple):
    """A module at a call."""

    module: nn.Module
    kind: type[nn.Module]
    # its attributes
    contents: dict[str, Any]
    # the contents of its dicts of parameters, buffers and modules
    members: list[dict[str, Any]]

    def contents_with(self, tensors: Mapping[int, Tensor], kept: list[_Contents]) -> dict[str, Any]:
        """Return the attributes with other tensors, by the ids of those that they replace.

        Where a dict of members is another one now, the module gets a copy of it: the checkpoint
        puts buffers back to those that it finds in the module's dict. To `kept` goes each that is
        the same.
        """
        contents = _replaced(self.contents, tensors) if tensors else self.contents
        for name, noted in zip(_MEMBERS, self.members, strict=True):
            holder = self.contents[name]
            if not (holder or noted):
                kept.append((holder, noted))
                continue
            members = _replaced(noted, tensors) if tensors else noted
            if has(holder, members):
                kept.append((holder, members))
            else:
                contents = {**contents, name: dict(members)}
        return contents


class CallState:
    """The state of modules, the first around the others, and of the arguments of its call."""

    def __init__(self, modules: Sequence[nn.Module], args: Sequence[Any]):
        self._module = modules[0]
        self.modules: list[_NotedModule] = []
        # of objects, containers, classes and variables
        self.noted = NotedState()
        # tensors in objects among the arguments; the checkpoint knows the others
        self._in_arguments: _Versions = []
        seen = set[int]()
        inside = []
        for x in args:
            if is_flat(x):
                # most of those with objects inside, such as positions
                tensors = [part for part in x if type(part) is Tensor]
                self._in_arguments += zip(tensors, versions_of(*tensors), strict=True)
            elif not (type(x) in ATOMS or isinstance(x, Tensor)):
                inside.append(x)
        if inside:
            tensors = self.noted.note(inside, seen)
            self._in_arguments += zip(tensors, versions_of(*tensors), strict=True)
        parameters, buffers, objects = self._note_modules(modules)
        self._parameters = parameters
        # whether they require gradients
        self._flags = [p.requires_grad for p in parameters]
        # most have none
        others = self.noted.note(objects, seen)
        versions = [*zip(others, versions_of(*others), strict=True)] if others else []
        self._written = WrittenTensors(parameters, buffers, versions)

    def _note_modules(
        self, modules: Sequence[nn.Module]
    ) -> tuple[list[Tensor], list[Buffer], list[Any]]:
        """Note the modules; return their tensors, and objects in their attributes and classes."""
        parameters = list[Tensor]()
        buffers = list[Buffer]()
        objects = list[Any]()
        classes = dict[type, None]()
        functions = list[Any]()
        for module in modules:
            kind = type(module)
            if isinstance(module, ScriptModule):
                # its members are in no dict, and code of Python replaces none
                parameters += module.parameters(False)
                for buffer in module.buffers(False):
                    buffers.append(Buffer(kind, buffer, versions_of(buffer)[0]))
                continue
            classes[kind] = None
            contents = vars(module).copy()
            members = []
            for name in _MEMBERS:
                holder = contents[name]
                # most are
                members.append(holder.copy() if type(holder) is dict else contents_of(holder))
            self.modules.append(_NotedModule(module, kind, contents, members))
            for parameter in members[0].values():
                if parameter is not None:
                    parameters.append(parameter)
            for buffer in members[1].values():
                if buffer is not None:
                    buffers.append(Buffer(kind, buffer, versions_of(buffer)[0]))
            for name in _own_names(tuple(contents)):
                value = contents[name]
                objects.append(value)
                if value.__class__ in _HELD:
                    functions.append(value)
        found = [variables_of(kind) for kind in classes]
        if functions:
            # that the forward may call
            found.append(variables_of_functions(functions))
        for variables in found:
            if variables is NO_VARIABLES:
                continue
            objects += variables.objects()
            for holder in variables.assigned:
                self.noted.note_contents(holder)
        return parameters, buffers, objects

    def end(self) -> bool:
        """Learn, after the call, which tensors it wrote; return whether any has no copy."""
        self._written.learn()
        return self._written.uncopied != []

    def written_parameter(self) -> str:
        """Return the name of a parameter that the call wrote, "" for none."""
        parameters = {*map(id, self._parameters)}
        written = (x for x in self._written.uncopied if id(x) in parameters)
        return next(map(self._name_of, written), "")

    def check(self) -> None:
        """Raise where other code wrote a parameter or buffer since, or the call a parameter.

        Raises:
            RuntimeError: with its name.
        """
        if self._written.uncopied and (written := self.written_parameter()):
            raise RuntimeError(
                f"{type(self._module).__name__}: its forward wrote its parameter {written} for the "
                "first time, and the recompute would write it again. Later calls run the forward "
                "of its class; write the parameter outside of the forward"
            )
        name = None
        if (tensor := self._written.written_by_others()) is not None:
            name = self._name_of(tensor)
        else:
            for tensor, version in self._in_arguments:
                if versions_of(tensor) != (version,):
                    name = "a tensor in its arguments"
        if name is not None:
            raise RuntimeError(
                f"{type(self._module).__name__}: {name} has been modified by an inplace operation "
                "between forward and backward, where the module's forward runs again: write it "
                "after backward"
            )

    def _name_of(self, tensor: Tensor) -> str:
        """Return the name of a parameter or buffer, as it was in the call."""
        prefixes = {m: f"{name}." if name else "" for name, m in self._module.named_modules()}
        for noted in self.modules:
            for members in noted.members[:2]:
                for name, member in members.items():
                    if member is tensor:
                        return f"{prefixes.get(noted.module, '')}{name}"
        return "a tensor"

    def restored(self) -> RestoredState:
        """Bring the state back meanwhile; no write inside changes a tensor of the state."""
        return RestoredState(self)

    def bring_back(self, present: list[_Contents]) -> None:
        """Give all holders the contents of the call, and add to `present` those that they had."""
        tensors = self._written.replacements()
        for noted in self.modules:
            _bring_back(vars(noted.module), noted.contents_with(tensors, present), present)
        for holder, contents in self.noted.contents:
            _bring_back(holder, _replaced(contents, tensors) if tensors else contents, present)

    def flags_to_change(self) -> list[Tensor]:
        """Return the parameters that required gradients in the call, and do not now, or reverse."""
        parameters = []
        for parameter, flag in zip(self._parameters, self._flags, strict=True):
            if parameter.requires_grad != flag and parameter.is_leaf:
                parameters.append(parameter)
        return parameters


class RestoredState:
    """A context in which the state of a call is back; a class, as a recompute ends by raising."""

    def __init__(self, state: CallState):
        self._state = state

    def __enter__(self) -> None:
        state = self._state
        # the present state
        self._present = list[_Contents]()
        self._classes = [(noted.module, type(noted.module)) for noted in state.modules]
        self._flags = state.flags_to_change()
        self._states = [(calls, calls.read()) for calls, _ in state.noted.generators]
        try:
            state.bring_back(self._present)
            _set_classes([(noted.module, noted.kind) for noted in state.modules])
            _toggle(self._flags)
            for calls, image in state.noted.generators:
                calls.write(image)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        for calls, image in self._states:
            calls.write(image)
        _toggle(self._flags)
        for holder, contents in self._present:
            # most modules have no buffers, and none inside
            if (holder or contents) and not has(holder, contents):
                put_back(holder, contents)
        _set_classes(self._classes)


def modules_in(module: nn.Module, args: Sequence[Any] = ()) -> list[nn.Module]:
    """Return a module and those inside, then those among the arguments of its call, each once.

    nn.Module.modules takes some calls of each.
    """
    modules = [module]
    seen = {id(module)}
    for value in args:
        if isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            modules.append(value)
    for part in modules:
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return modules


@lru_cache(1 << 12)
def _own_names(names: tuple[str, ...]) -> Sequence[str]:
    """Return those of a module's attributes that are its own: not every module's, and not ours."""
    return [
        name
        for name in names
        if name not in private.MODULE_ATTRIBUTES and not name.startswith(_OURS)
    ]


def is_flat(value: Any) -> bool:
    """Whether an argument is a tuple of plain tensors and data, which no code changes."""
    return type(value) is tuple and _FLAT.issuperset(map(type, value))


def _bring_back(holder: Any, contents: Any, present: list[_Contents]) -> None:
    """Give a holder contents, and add to `present` those that it had."""
    if has(holder, contents):
        present.append((holder, contents))
    else:
        present.append((holder, contents_of(holder)))
        put_back(holder, contents)


def _replaced(contents: Any, replacements: Mapping[int, Tensor]) -> Any:
    """Return contents with other tensors."""
    if isinstance(contents, dict):
        return {key: replacements.get(id(x), x) for key, x in contents.items()}
    return [replacements.get(id(x), x) for x in contents]


def _set_classes(classes: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    for module, kind in classes:
        if type(module) is not kind:
            module.__class__ = kind


def _toggle(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)
