"""Hugging Face accelerate: its own accumulation is left at 1, and gradacc decides when to step.

accelerate's scheduler would step on every batch, and its optimizer's `step` takes no weight: so the optimizer that is
prepared is stepped on complete windows only, and a scheduler, if there is one, is not prepared.

    accelerate launch examples/accelerate_loop.py [--steps 40]
"""

from __future__ import annotations

import argparse

import gradacc
import torch
from accelerate import Accelerator
from transformer import batches, count, loss_of, model


def main(steps: int, every: int = 4) -> list[float]:
    """Train, and return the loss of the last batch of each window."""
    accelerator = Accelerator(gradient_accumulation_steps=1)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
    # The model that was prepared may be wrapped; its parameters are those of the one inside.
    inner = accelerator.unwrap_model(net)
    acc = gradacc.GradientAccumulator(inner, every=every)
    several = accelerator.num_processes > 1
    group = torch.distributed.group.WORLD if several else None
    losses: list[float] = []
    for text, targets in batches(sequences=4, seed=accelerator.process_index):
        with accelerator.no_sync(net):  # the gradients are exchanged by take, once per window
            loss = loss_of(net(text.to(accelerator.device)), targets.to(accelerator.device))
            accelerator.backward(loss)
        if acc.add(inner, weight=count(targets)):
            grads = acc.take(group)
            grads.clip_(1.0)
            grads.assign_to(inner)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.3f}, {grads.weight:.0f} characters")
            if len(losses) == steps:
                return losses
    raise AssertionError("batches have no end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    main(parser.parse_args().steps)
