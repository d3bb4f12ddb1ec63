"""Gradients that are added while autograd produces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .. import _core

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ..accumulator import GradientAccumulator


class Attachment:
    """What `GradientAccumulator.attach` returns: the hooks on a module's parameters.

    A gradient is added when autograd has put it into `.grad`, which is set to None at once.
    """

    def __init__(self, acc: GradientAccumulator, module: torch.nn.Module) -> None:
        acc._core.check_parts()
        self._acc = acc
        known = set(acc.ids)
        taken = {name: parameter for other in acc._attachments for name, parameter in other._parameters.items()}
        names = {id(parameter): name for name, parameter in taken.items()}
        self._parameters: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        for name, parameter in self._parameters.items():
            if name in taken:
                raise _core.GradaccError(f"parameter {name}: an attached module has a parameter of this name already")
            if id(parameter) in names:
                raise _core.GradaccError(
                    f"parameter {name}: it is attached already, as {names[id(parameter)]}: its gradient can't be added "
                    "under both"
                )
            if parameter.requires_grad and name not in known:
                raise _core.UnknownParameterError(
                    f"unknown parameter {name}: it was never registered with this accumulator; if it was frozen when "
                    "the accumulator was made, register it"
                )
        self._hooks: dict[str, RemovableHandle] = {}
        self._hook_trainable()
        acc._attachments.append(self)

    def detach(self) -> None:
        """Remove the hooks: gradients stay in `.grad` again. What has been added stays added."""
        if self in self._acc._attachments:
            self._acc._attachments.remove(self)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def open(self) -> None:
        """Get ready for a micro-batch.

        Raises:
            GradaccError: A `.grad` is not None: it would be counted with the gradient that is to come.
        """
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.grad is not None:
                raise _core.GradaccError(
                    f"parameter {name}: its .grad is not None before the backward pass of an attached module, which "
                    "would add to it and count it again: call optimizer.zero_grad() after the step, with "
                    "set_to_none=True"
                )
        self._hook_trainable()

    def clear(self) -> None:
        """Drop what a backward pass that failed has left in `.grad`."""
        for parameter in self._parameters.values():
            if parameter.requires_grad:
                parameter.grad = None

    def _hook_trainable(self) -> None:
        """Hook parameters that require grad and have no hook: torch refuses one on a frozen parameter."""
        if len(self._hooks) == len(self._parameters):
            return
        known = set(self._acc.ids)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                if name not in known:
                    self._acc.register(name, parameter)
                self._hooks[name] = parameter.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str) -> Callable[[torch.Tensor], None]:
        add_part = self._acc._core.add_part

        def add(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                raise _core.GradaccError(
                    f"parameter {name}: another hook has taken its .grad before this accumulator could, such as that "
                    "of another accumulator that its module is attached to"
                )
            add_part({name: gradient})

        return add
