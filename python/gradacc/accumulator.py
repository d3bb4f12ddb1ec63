"""`GradientAccumulator`: what a training loop calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, cast

from . import _core
from .gradients import Gradients, Id
from .params import Table, dtype_name, id_of, items_of, spec_of
from .schedule import Every, every_, until_weight_

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .torch.backward import Attachment
    from .torch.module import Module
    from .torch.shards import Shards


class GradientAccumulator:
    """Adds the gradients of micro-batches up, and hands over their weighted mean.

    With micro-batches of gradients g, weight w and scale s (by default s = w), a window gives the sum of s·g over the
    sum of w: the gradient of the whole batch, if each loss is a mean over w samples or tokens. Sums are kept in flat
    buffers of their own; 16-bit and 32-bit gradients are summed in float32, float64 in float64. A refused call changes
    nothing. Safe to share between threads: each call is atomic.

    Args:
        params: What gradients are to come: a mapping from id (a `str` or an `int`) to an array or to a pair
            `(shape, dtype)`, an iterable of such pairs of id and parameter, or a `torch.nn.Module`, of which those
            parameters are taken that require grad. Arrays are only looked at; their values are never read.
        every: How many micro-batches complete a window: a number, a mapping `{window: number}` that holds from a window
            on (before the first of them, 1), or a function from the number of a window, counted from 0, such as an
            `EpochSchedule`. It is fixed when the first micro-batch of a window comes. None: the caller decides.
        until_weight: The weight that completes a window, instead of a number of micro-batches: a budget of tokens,
            which the last micro-batch may exceed.
        reduction: "mean" divides by the weight of the window, "sum" does not.
        dtype: What sums are kept in, if not the default above: "float32" or "float64" take every dtype, "float16" and
            "bfloat16" their own only.
        on_nonfinite: "propagate" adds NaN and infinity like other numbers, "raise" refuses the micro-batch, "skip"
            drops and counts it, and the window waits for one more. The last two read each gradient once more.
        on_missing: "ignore" lets a micro-batch lack gradients; "error" refuses one that does.
        micro_norms: Whether `last.norm` is found, in the pass that adds.
        backend: Who keeps the sums. "auto": this engine those of gradients in host memory, and torch, on their device,
            those of others. "engine": this engine, and other gradients are refused. "torch": torch, all of them. None:
            what the environment variable GRADACC_BACKEND says, and "auto" where it is not set.
        device: "cpu" keeps all sums in host memory: gradients on other devices are copied there first, through
            page-locked memory where there is such a way.

    Raises:
        ArgumentError: An option is out of its range, or an environment variable of gradacc is; or a parameter is
            sharded over processes, and `on_nonfinite` is "skip".
        DtypeError: A parameter's dtype can't be summed.
        GradaccError: An id is given twice.

    Example:
        >>> import gradacc, numpy as np
        >>> acc = gradacc.GradientAccumulator({"w": ((2,), "float32")}, every=2)
        >>> acc.add({"w": np.array([5, 1], "float32")}, weight=2)  # mean gradients over 2 tokens,
        False
        >>> acc.add({"w": np.array([0.25, 1], "float32")}, weight=8)  # and over 8
        True
        >>> acc.take().numpy()["w"]
        array([1.2, 1. ], dtype=float32)
    """

    def __init__(
        self,
        params: Table | Iterable[tuple[Id, Any]] | Module,
        *,
        every: Every | None = None,
        until_weight: SupportsFloat | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        dtype: Any = None,
        on_nonfinite: Literal["propagate", "raise", "skip"] = "propagate",
        on_missing: Literal["ignore", "error"] = "ignore",
        micro_norms: bool = False,
        backend: Literal["auto", "engine", "torch"] | None = None,
        device: Literal["cpu"] | None = None,
    ) -> None:
        backend = cast("Literal['auto']", os.environ.get("GRADACC_BACKEND", "auto")) if backend is None else backend
        self._torch_keeps_all = backend == "torch"
        items = [(id_of(id), like) for id, like in items_of(params)]
        self._core = _core.Accumulator(
            [(id, *spec_of(id, like)) for id, like in items],
            every=every_(every),
            until_weight=until_weight_(until_weight),
            reduction=reduction,
            dtype=None if dtype is None else dtype_name(dtype),
            on_nonfinite=on_nonfinite,
            on_missing=on_missing,
            micro_norms=micro_norms,
            backend=backend,
            device=device,
        )
        self._attachments: list[Attachment] = []
        self._schedule = {"every": every, "until_weight": until_weight}
        # Of parameters that are spread over processes: how, and the scales of this window's micro-batches.
        self._shards: dict[Id, Shards] = {}
        self._scales: list[Any] = []
        self._skips = on_nonfinite == "skip"
        for id, like in items:
            self._shards.update(self._shards_of(id, like))

    def add(
        self,
        grads: Table | Sequence[Any] | Module,
        weight: SupportsFloat = 1.0,
        *,
        scale: SupportsFloat | None = None,
    ) -> bool:
        """Add the gradients of one micro-batch. Copies nothing, and keeps nothing of them.

        Args:
            grads: A mapping from id to gradient, a list or tuple with one entry per id in layout order, or a module
                with gradients in `.grad`. An id that is absent, or None, contributes nothing. A gradient is a NumPy
                array or scalar, or whatever has `__dlpack__`, of exactly its parameter's shape, with any strides, in
                host memory or (see `backend`) on a device of torch's. Gradients in a mapping or sequence are only
                read; a module's are consumed: each `.grad` is set to None once the add has succeeded, so that it can't
                be added twice.
            weight: What the micro-batch counts for in the divisor, such as its samples or tokens; at least 0. A torch
                tensor on another device is not waited for: its value is asked for when the window is taken, or
                `weight` is read, and if it is wrong, the window is broken then.
            scale: What its gradients are multiplied with; the weight by default. Pass 1 for the gradients of a sum
                loss, `weight / loss_scale` for those of a scaled loss. At 0 they are not read at all.

        Returns:
            Whether the window is now complete.

        Raises:
            UnknownParameterError: An id was never registered.
            ShapeError: A gradient has another shape than its parameter. Nothing broadcasts.
            DtypeError: A gradient is no tensor, or of a dtype that its buffer does not take.
            WindowError: The window is complete or broken, or a micro-batch is open.
            NonFiniteError: A gradient holds NaN or infinity, and `on_nonfinite` is "raise".
            ArgumentError: The weight or the scale is out of its range.
            GradaccError: What else does not fit: a leaf that requires grad instead of its gradient, a sequence of
                another length, a `.grad` of a module that lies in memory an earlier window handed over (after
                `assign_to` and without `optimizer.zero_grad()`), a gradient missing where `on_missing` is "error",
                another device than the one that the parameter's sums of this window lie on.
        """
        if hasattr(grads, "named_parameters"):
            from .torch.module import add_module

            return add_module(self, cast("Module", grads), weight, scale)
        return self._add(grads, weight, scale)

    def _add(self, grads: Any, weight: SupportsFloat, scale: SupportsFloat | None, *, fresh: bool = False) -> bool:
        """Add gradients; `fresh` refuses those in memory that an earlier window handed over."""
        known_weight, known_scale, late = self._late(weight, scale)
        complete = self._core.add(grads, known_weight, known_scale, fresh=fresh, late=late)
        self._note_scale(known_weight, known_scale, late)
        return complete

    def _note_scale(self, weight: Any, scale: Any, late: tuple[Any, Any] | None) -> None:
        """Remember the scale of a micro-batch, if processes have to compare them."""
        if self._shards:
            late_scale = None if late is None else late[1]
            self._scales.append(late_scale if late_scale is not None else float(weight if scale is None else scale))

    @contextlib.contextmanager
    def micro_batch(self, weight: SupportsFloat = 1.0, *, scale: SupportsFloat | None = None) -> Iterator[None]:
        """Open a micro-batch that comes in parts: several calls of `add_part` that count as one, with one weight.

        For tied weights, several backward passes, and gradients that come one parameter at a time. Until it ends,
        nothing else can be added or taken. If the body raises, or the micro-batch is refused at its end (`on_nonfinite`
        is "raise", `on_missing` is "error"), after a part has been added, the window is broken: only `reset` is legal.
        `last.norm` is None if an id came more than once.

        Args:
            weight: As for `add`.
            scale: As for `add`.

        Raises:
            WindowError: The window is complete or broken, or a micro-batch is open already.
            NonFiniteError: At the end: a gradient held NaN or infinity, and `on_nonfinite` is "raise".
            ArgumentError: The weight or the scale is out of its range; or `on_nonfinite` is "skip", which drops a
                micro-batch as a whole, while a part can't be taken back.

        Example:
            >>> import gradacc, numpy as np
            >>> acc = gradacc.GradientAccumulator({"tied": ((2,), "float32")})
            >>> with acc.micro_batch(weight=2):
            ...     acc.add_part({"tied": np.array([1, 2], "float32")})
            ...     acc.add_part({"tied": np.array([3, 0], "float32")})
            >>> acc.count, acc.weight, acc.take().numpy()["tied"].tolist()
            (1, 2.0, [4.0, 2.0])
        """
        known_weight, known_scale, late = self._late(weight, scale)
        number = self._core.begin_micro_batch(known_weight, known_scale, late=late)
        attachments = list(self._attachments)
        try:
            for attachment in attachments:
                attachment.open()
        except BaseException:
            self._core.abandon_micro_batch(number)
            raise
        try:
            yield
        except BaseException:
            self._core.abandon_micro_batch(number)
            for attachment in attachments:
                attachment.clear()
            raise
        self._core.end_micro_batch(number, late=late)
        self._note_scale(known_weight, known_scale, late)

    def _late(self, weight: Any, scale: Any) -> tuple[Any, Any, tuple[Any, Any] | None]:
        """Weight, scale, and those of them that are tensors on a device, which are not waited for."""
        # Only torch's tensors have this attribute.
        if (hasattr(weight, "is_cpu") or hasattr(scale, "is_cpu")) and self.until_weight is None:
            from .torch.store import late

            return late(weight, scale, self._torch_keeps_all) or (weight, scale, None)
        return weight, scale, None

    def attach(self, module: Module) -> Attachment:
        """Add the gradients of a module's parameters while autograd produces them, from now on.

        Each is added as soon as backward has it, and its `.grad` set to None: beside the sums there is never more than
        the gradient that is being added. Call backward within `micro_batch`, any number of times; elsewhere it raises
        a `WindowError`. If anything fails there, a part may have been added: the window is broken then, and only
        `reset` is legal. A parameter that is frozen now may be unfrozen later; it is registered then if it has to be. A
        compiled model hands all its gradients over at once: their values are right, and the memory is saved no more.

        Returns:
            A handle, whose `detach()` undoes it.

        Raises:
            UnknownParameterError: A parameter that requires grad was never registered.
            ArgumentError: `on_nonfinite` is "skip", which needs all of a micro-batch before any of it is added.
            GradaccError: A module that is attached has a parameter of the same name.

        Example:
            >>> import gradacc, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> acc = gradacc.GradientAccumulator(model, every=2)
            >>> handle = acc.attach(model)
            >>> for batch in torch.ones(3, 2), torch.ones(1, 2):
            ...     with acc.micro_batch(weight=len(batch)):
            ...         model(batch).mean().backward()
            >>> acc.complete, model.weight.grad, acc.take().torch()["weight"].tolist()
            (True, None, [[1.0, 1.0]])
        """
        from .torch.backward import Attachment

        return Attachment(self, module)

    def add_part(self, grads: Table | Sequence[Any]) -> None:
        """Add part of the micro-batch that is open. Copies nothing, and keeps nothing of the gradients.

        Args:
            grads: As for `add`, but no module. An id may have come before: both gradients count.

        Raises:
            WindowError: No micro-batch is open.
            GradaccError: What does not fit, as for `add`. Nothing of this part has been written then.
        """
        self._core.add_part(grads)

    def take(self, group: ProcessGroup | None = None) -> Gradients:
        """Close the window and hand its gradients over; the next one opens.

        Costs the same whatever the size: the buffers move to the result, and the next window writes into others.

        With a group of `torch.distributed`, the windows of all its processes are closed as one, and all of them get the
        same gradients: the sums of all over the weight of all, of the ids that any of them saw. They may hold other
        numbers of micro-batches, or none. All have to call it. Each flat buffer is added up once, in its own dtype,
        16-bit ones in float32. What is wrong with the window of one process is raised on all, and the windows are kept;
        if the exchange itself fails, they are lost.

        Parameters that `torch.distributed.fsdp.fully_shard` has spread over the group are not exchanged: each process
        gets the gradients of its own shards. Backward has averaged them over the processes already, so all must have
        given their micro-batches the same scales, and the mean over unequal numbers of tokens needs sum losses, with
        `weight=tokens, scale=1`. Without a group, their sums are divided by this process's weight alone.

        Args:
            group: The processes; `torch.distributed.group.WORLD` are all. None: this one alone, talking to no other.

        Raises:
            WindowError: The window is empty or broken, a micro-batch is open, or the window's weight is 0 though
                something was added and a mean is asked for. It is kept then.
            GradaccError: The processes have other parameters, or gave sharded ones other scales.
        """
        if group is None:
            taken = self._hand_over(self._core.take())
        else:
            from .torch.distributed import take

            taken = take(self, group)
        self._scales.clear()
        return taken

    def _hand_over(self, core: _core.Gradients, norm: Callable[[], float] | None = None) -> Gradients:
        return Gradients(core, norm=norm)

    def reset(self) -> None:
        """Forget what this window holds, and a micro-batch that is open. It stays the same window, and is empty."""
        self._core.reset()
        self._scales.clear()

    def set_schedule(self, *, every: Every | None = None, until_weight: SupportsFloat | None = None) -> None:
        """Complete windows otherwise from now on. A window that holds a micro-batch keeps what it was opened with.

        Args:
            every: As for the constructor.
            until_weight: As for the constructor.

        Raises:
            ArgumentError: It is out of its range, or both are given.
        """
        self._core.set_schedule(every=every_(every), until_weight=until_weight_(until_weight))
        self._schedule = {"every": every, "until_weight": until_weight}

    def state_dict(self) -> dict[str, Any]:
        """Return what this window holds: a snapshot of NumPy arrays and plain values, which can be pickled.

        Copies the sums. bfloat16 sums are uint16 arrays of the same bits. Entry "params" is a dict by id; "every" and
        "until_weight" are what the window was opened with, None before its first micro-batch.

        Raises:
            WindowError: The window is broken, or a micro-batch is open.
        """
        return self._core.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what this window holds, whatever that is, with what `state_dict` has returned. Copies it.

        Goes on bit for bit as the accumulator the state is from: with its window, counts, weights, sums and ids seen. A
        window that holds a micro-batch keeps the length it was opened with; the schedule for later ones is this
        accumulator's.

        Raises:
            StateError: The ids, or a shape, or a dtype of sums is another; or this is no such state, or one of a later
                version. Nothing has changed then.
        """
        self._core.load_state(state)
        self._scales.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what this window holds to a safetensors file, which replaces another of that name.

        Written beside it, synced to the disk, then renamed: a process that dies meanwhile leaves the old file whole. An
        int id 7 is called `#7` there, and a str that starts with `#` has one more.

        Raises:
            WindowError: The window is broken, or a micro-batch is open.
            OSError: It can't be written.

        Example:
            >>> import gradacc, numpy as np, os, tempfile
            >>> first, second = (gradacc.GradientAccumulator({"w": ((2,), "float32")}, every=2) for _ in range(2))
            >>> first.add({"w": np.array([1, 3], "float32")})
            False
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     first.save(os.path.join(folder, "window.safetensors"))
            ...     second.load(os.path.join(folder, "window.safetensors"))
            >>> second.add({"w": np.array([3, 3], "float32")})
            True
            >>> second.take().numpy()["w"]
            array([2., 3.], dtype=float32)
        """
        self._core.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace what this window holds with what `save` has written, as `load_state_dict` does.

        Reads the whole file into memory first.

        Raises:
            StateError: As for `load_state_dict`; also a file that was cut short, or is no such file.
            OSError: It can't be read.
        """
        self._core.load(path)
        self._scales.clear()

    def register(self, id: Id, like: Any) -> None:
        """Register one more parameter, also within a window. Nothing moves.

        Args:
            id: Its id.
            like: An array, which is only looked at, or a pair `(shape, dtype)`.

        Raises:
            GradaccError: The id is registered already.
            DtypeError: Its dtype can't be summed.
            ArgumentError: It is sharded over processes, and `on_nonfinite` is "skip".
        """
        shards = self._shards_of(id_of(id), like)
        self._core.register(id_of(id), *spec_of(id, like))
        self._shards.update(shards)

    def _shards_of(self, id: Id, like: Any) -> dict[Id, Shards]:
        """How a parameter is spread over processes, if it is."""
        if not hasattr(like, "to_local"):
            return {}
        if self._skips:
            raise _core.ArgumentError(
                f'on_nonfinite: parameter {id} is sharded over processes, and with "skip" each of them would drop '
                'micro-batches by its own shards: use "propagate"'
            )
        from .torch.shards import shards_of

        return {id: shards_of(like)}

    @property
    def ids(self) -> list[Id]:
        """The ids in layout order: the order they were registered in."""
        return self._core.ids

    @property
    def count(self) -> int:
        """How many micro-batches this window holds."""
        return self._core.count

    @property
    def weight(self) -> float:
        """The weight of this window so far."""
        return self._core.weight

    @property
    def rejected(self) -> int:
        """How many micro-batches of this window were skipped for being non-finite."""
        return self._core.rejected

    @property
    def complete(self) -> bool:
        """Whether this window has all its micro-batches."""
        return self._core.complete

    @property
    def window(self) -> int:
        """How many windows were taken before this one."""
        return self._core.window

    @property
    def every(self) -> int | None:
        """How many micro-batches this window is to have; None if the caller decides, or its weight does.

        Fixed once the window holds a micro-batch, or has rejected one.
        """
        return self._core.every

    @property
    def until_weight(self) -> float | None:
        """The weight that completes this window; None if something else does. Fixed as `every` is."""
        return self._core.until_weight

    @property
    def nbytes(self) -> int:
        """The size of a window's sums in bytes, padding included. Memory is used only where gradients arrive."""
        return self._core.nbytes

    @property
    def last(self) -> _core.Last | None:
        """Of the last micro-batch: whether it was `finite`, and with `micro_norms` its `norm` as it was given.

        Also of one that was skipped. None before the first.
        """
        return self._core.last

    def __repr__(self) -> str:
        of = "" if self.every is None else f" of {self.every}"
        return f"GradientAccumulator({len(self.ids)} parameters, {self.count}{of} micro-batches)"
