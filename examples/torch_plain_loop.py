"""A plain PyTorch loop: the lines with `acc` are all that gradacc needs.

python examples/torch_plain_loop.py [--steps 40]
"""

from __future__ import annotations

import argparse

import gradacc
import torch
from transformer import batches, count, loss_of, model


def main(steps: int, every: int = 4) -> list[float]:
    """Train, and return the mean loss of each window."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    acc = gradacc.GradientAccumulator(net, every=every)
    losses, total = [], 0.0
    for text, targets in batches(sequences=4):
        loss = loss_of(net(text), targets)  # a mean over the batch's characters
        loss.backward()
        total += loss.item() * count(targets)
        if acc.add(net, weight=count(targets)):
            grads = acc.take()
            grads.clip_(1.0)
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
