"""Which saved tensors a recompute brings back, and how far it runs for them."""

from __future__ import annotations

from typing import NamedTuple

from torch.utils.weak import TensorWeakRef

from fusedckpt.checkpointing.calls import Packed, Trace, stale


class WantedPlaces(NamedTuple):
    """The tensors that a recompute is for, by their places among the saved tensors."""

    # whether the recompute brings the tensor back; one that stays saved is compared all the same
    wanted: dict[int, bool]
    # the last place, at which the recompute ends
    last: int
    # the last place where leaves are compared with the forward's
    last_compared: int
    # parameters and other leaves that were saved
    leaves: list[tuple[Packed, TensorWeakRef]]


def places_of(segment: Trace) -> WantedPlaces:
    """Return the places of the saved tensors that backward can still ask for.

    - A tensor is brought back if nothing else keeps it. Where the recompute runs to its end, as
      with debug=True, every tensor is, but for those that a region saved.
    - The recompute ends with the last tensor that backward can ask for, brought back or not: nodes
      whose saved tensors are freed ask for nothing.
    - Leaves are compared as far as the last tensor that is brought back: weights behind it are not
      read for it. Where no leaf is known as far as that, those behind it tell, too.

    Raises:
        RuntimeError: a parameter was written in place since the forward.
    """
    wanted = dict[int, bool]()
    leaves = list[tuple[Packed, TensorWeakRef]]()
    last = last_compared = -1
    for saved in segment.saved:
        packed = saved.packed()
        if packed is None:
            continue
        source = packed.source
        last = packed.index
        is_dropped = source is None
        if isinstance(source, TensorWeakRef):
            leaf = source()
            # a leaf that is loaded for each forward anew is gone
            is_dropped = leaf is None
            if leaf is not None and leaf._version != packed.version:
                raise RuntimeError(stale("a parameter saved for backward", leaf))
            leaves.append((packed, source))
        wanted[last] = is_dropped or not (segment.stops or last in segment.staying)
        last_compared = last if wanted[last] else last_compared
    for saved in segment.saved[: last_compared + 1]:
        if saved.leaves:
            return WantedPlaces(wanted, last, last_compared, leaves)
    return WantedPlaces(wanted, last, last, leaves)
