"""States of accumulators as `torch.save` keeps them and `torch.load(weights_only=True)` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def to_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with torch tensors in place of NumPy arrays. They alias them."""

    def tensor(entry: Mapping[str, Any]) -> Any:
        if entry["sums"] is None:
            return None
        sums = torch.from_numpy(entry["sums"])
        return sums.view(torch.bfloat16) if entry["dtype"] == "bfloat16" else sums

    return {**state, "params": {id: {**entry, "sums": tensor(entry)} for id, entry in state["params"].items()}}


def from_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state for `GradientAccumulator.load_state_dict` of one of `to_tensors`, on whatever device its tensors are."""

    def array(sums: Any) -> Any:
        if not isinstance(sums, torch.Tensor):
            return sums
        sums = sums.detach().cpu()
        return (sums.view(torch.uint16) if sums.dtype == torch.bfloat16 else sums).numpy()

    params = {id: {**entry, "sums": array(entry["sums"])} for id, entry in state["params"].items()}
    return {**state, "params": params}
