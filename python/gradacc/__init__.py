"""Gradients accumulated over micro-batches, exactly and at memory speed.

A `GradientAccumulator` owns flat buffers keyed by parameter id, adds the gradients of each micro-batch into them in
place, and hands over their weighted mean as `Gradients`, without copying. No framework is imported until it is used.
"""

from ._core import (
    ArgumentError,
    DtypeError,
    GradaccError,
    Gradient,
    NonFiniteError,
    ShapeError,
    StateError,
    UnknownParameterError,
    WindowError,
    __version__,
    num_threads,
    set_num_threads,
    simd_level,
)
from .accumulator import GradientAccumulator
from .gradients import Gradients
from .schedule import EpochSchedule

__all__ = [
    "ArgumentError",
    "DtypeError",
    "EpochSchedule",
    "GradaccError",
    "Gradient",
    "GradientAccumulator",
    "Gradients",
    "NonFiniteError",
    "ShapeError",
    "StateError",
    "UnknownParameterError",
    "WindowError",
    "__version__",
    "num_threads",
    "set_num_threads",
    "simd_level",
]
