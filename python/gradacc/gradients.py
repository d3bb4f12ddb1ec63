"""`Gradients`: what a window hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import numpy as np

from . import _core

if TYPE_CHECKING:
    import jax
    import torch

    from .torch.module import Module

Id: TypeAlias = str | int


class Gradients(Mapping[Id, Any]):
    """The gradients of one window: a mapping from id to `Gradient`, of the ids the window saw, in layout order.

    Owns its buffers, and shares them with everything it hands out. The division by the weight, `scale_` and `clip_`
    are one number until the first gradient is handed out, and then applied in one pass over all of them.
    """

    __slots__ = ("_core", "_norm")

    def __init__(self, core: _core.Gradients, *, norm: Callable[[], float] | None = None) -> None:
        self._core = core
        self._norm = core.norm if norm is None else norm

    def __getitem__(self, id: Id) -> Any:
        return self._core[id]

    def __iter__(self) -> Iterator[Id]:
        return iter(self._core.ids)

    def __len__(self) -> int:
        return len(self._core)

    def __contains__(self, id: object) -> bool:
        return id in self._core

    @property
    def count(self) -> int:
        """How many micro-batches the window held."""
        return self._core.count

    @property
    def weight(self) -> float:
        """Their weight. 0 says that all of them were masked, and the gradients are zeros."""
        return self._core.weight

    @property
    def rejected(self) -> int:
        """How many more were skipped for being non-finite."""
        return self._core.rejected

    def norm(self) -> float:
        """Return the Euclidean norm of all gradients as they will be handed over, found in float64.

        Where `take` has closed the window over a group, and each process has a shard, it is that of all shards: call it
        on all processes then, and `clip_` too.
        """
        return self._norm()

    def clip_(self, max_norm: SupportsFloat) -> float:
        """Scale all gradients so that their norm is at most `max_norm`, and return the norm before.

        As `torch.nn.utils.clip_grad_norm_`: by `max_norm / (norm + 1e-6)` where that is below 1, and not at all
        elsewhere. What was handed out before keeps its values; what is handed out afterwards is a copy then.

        Raises:
            ArgumentError: `max_norm` is negative or NaN.
        """
        norm = self.norm()
        self._core.clip_(float(max_norm), norm)
        return norm

    def scale_(self, factor: SupportsFloat) -> None:
        """Multiply all gradients with a number.

        What was handed out before keeps its values; what is handed out afterwards is a copy then.

        Raises:
            ArgumentError: The number is NaN or infinite.
        """
        self._core.scale_(float(factor))

    def numpy(self) -> dict[Any, np.ndarray[Any, Any]]:
        """Return NumPy arrays that alias the memory, writable. bfloat16 needs the package `ml_dtypes`."""
        return {id: np.asarray(gradient) for id, gradient in self.items()}

    def torch(self) -> dict[Any, torch.Tensor]:
        """Return torch tensors that alias the memory."""
        from .torch.module import to_torch

        return to_torch(self)

    def jax(self) -> dict[Any, jax.Array]:
        """Return JAX arrays that alias the memory: don't write to it by other ways, JAX takes it for constant."""
        from .jax.export import to_jax

        return to_jax(self)

    def flat(self) -> list[Any]:
        """Return the flat buffers as 1-D arrays that alias the memory, one for each dtype of sums and each device.

        NumPy arrays, and torch tensors where they are not in host memory. More, if parameters were registered within a
        window. Each parameter lies in row-major order on a 64-byte boundary, in layout order; ids that the window did
        not see, and the padding between parameters, are zeros.
        """
        arrays, elsewhere = self._core.flat()
        tensors = [gradient.tensor for gradient in elsewhere]
        of_torch = [np.asarray(g) if t.is_cpu else t for g, t in zip(elsewhere, tensors, strict=True)]
        return [memory.array() for memory in arrays] + of_torch

    def assign_to(self, module: Module) -> None:
        """Put each gradient into `.grad` of the module's parameter of that name, in the parameter's dtype and device.

        Aliases the memory where dtype and device match; rounds to nearest even where the dtype is narrower. Parameters
        whose id the accumulator knows and the window did not see get None; others are left alone. Call
        `optimizer.zero_grad()` after the step, or the next backward adds into what was assigned.
        """
        from .torch.module import assign_to

        assign_to(self, module)

    def __repr__(self) -> str:
        return f"Gradients({len(self)} parameters, {self.count} micro-batches, weight {self.weight})"
