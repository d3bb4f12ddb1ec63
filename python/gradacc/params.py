"""Parameters as a caller gives them: ids, and what their gradients will look like."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import _core
from .gradients import Id

if TYPE_CHECKING:
    from .torch.module import Module

# A dict from str is no mapping from str or int to a type checker.
Table: TypeAlias = Mapping[str, Any] | Mapping[int, Any] | Mapping[Id, Any]


def items_of(params: Table | Iterable[tuple[Id, Any]] | Module) -> Iterable[tuple[Id, Any]]:
    """Ids and parameters."""
    if isinstance(params, Mapping):
        return params.items()
    if hasattr(params, "named_parameters"):
        return [(name, parameter) for name, parameter in params.named_parameters() if parameter.requires_grad]
    return params


def id_of(id: Id) -> Id:
    """The id as a plain str or int: a subclass may compare, hash and print as it likes."""
    if isinstance(id, str):
        return str.__str__(id)
    if isinstance(id, int) and not isinstance(id, bool):
        return int.__int__(id)
    raise _core.ArgumentError(f"id: expected a str or an int, got {id!r}")


def spec_of(id: Id, like: Any) -> tuple[list[int], str, str]:
    """Shape and dtype of a parameter, and where its gradients are expected."""
    try:
        if hasattr(like, "to_local"):  # a DTensor: this process sums the gradients of its own shard
            like = like.to_local()
        shape, dtype = like if isinstance(like, tuple) else (like.shape, like.dtype)
        sizes = [operator.index(size) for size in shape]
    except (AttributeError, TypeError, ValueError) as error:
        raise _core.DtypeError(f"parameter {id}: expected an array or a pair (shape, dtype), got {like!r}") from error
    if any(size < 0 for size in sizes):
        raise _core.ArgumentError(f"parameter {id}: expected sizes of at least 0, got {tuple(sizes)}")
    return sizes, dtype_name(dtype), _device(like)


def _device(like: Any) -> str:
    """Where a torch tensor lies; everything else is taken for the host's, until a gradient comes from elsewhere."""
    device = getattr(like, "device", None)
    name = str(device) if type(device).__module__ == "torch" else "cpu"
    return "cpu" if name == "meta" else name


def dtype_name(dtype: Any) -> str:
    """The name that NumPy and PyTorch give a dtype, whichever of them it is from."""
    name = str(dtype)
    if name.startswith("torch."):
        return name.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:  # NumPy does not know bfloat16
        return name
