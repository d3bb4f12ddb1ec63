"""Gradients of modules, tensors, and hand-over to an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import torch
from torch.utils.dlpack import from_dlpack

from .shards import like

if TYPE_CHECKING:
    from ..accumulator import GradientAccumulator
    from ..gradients import Gradients

Module: TypeAlias = torch.nn.Module


def add_module(acc: GradientAccumulator, module: Module, weight: SupportsFloat, scale: SupportsFloat | None) -> bool:
    """Add the gradients in `.grad` of a module's parameters, and once that has succeeded set each `.grad` to None."""
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if parameter.grad is not None]
    grads = {name: parameter.grad for name, parameter in parameters}
    complete = acc._add(grads, weight, scale, fresh=True)
    for _, parameter in parameters:
        parameter.grad = None
    return complete


def to_torch(grads: Gradients) -> dict[Any, torch.Tensor]:
    """Tensors that alias the memory of the gradients."""
    return {id: to_tensor(gradient) for id, gradient in grads.items()}


def to_tensor(gradient: Any) -> torch.Tensor:
    """A tensor that aliases the memory of a gradient."""
    tensor: torch.Tensor = gradient.tensor if hasattr(gradient, "tensor") else from_dlpack(gradient)
    return tensor


def assign(parameter: torch.nn.Parameter, gradient: Any) -> None:
    """Put a gradient, or None, into `.grad` of a parameter, in its dtype and on its device."""
    if gradient is None:
        parameter.grad = None
        return
    tensor = to_tensor(gradient).to(device=parameter.device, dtype=parameter.dtype)
    parameter.grad = like(parameter, tensor)


def assign_to(grads: Gradients, module: Module) -> None:
    """See `Gradients.assign_to`."""
    known = set(grads._core.known)
    for name, parameter in module.named_parameters():
        if name in grads:
            assign(parameter, grads[name])
        elif name in known:
            parameter.grad = None
