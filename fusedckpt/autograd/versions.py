"""Whether tensors were written since some time, as autograd tells of what it saves."""

from __future__ import annotations

from torch import Tensor


def versions_of(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return how often each tensor was written; 0 for none and for one that does not count."""
    return tuple([0 if t is None or t.is_inference() else t._version for t in tensors])


class Versioned:
    """Tensors and their versions; to read one that was written since raises, as in autograd."""

    def __init__(self, *tensors: Tensor | None):
        self._tensors = tensors
        self._versions = versions_of(*tensors)

    def read(self) -> tuple[Tensor | None, ...]:
        """Return the tensors."""
        for tensor, old, new in zip(
            self._tensors, self._versions, versions_of(*self._tensors), strict=True
        ):
            if tensor is not None and old != new:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: {tensor.dtype} {list(tensor.shape)} is at version {new}; "
                    f"expected version {old} instead"
                )
        return self._tensors
