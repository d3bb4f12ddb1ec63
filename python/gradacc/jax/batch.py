"""A batch of samples, and its micro-batches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import _core


def number_of(micro_batches: Any) -> int:
    """How many micro-batches there are to be, checked."""
    try:
        number = 0 if isinstance(micro_batches, bool) else operator.index(micro_batches)
    except TypeError:
        number = 0
    if number < 1:
        raise _core.ArgumentError(f"micro_batches: expected an int of at least 1, got {micro_batches!r}")
    return number


class Batch:
    """Trees of arrays whose first dimension is the samples.

    Micro-batch i of k has the samples i, i + k, i + 2k and so on: so the samples of one device stay there, where arrays
    are spread over devices by sample, and sizes differ by 1 at most.
    """

    def __init__(self, trees: Sequence[Any], micro_batches: int) -> None:
        leaves, treedef = jax.tree.flatten(tuple(trees))
        self._treedef: Any = treedef
        self._leaves = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
        sizes = sorted({leaf.shape[0] if leaf.ndim else -1 for leaf in self._leaves})
        if len(sizes) != 1 or sizes[0] < 1:
            got = sorted({tuple(leaf.shape) for leaf in self._leaves}) if leaves else "no array at all"
            raise _core.ArgumentError(
                "expected a batch of arrays whose first dimension is the samples, as many in each and at least one, "
                f"got {f'shapes {got}' if leaves else got}"
            )
        self.samples: int = sizes[0]
        self._number = min(micro_batches, self.samples)
        size, ragged = divmod(self.samples, self._number)
        groups = [(0, ragged, size + 1), (ragged, self._number - ragged, size)]
        self.groups: list[tuple[int, int, int]] = [group for group in groups if group[1]]
        """Micro-batches of the same size: the first of them, how many they are, and their size."""

    def at(self, index: Any, size: int) -> Sequence[Any]:
        """The trees of a micro-batch, whose index may be traced."""
        even = self.samples % self._number == 0
        pick = self._column if even else self._rows
        trees: Sequence[Any] = self._treedef.unflatten([pick(leaf, index, size) for leaf in self._leaves])
        return trees

    def _column(self, leaf: Any, index: Any, size: int) -> Any:
        """Without a copy of the batch, or an exchange between devices."""
        table = leaf.reshape(size, self._number, *leaf.shape[1:])
        return lax.dynamic_index_in_dim(table, index, 1, keepdims=False)

    def _rows(self, leaf: Any, index: Any, size: int) -> Any:
        return leaf[index + self._number * jnp.arange(size)]
