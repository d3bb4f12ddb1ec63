"""The engine. Its inside: use `gradacc`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, TypeAlias, final

import numpy as np
import numpy.typing as npt

from .gradients import Id
from .params import Table

__all__ = [
    "Accumulator",
    "ArgumentError",
    "DtypeError",
    "GradaccError",
    "Gradient",
    "Gradients",
    "Last",
    "Lengths",
    "Memory",
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

__version__: str

# Count, weight, how many were rejected, whether there are sums, and for each parameter how it was seen.
_Share: TypeAlias = tuple[int, float, int, bool, bytes]

def simd_level() -> str:
    """The SIMD level in use: "scalar", "neon", "avx2" or "avx512". The environment variable GRADACC_SIMD forces one.

    Raises:
        ArgumentError: GRADACC_SIMD names a level that does not exist, or that this machine lacks.
    """

def num_threads() -> int:
    """How many threads are used, the calling one included.

    The cores this process may use, unless the environment variable GRADACC_NUM_THREADS or `set_num_threads` says
    otherwise. No result depends on it.

    Raises:
        ArgumentError: GRADACC_NUM_THREADS is no whole number of at least 1.
    """

def set_num_threads(threads: int) -> None:
    """Set how many threads are used in this process from now on, the calling one included.

    Raises:
        ArgumentError: The number is 0.
    """

class GradaccError(Exception):
    """What gradacc refuses. A refused call has changed nothing, unless it says otherwise."""

class ArgumentError(GradaccError, ValueError):
    """An argument is out of its range."""

class ShapeError(GradaccError, ValueError):
    """A gradient has not its parameter's shape."""

class DtypeError(GradaccError, TypeError):
    """A gradient is no tensor, or of a dtype that its buffer does not take."""

class UnknownParameterError(GradaccError, KeyError):
    """No parameter of this id has been registered."""

class WindowError(GradaccError, RuntimeError):
    """The call does not fit the state of the window."""

class NonFiniteError(GradaccError, ArithmeticError):
    """A gradient holds NaN or infinity, and on_nonfinite is "raise"."""

class StateError(GradaccError, ValueError):
    """A state can't be loaded into this accumulator."""

@final
class Last:
    """What is known of the last micro-batch."""

    @property
    def finite(self) -> bool: ...
    @property
    def norm(self) -> float | None: ...

@final
class Lengths:
    """Lengths that hold from a position on; 1 before the first."""

    def __new__(cls, lengths: Sequence[tuple[int, int]]) -> Lengths: ...
    def at(self, position: int) -> int: ...

@final
class Accumulator:
    """Behind `gradacc.GradientAccumulator`."""

    def __new__(
        cls,
        params: Sequence[tuple[Id, Sequence[int], str, str]],
        *,
        every: int | Sequence[tuple[int, int]] | Callable[[int], int] | None,
        until_weight: float | None,
        reduction: str,
        dtype: str | None,
        on_nonfinite: str,
        on_missing: str,
        micro_norms: bool,
        backend: str,
        device: str | None,
    ) -> Accumulator: ...
    def register(self, id: Id, shape: Sequence[int], dtype: str, device: str) -> None: ...
    def add(
        self,
        grads: Table | Sequence[Any],
        weight: SupportsFloat,
        scale: SupportsFloat | None,
        *,
        fresh: bool = False,
        late: tuple[Any, Any] | None = None,
    ) -> bool: ...
    def set_schedule(
        self, *, every: int | Sequence[tuple[int, int]] | Callable[[int], int] | None, until_weight: float | None
    ) -> None: ...
    def check_parts(self) -> None: ...
    def begin_micro_batch(
        self, weight: SupportsFloat, scale: SupportsFloat | None, *, late: tuple[Any, Any] | None = None
    ) -> int: ...
    def add_part(self, grads: Table | Sequence[Any]) -> None: ...
    def end_micro_batch(self, number: int, *, late: tuple[Any, Any] | None = None) -> bool: ...
    def abandon_micro_batch(self, number: int) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, dict: Mapping[str, Any]) -> None: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...
    def load(self, path: str | os.PathLike[str]) -> None: ...
    def take(self) -> Gradients: ...
    def share(self) -> _Share: ...
    def take_shared(self, shares: Sequence[_Share]) -> Gradients: ...
    def reset(self) -> None: ...
    def layout(self) -> list[tuple[list[int], str, int, int]]: ...
    def has_torch(self) -> bool: ...
    @property
    def ids(self) -> list[Id]: ...
    @property
    def count(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def rejected(self) -> int: ...
    @property
    def complete(self) -> bool: ...
    @property
    def window(self) -> int: ...
    @property
    def every(self) -> int | None: ...
    @property
    def until_weight(self) -> float | None: ...
    @property
    def last(self) -> Last | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped_buffers(self) -> int: ...

@final
class Gradients:
    """Behind `gradacc.Gradients`."""

    @property
    def ids(self) -> list[Id]: ...
    @property
    def known(self) -> list[Id]: ...
    @property
    def count(self) -> int: ...
    @property
    def weight(self) -> float: ...
    @property
    def rejected(self) -> int: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __getitem__(self, key: Id, /) -> Any: ...
    def norm(self, ids: Sequence[Id] | None = None) -> float: ...
    def places(self) -> list[tuple[Id, int, int, int]]: ...
    def clip_(self, max_norm: float, norm: float) -> None: ...
    def scale_(self, factor: float) -> None: ...
    def flat(self) -> tuple[list[Memory], list[Any]]: ...
    def sums(self) -> tuple[list[Memory], list[Any]]: ...

@final
class Gradient:
    """The gradient of one parameter. Reads nothing until it is asked for its elements.

    Every consumer gets the same memory, writable: `numpy.asarray`, and `from_dlpack` of NumPy, PyTorch and JAX. That
    memory stays with whoever got it; it is not changed by a later window, nor by a later `scale_` or `clip_`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> str:
        """The name of its dtype, such as "float32"."""

    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]: ...

@final
class Memory:
    """Memory that was handed over, for `numpy.asarray`."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def array(self) -> np.ndarray[Any, Any]: ...
