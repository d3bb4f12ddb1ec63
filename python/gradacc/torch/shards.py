"""DTensors: of which each process has a shard, as `fully_shard` makes of parameters and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import _core


@dataclass(frozen=True)
class Shards:
    """How a parameter is spread over processes."""

    shape: tuple[int, ...]
    """Of the whole."""
    ranks: tuple[int, ...]
    """The processes that have a shard, ascending."""
    replicas: int
    """How many processes have the same shard."""


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor. Imports nothing for it."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def shards_of(tensor: Any) -> Shards:
    """How a DTensor is spread."""
    mesh = tensor.device_mesh
    replicas = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            replicas *= mesh.size(dim)
    return Shards(tuple(tensor.shape), tuple(sorted(mesh.mesh.flatten().tolist())), replicas)


def local(tensor: Any) -> torch.Tensor:
    """What this process has of a DTensor. Aliases it."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise _core.GradaccError(
            f"expected a DTensor that is sharded or replicated, got one placed {tensor.placements}"
        )
    shard: torch.Tensor = tensor.to_local()
    return shard


def like(parameter: Any, shard: torch.Tensor) -> torch.Tensor:
    """A tensor as the parameter is: a DTensor of this process's shard, if that is one. Aliases it."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
