"""Sums on any device of torch's: flat buffers, and torch's own in-place operations on its current stream.

The engine decides what is added when, and calls this for gradients that are not in host memory, or for all of them if
the accumulator was made with `backend="torch"`. Parameters go by their numbers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from .. import _core

ALIGNMENT_BYTES = 64
# Devices that copy to page-locked memory by themselves.
PINNED = ("cuda", "xpu")


@dataclass(frozen=True)
class Spec:
    """A parameter: its shape, the dtype of its flat buffer, and whether its numbers are complex, that is, pairs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_complex: bool

    @property
    def len(self) -> int:
        """Number of elements of the flat buffer."""
        return math.prod(self.shape) * (2 if self.is_complex else 1)


@dataclass
class Segment:
    """A flat buffer, and where parameters start in it."""

    buffer: torch.Tensor
    offsets: dict[int, int] = field(default_factory=dict)

    def view(self, number: int, spec: Spec) -> torch.Tensor:
        """The sums of a parameter, in its shape; complex numbers as pairs, in one more dimension."""
        flat = self.buffer.narrow(0, self.offsets[number], spec.len)
        return flat.view(*spec.shape, 2) if spec.is_complex else flat.view(spec.shape)


class Store:
    """The sums of a window. Every buffer lies on one device, and has one dtype."""

    def __init__(self) -> None:
        self._specs: dict[int, Spec] = {}
        self._homes: dict[int, torch.device] = {}
        self._lent: dict[int, StorageWeakRef] = {}
        self._last: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.reset()

    def register(self, number: int, shape: Sequence[int], dtype: str, is_complex: bool, device: str | None) -> None:
        """Know a parameter, and, if its gradients are expected on a device, make room for it there with others."""
        self._specs[number] = Spec(tuple(shape), getattr(torch, dtype), is_complex)
        if device is not None:
            self._homes[number] = torch.device(device)

    def reset(self) -> None:
        """Forget the sums."""
        self._segments: list[Segment] = []
        self._views: dict[int, torch.Tensor] = {}
        self._found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._finding: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._scales: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def prepare(
        self,
        numbers: Sequence[int],
        tensors: Sequence[torch.Tensor],
        norm: bool,
        finite: bool,
        late_scale: torch.Tensor | None,
    ) -> None:
        """Do what may fail before these gradients are added: make buffers, if there are none, look at the elements.

        Whether all were finite, and with `norm` their norm, is asked for later. Waits for no device, if the scale is
        on that of the gradients.
        """
        self._finding = (_largest(tensors) if finite else [], _norms(tensors) if norm else [])
        if late_scale is not None:
            self._scales = {device: late_scale.to(device) for device in {tensor.device for tensor in tensors}}
        new = [(number, tensor.device) for number, tensor in zip(numbers, tensors, strict=True)]
        self._make_room([(number, device) for number, device in new if number not in self._views])

    def _make_room(self, new: Sequence[tuple[int, torch.device]]) -> None:
        self._homes.update(new)
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        made = {(segment.buffer.device, segment.buffer.dtype) for segment in self._segments}
        for number, device in new:
            groups.setdefault((device, self._specs[number].dtype), []).append(number)
        for (device, dtype), numbers in groups.items():
            if (device, dtype) not in made:
                # The first of this device and dtype in the window: room for all that is expected there.
                numbers = [
                    n for n, home in sorted(self._homes.items()) if (home, self._specs[n].dtype) == (device, dtype)
                ]
            self._segments.append(self._segment(numbers, device, dtype))
            for number in numbers:
                self._views[number] = self._segments[-1].view(number, self._specs[number])

    def _segment(self, numbers: Iterable[int], device: torch.device, dtype: torch.dtype) -> Segment:
        per_slot, end, offsets = ALIGNMENT_BYTES // dtype.itemsize, 0, {}
        for number in numbers:
            offsets[number] = end
            end += -(-self._specs[number].len // per_slot) * per_slot
        return Segment(torch.empty(end, dtype=dtype, device=device), offsets)

    @torch.no_grad()
    def add(
        self,
        numbers: Sequence[int],
        tensors: Sequence[torch.Tensor],
        firsts: Sequence[bool],
        scale: float | None,
    ) -> None:
        """Add the scale times each gradient to its sum; the first of a window is written. Waits for no device.

        Without a scale, it is the late one that they were prepared with.
        """
        for found, more in zip(self._found, self._finding, strict=True):
            found.extend(more)
        written: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        added: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for number, tensor, first in zip(numbers, tensors, firsts, strict=True):
            sums = self._views[number]
            if tensor.is_complex():
                # As pairs: multiplied as complex numbers, a NaN in one part would be in the other too.
                tensor = torch.view_as_real(tensor if tensor.layout == torch.strided else tensor.to_dense())
            if tensor.layout != torch.strided:
                tensor = tensor.to(sums.dtype)
                if first:
                    sums.zero_()
                    first = False
            pair = written if first else added
            pair[0].append(sums)
            pair[1].append(tensor)
        if written[0]:
            torch._foreach_copy_(*written)
            if scale is None:
                for sums in written[0]:
                    late = self._scales[sums.device]
                    _mask_(sums.mul_(late), late)
            elif scale != 1:
                torch._foreach_mul_(written[0], scale)
        if not added[0]:
            return
        if scale is None:
            for sums, tensor in zip(*added, strict=True):
                late = self._scales[sums.device]
                sums.add_(_mask_(tensor.to(sums.dtype) * late, late))
        elif any(tensor.layout != torch.strided for tensor in added[1]):
            for sums, tensor in zip(*added, strict=True):
                sums.add_(tensor, alpha=scale)
        else:
            torch._foreach_add_(*added, alpha=scale)

    def take(self, seen: Sequence[tuple[int, bool]], divisor: float) -> Sums:
        """Hand the sums over: of parameters that were written, and zeros for those that were not."""
        masked = [number for number, written in seen if not written]
        self._make_room([(n, self._homes.get(n, torch.device("cpu"))) for n in masked if n not in self._views])
        for number in masked:
            self._views[number].zero_()
        numbers = [number for number, _ in seen]
        taken = Sums(self._segments, {number: self._views[number] for number in numbers}, self._specs, divisor)
        self._lent = {key: storage for key, storage in self._lent.items() if not _is_gone(storage)}
        for segment in self._segments:
            storage = StorageWeakRef(segment.buffer.untyped_storage())
            self._lent[storage.cdata] = storage
        self.reset()
        return taken

    def has_handed_over(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a buffer that an earlier window has handed over."""
        storage = self._lent.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return storage is not None and not _is_gone(storage)

    def sums(self, number: int) -> bytes:
        """The bytes of a parameter's sums, in row-major order."""
        view = self._views[number]
        return bytes(view.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()) if view.numel() else b""

    def load(self, sums: Sequence[tuple[int, bytes]]) -> list[str]:
        """Forget the sums, and have these instead. Returns the devices they lie on."""
        before = self._segments, self._views
        self._segments, self._views = [], {}
        try:
            self._make_room([(number, self._homes.get(number, torch.device("cpu"))) for number, _ in sums])
        except BaseException:
            self._segments, self._views = before
            raise
        for number, raw in sums:
            view = self._views[number]
            if raw:
                view.copy_(torch.frombuffer(bytearray(raw), dtype=view.dtype).view(view.shape))
        self._found, self._last = ([], []), ([], [])
        return [str(self._views[number].device) for number, _ in sums]

    def keep_report(self) -> None:
        """Make what was found out since the last call that of the last micro-batch."""
        self._last, self._found = self._found, ([], [])

    def late_report(self) -> tuple[bool, float]:
        """Whether the last micro-batch was finite, and its sum of squares. Waits for the device."""
        largest, norms = self._last
        return all(map(math.isfinite, _numbers(largest))), math.fsum(norm * norm for norm in _numbers(norms))


class Sums:
    """The sums of a window that was closed, and the factor that is still to be applied to them."""

    def __init__(
        self, segments: Sequence[Segment], views: dict[int, torch.Tensor], specs: dict[int, Spec], divisor: float
    ) -> None:
        self._segments, self._views, self._specs = segments, views, specs
        self._divisor, self._multiplier = divisor, 1.0
        self._handed_out = False
        self._settling = threading.Lock()

    @torch.no_grad()
    def norm(self, numbers: Sequence[int]) -> float:
        """The Euclidean norm of what will be handed over of some parameters. Waits for the devices."""
        norms = _numbers(_norms([self._views[number] for number in numbers]))
        norm = math.sqrt(math.fsum(norm * norm for norm in norms))
        return norm * abs(self._multiplier) / self._divisor

    def multiply(self, factor: float) -> None:
        """Multiply all with a number: in new memory, if anything was handed out."""
        self._multiplier *= factor

    def _settle(self) -> None:
        with self._settling, torch.no_grad():
            self._apply()

    def _apply(self) -> None:
        if self._divisor == self._multiplier == 1:
            self._handed_out = True
            return
        if self._handed_out:
            self._segments = [Segment(segment.buffer.clone(), segment.offsets) for segment in self._segments]
            where = {number: segment for segment in self._segments for number in segment.offsets}
            self._views = {number: where[number].view(number, self._specs[number]) for number in self._views}
        views = list(self._views.values())
        if views and self._multiplier == 1:
            torch._foreach_div_(views, self._divisor)
        elif views:
            torch._foreach_mul_(views, self._multiplier / self._divisor)
        self._divisor = self._multiplier = 1.0
        self._handed_out = True

    def at(self, number: int) -> Gradient:
        """The gradient of a parameter."""
        self._settle()
        view = self._views[number]
        return Gradient(torch.view_as_complex(view) if self._specs[number].is_complex else view)

    def flat(self) -> list[Gradient]:
        """The flat buffers, with zeros where no gradient lies."""
        self._settle()
        for segment in self._segments:
            end = 0
            for number, start in segment.offsets.items():
                segment.buffer[end:start].zero_()
                end = start + (self._specs[number].len if number in self._views else 0)
            segment.buffer[end:].zero_()
        return [Gradient(segment.buffer) for segment in self._segments]

    def sums(self) -> list[torch.Tensor]:
        """The flat buffers as they are, with nothing applied.

        Raises:
            ArgumentError: Something was handed out already.
        """
        if self._handed_out:
            raise _core.ArgumentError("sums: the gradients have been handed out, and are no sums any more")
        return [segment.buffer for segment in self._segments]

    def places(self) -> dict[int, tuple[int, int, int]]:
        """Of each gradient: which flat buffer it lies in, where, and how many elements it has there."""
        where = {number: index for index, segment in enumerate(self._segments) for number in segment.offsets}
        return {
            number: (where[number], self._segments[where[number]].offsets[number], self._specs[number].len)
            for number in self._views
        }


class Gradient:
    """The gradient of one parameter on a device of torch's, with the same attributes as `gradacc.Gradient`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The gradient, as a tensor of its own that aliases the memory."""
        return self._tensor.detach()

    @property
    def shape(self) -> tuple[int, ...]:
        """A tuple of ints."""
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> str:
        """The name of the dtype, such as "float32"."""
        return str(self._tensor.dtype).removeprefix("torch.")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        if self._tensor.dtype == torch.bfloat16:
            import ml_dtypes

            array = self._tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = self._tensor.numpy()
        return np.array(array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        where = "" if self._tensor.is_cpu else f", device={self._tensor.device}"
        return f"Gradient(shape={self.shape}, dtype={self.dtype}{where})"


@torch.no_grad()
def examine(tensors: Sequence[torch.Tensor], norm: bool) -> tuple[int | None, float]:
    """The first of some gradients that holds NaN or infinity, and their sum of squares. Waits for the device."""
    places = [place for place, tensor in enumerate(tensors) if tensor.numel()]
    wrong = (place for place, n in zip(places, _numbers(_largest(tensors)), strict=True) if not math.isfinite(n))
    sum_of_squares = math.fsum(n * n for n in _numbers(_norms(tensors))) if norm else 0.0
    return next(wrong, None), sum_of_squares


def total(weights: Sequence[torch.Tensor]) -> float:
    """The sum of 0-d tensors, as float64. Waits for their devices."""
    return math.fsum(_numbers(weights))


def late(weight: Any, scale: Any, torch_keeps_all: bool) -> tuple[float, float, tuple[Any, Any]] | None:
    """A weight and a scale of which one is a tensor that can't be read without waiting for its device.

    Returns:
        What is known of weight and scale now, and those of them that are tensors; None if both are known.

    Raises:
        ArgumentError: A tensor has more than one element.
    """

    def tensor(name: str, given: Any) -> torch.Tensor | None:
        if not isinstance(given, torch.Tensor) or (given.is_cpu and not torch_keeps_all):
            return None
        if given.numel() != 1:
            raise _core.ArgumentError(f"{name}: expected one number, got a tensor of shape {tuple(given.shape)}")
        # What it is now: it is asked for later.
        return given.detach().reshape(()).clone()

    late_weight, late_scale = tensor("weight", weight), tensor("scale", weight if scale is None else scale)
    if late_weight is None and late_scale is None:
        return None
    known_weight = 0.0 if late_weight is not None else float(weight)
    return known_weight, 1.0 if late_scale is not None else float(scale), (late_weight, late_scale)


def from_bytes(raw: bytes, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A tensor of bytes in row-major order."""
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).view(shape)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    values = [tensor if tensor.layout == torch.strided else tensor.coalesce().values() for tensor in tensors]
    return [tensor for tensor in values if tensor.numel()]


def _largest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude of each tensor that has elements: NaN or infinite if any element is."""
    values = _values(tensors)
    return list(torch._foreach_norm(values, math.inf)) if values else []


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Euclidean norm of each tensor that has elements, in float64 where the device has it."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for values in _values(tensors):
        groups.setdefault(_wide(values), []).append(values)
    return [norm for dtype, group in groups.items() for norm in torch._foreach_norm(group, 2, dtype=dtype)]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    if tensor.device.type == "mps":
        return torch.complex64 if tensor.is_complex() else torch.float32
    return torch.complex128 if tensor.is_complex() else torch.float64


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of some 0-d tensors, fetched at once from each device."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for scalar in scalars:
        groups.setdefault(scalar.device, []).append(scalar)
    fetched = {d: iter(torch.stack([s.to(_wide(s)) for s in g]).tolist()) for d, g in groups.items()}
    return [float(next(fetched[scalar.device])) for scalar in scalars]


def _mask_(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Zeros at scale 0, whatever the values: a masked gradient is not looked at."""
    return values.masked_fill_(scale == 0, 0)


def from_foreign(tensor: Any) -> torch.Tensor:
    """A torch tensor that aliases another library's, on whatever device."""
    return from_dlpack(tensor)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked host memory. Waits for the copy, and for nothing else that the device has to do."""
    if tensor.layout != torch.strided or tensor.device.type not in PINNED:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    done = torch.Event(tensor.device)
    done.record()
    done.synchronize()
    return copy
