"""A window over several processes of `torch.distributed`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .. import _core

if TYPE_CHECKING:
    from ..accumulator import GradientAccumulator
    from ..gradients import Gradients, Id
    from .shards import Shards

Group = dist.ProcessGroup


def take(acc: GradientAccumulator, group: Group) -> Gradients:
    """Close the windows of all processes of a group as one. See `GradientAccumulator.take`."""
    reports = _gather(_report(acc), group)
    _check(reports, acc, group)
    core = acc._core.take_shared([report["share"] for report in reports])
    acc._scales.clear()
    _add_up(core, acc, reports, group)
    if not acc._shards:
        return acc._hand_over(core)
    # What was sharded has been averaged over the processes before: this makes sums of the averages.
    core.scale_(dist.get_world_size(group))
    return acc._hand_over(core, norm=lambda: _norm(core, acc._shards, group))


def _report(acc: GradientAccumulator) -> dict[str, Any]:
    """What a process tells the others before anything is added up. Small: it is sent by itself."""
    layout = [(id, *param) for id, param in zip(acc.ids, acc._core.layout(), strict=True)]
    what = [(id, acc._shards[id].shape if id in acc._shards else shape, dtype) for id, shape, dtype, _, _ in layout]
    report = {"parameters": _digest(what), "places": _digest(layout), "has_torch": acc._core.has_torch()}
    try:
        scales = _digest(list(map(float, acc._scales)))
        return {**report, "scales": scales, "share": acc._core.share(), "error": None}
    except Exception as error:
        # Also what torch raises: the others wait for this report.
        message = str(error) if isinstance(error, _core.GradaccError) else f"{type(error).__name__}: {error}"
        return {**report, "share": None, "error": message, "is_window_error": isinstance(error, _core.WindowError)}


def _check(reports: Sequence[Mapping[str, Any]], acc: GradientAccumulator, group: Group) -> None:
    """Refuse on all processes what is wrong on one."""
    for rank, report in enumerate(reports):
        if report["error"] is not None:
            error = _core.WindowError if report["is_window_error"] else _core.GradaccError
            raise error(f"rank {rank} of the group: {report['error']}")
    first = reports[0]
    for rank, report in enumerate(reports):
        if report["parameters"] != first["parameters"]:
            raise _core.GradaccError(
                f"ranks 0 and {rank} of the group have accumulators of other parameters: expected the same ids, in the "
                "same order, with the same shapes and dtypes of sums"
            )
        if acc._shards and report["scales"] != first["scales"]:
            raise _core.GradaccError(
                f"ranks 0 and {rank} of the group have given their micro-batches other scales, and the gradients of "
                "sharded parameters were averaged over the ranks before that: take the gradients of sum losses, with "
                "weight=tokens and scale=1"
            )
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    for id, shards in acc._shards.items():
        if shards.ranks != ranks:
            raise _core.GradaccError(
                f"parameter {id}: expected a group of the ranks it is sharded over, {shards.ranks}, got {ranks}"
            )


def _add_up(
    core: _core.Gradients, acc: GradientAccumulator, reports: Sequence[Mapping[str, Any]], group: Group
) -> None:
    """Add the sums of all processes up in place: each flat buffer at once, in the same order everywhere."""
    memories, gradients = core.sums()
    flats = [*map(_tensor, memories), *gradients]
    places = [place for place in core.places() if place[0] not in acc._shards]
    alike = not acc._shards
    if alike and any(report["has_torch"] or report["places"] != reports[0]["places"] for report in reports):
        # Devices, and buffers made within a window, may differ.
        where = _digest([(id, buffer, offset, flats[buffer].device.type) for id, buffer, offset, _ in places])
        alike = len(set(_gather(where, group))) == 1
    if alike:
        spans: dict[int, tuple[int, int]] = {}
        for _, buffer, offset, length in places:
            start, end = spans.get(buffer, (offset, offset))
            spans[buffer] = min(start, offset), max(end, offset + length)
        parts = [flats[buffer][start:end] for buffer, (start, end) in sorted(spans.items())]
    else:
        parts = [flats[buffer][offset : offset + length] for _, buffer, offset, length in places]
    for part in parts:
        _all_reduce(part, group)
        if acc._shards:
            part.div_(dist.get_world_size(group))  # and `take` multiplies all with it


def _all_reduce(flat: torch.Tensor, group: Group) -> None:
    """Add a tensor up over all processes, in place; 16-bit ones in float32."""
    if not flat.numel():
        return
    wide = flat if flat.dtype.itemsize > 2 else flat.float()
    staged = wide.to(_device(group, wide.device))
    dist.all_reduce(staged, group=group)
    if staged is not flat:
        flat.copy_(staged)


def _device(group: Group, device: torch.device) -> torch.device:
    """A device whose memory a group exchanges: this one, if it does."""
    known = group._device_types
    return device if torch.device(device.type) in known else known[0]


def _norm(core: _core.Gradients, shards: Mapping[Id, Shards], group: Group) -> float:
    """The norm over all processes: shards that several of them have count once."""
    sharded: dict[int, list[Id]] = {}
    plain = []
    for id in core.ids:
        if id in shards:
            sharded.setdefault(shards[id].replicas, []).append(id)
        else:
            plain.append(id)
    here = math.fsum(core.norm(ids) ** 2 / replicas for replicas, ids in sharded.items())
    everywhere = torch.tensor(here, dtype=torch.float64, device=_device(group, torch.device("cpu")))
    dist.all_reduce(everywhere, group=group)
    return math.sqrt(core.norm(plain) ** 2 + everywhere.item())


def _gather(what: Any, group: Group) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, what, group=group)
    return answers


def _tensor(memory: _core.Memory) -> torch.Tensor:
    array = np.asarray(memory)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _digest(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]
