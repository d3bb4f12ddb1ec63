"""How long windows are: what users give as `every`, checked, and schedules that go by epochs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias

from . import _core

Every: TypeAlias = SupportsIndex | Mapping[Any, Any] | Callable[[int], SupportsIndex]


class EpochSchedule:
    """Lengths of windows that change with the epoch: pass one as `every`, and tell it when an epoch starts.

    Before the first epoch that is given, windows are of one micro-batch. A window that is open when an epoch starts
    keeps its length. Before `start_epoch` is called, it is epoch 0.

    Args:
        lengths: From the number of an epoch, counted from 0, to the number of micro-batches that complete a window from
            this epoch on. Copied.

    Raises:
        ArgumentError: There are none, an epoch is no whole number of at least 0, or a length none of at least 1.

    Example:
        >>> import gradacc
        >>> schedule = gradacc.EpochSchedule({0: 1, 5: 2, 10: 4})
        >>> acc = gradacc.GradientAccumulator({"w": ((2,), "float32")}, every=schedule)
        >>> schedule.start_epoch(5)
        >>> acc.every
        2
    """

    def __init__(self, lengths: Mapping[Any, Any]) -> None:
        self._lengths = _core.Lengths(_pairs(lengths))
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch it is."""
        return self._epoch

    def start_epoch(self, epoch: SupportsIndex) -> None:
        """Say which epoch it is now: windows that open from here on have the length given for it.

        Raises:
            ArgumentError: It is no whole number of at least 0.
        """
        self._epoch = _whole("epoch", epoch, 0)

    def __call__(self, window: int) -> int:
        """Return the length of a window that opens now, whatever its number."""
        return self._lengths.at(self._epoch)


def every_(every: Every | None) -> int | list[tuple[int, int]] | Callable[[int], int] | None:
    """What completes a window, as the engine takes it. A mapping is copied."""
    if every is None:
        return None
    if isinstance(every, Mapping):
        return _pairs(every)
    if callable(every):
        function = every
        return lambda window: _whole("every", function(window), 1)
    return _whole("every", every, 1)


def until_weight_(weight: SupportsFloat | None) -> float | None:
    """The weight that completes a window, as the engine takes it."""
    if isinstance(weight, bool):
        raise _core.ArgumentError(f"until_weight: expected a finite number above 0, got {weight}")
    return None if weight is None else float(weight)


def _pairs(lengths: Mapping[Any, Any]) -> list[tuple[int, int]]:
    return [(_whole("every", start, 0), _whole("every", length, 1)) for start, length in lengths.items()]


def _whole(name: str, number: Any, least: int) -> int:
    try:
        whole = least - 1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        whole = least - 1
    if not least <= whole < 1 << 63:
        raise _core.ArgumentError(f"{name}: expected a whole number of at least {least}, got {number!r}")
    return whole
