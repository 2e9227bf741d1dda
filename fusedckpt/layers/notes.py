"""The notes of `fuse` and plans on a module of a user's model: its one attribute `_fusedckpt`.

A record is never changed: `set_notes` and `clear_notes` put a changed copy in its place. So copies
of a module, its pickles and the replicas of DataParallel have notes of their own, as they have
attributes of their own. A call reads a field as `module._fusedckpt.reader`.

One note is an attribute by itself, `_fusedckpt_fallback` (fallbacks.py): compiled code writes it,
and would be compiled again for each record that it has to read and copy.
"""

from __future__ import annotations

from typing import Any

# the attribute of modules
NOTES = "_fusedckpt"


class ModuleNotes:
    """The notes of one module. A field that was never noted has the value of the class."""

    # by `fuse`: the module's class and swapped parts before, and the fields that `unfuse` forgets
    original: Any = None
    # the function that a swapped module computes
    match: Any = None
    # reads the state and operands of a match in each call
    reader: Any = None
    # the places of an MLP behind other layers of a Sequential
    tail: Any = None
    # the save level of attention, of a mixer, or of a linear that is read by its readers
    save: str = "inputs"
    # how its input is saved: "int8", or None as it is
    store: str | None = None
    # of an RMSNorm in code that writes in place: copies its input
    input_copies: Any = None
    # the kinds of functions by which attention or a mixer mixes tokens
    mixes: frozenset[str] = frozenset()
    # whether recipes of attention's inputs may take the place of a checkpoint; None before a call
    # in one has shown it
    follows_nodes: bool | None = None
    # the patterns of nodes by which they are found; not in copies and pickles of the module
    patterns: Any = ()
    # a call of attention that gained little, which later ones like it need not recompute
    little_gain: Any = None
    # the parameter that a recomputed module writes, "" for none; None before its first call
    writes: str | None = ""
    # the readers that may compute a linear's result again: "layers", "code", or "" for none
    readers: str = ""
    # whether the code of a layer calls functions of its linears' results
    shares_code: bool = False
    # whether an nn.Sequential calls another layer of channels right before this one
    is_behind: bool = False
    # whether code of its model may call convolutions or max pools
    reads_in_code: bool = False
    # by the functions before an input of a layer of channels, whether their recipe once made all
    # of its values; replicas of DataParallel add to it, too
    compared: Any = None
    # why the last call of a model saved no recipes, None if it did
    recipes_obstacle: Any = None
    # the place in its model of a module that waits for its first training call
    waits: Any = None
    # the function of a head's logits, or the words of a reason that there is none
    mapping: Any = None
    # whether a model computes no logits in evaluation either
    always: bool = False
    # the call of the model that runs now, of its output embedding
    loss_call: Any = None
    # by MLPParallel: how the weights are laid out over ranks, None for whole ones
    sharding: Any = None
    # by a plan: the function that runs in place of forward
    role: Any = None
    # the forward that was set on the module before the role
    own_forward: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for copies and pickles."""
        return {field: value for field, value in vars(self).items() if field != "patterns"}


# of modules without the attribute
NO_NOTES = ModuleNotes()


def notes_of(module: Any) -> ModuleNotes:
    """Return the notes of a module, those of no module if it has none."""
    return module.__dict__.get(NOTES, NO_NOTES)


def has_note(module: Any, field: str) -> bool:
    """Whether a field was noted, be it with the value of the class."""
    return field in vars(notes_of(module))


def set_notes(module: Any, **fields: Any) -> None:
    """Note the values of fields."""
    _put(module, {**vars(notes_of(module)), **fields})


def clear_notes(module: Any, *fields: str) -> None:
    """Forget the values of fields; a module without any loses the attribute."""
    if NOTES in module.__dict__:
        known = vars(notes_of(module))
        _put(module, {field: value for field, value in known.items() if field not in fields})


def _put(module: Any, fields: dict[str, Any]) -> None:
    if not fields:
        del module.__dict__[NOTES]
        return
    notes = ModuleNotes()
    vars(notes).update(fields)
    module.__dict__[NOTES] = notes
