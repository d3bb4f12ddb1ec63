"""A loss in chunks: all logits at once would take the most memory, so each chunk has a backward of its own.

The head gets a gradient from every chunk, the rest of the model one in the end; together they are one micro-batch, with
one weight. Attached, gradacc adds each gradient while autograd produces it.

    python examples/chunked_losses.py [--steps 40]
"""

from __future__ import annotations

import argparse

import gradacc
import torch
from transformer import Transformer, batches, count, loss_of, model

CHUNK = 64  # positions


def backward(net: Transformer, text: torch.Tensor, targets: torch.Tensor) -> float:
    """Backward of the sum of the losses of all characters, a chunk of positions at a time. Returns that sum."""
    hidden = net.body(text)
    leaf = hidden.detach().requires_grad_()
    total = 0.0
    for part, of_part in zip(leaf.split(CHUNK, dim=1), targets.split(CHUNK, dim=1), strict=True):
        loss = loss_of(net.head(part), of_part, reduction="sum")
        loss.backward()
        total += loss.item()
    hidden.backward(leaf.grad)
    return total


def main(steps: int, every: int = 4) -> list[float]:
    """Train, and return the mean loss of each window."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    acc = gradacc.GradientAccumulator(net, every=every)
    acc.attach(net)
    losses, total = [], 0.0
    for text, targets in batches(sequences=4):
        with acc.micro_batch(weight=count(targets), scale=1):  # a sum over the characters
            total += backward(net, text, targets)
        if acc.complete:
            grads = acc.take()
            grads.assign_to(net)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total / grads.weight)
            total = 0.0
            print(f"step {len(losses)}: loss {losses[-1]:.3f} over {grads.weight:.0f} characters")
            if len(losses) == steps:
                return losses
    raise AssertionError("batches have no end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
