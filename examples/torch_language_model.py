"""A small transformer trained on the same text in three ways: loss, speed and memory of each.

- "full batch": 16 texts at once;
- "plain loop": in micro-batches of 1, 9, 2 and 4 texts, as most people write it: each loss is divided by their number;
- "gradacc": in the same micro-batches, added during backward with their characters as weights.

The data, the seed and the order are the same. Prints a table: how far each step's gradients are from those of the full
batch, relative to their norm, in the median; the loss over texts that were not trained on; characters per second; and
by how much the resident memory has grown at most in the first step. Each way runs in a process of its own.

    python examples/torch_language_model.py [--steps 40] [--way gradacc]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import gradacc
import torch
from transformer import Transformer, batches, count, loss_of, model

PARTS = [1, 9, 2, 4]  # texts in each micro-batch
Batch = tuple[torch.Tensor, torch.Tensor]


class Outcome(NamedTuple):
    """What a way has come to."""

    distance: float
    loss: float
    characters_per_second: float
    grown_bytes: int


def full_batch(net: Transformer) -> Callable[[Batch], None]:
    """Gradients of a batch at once."""

    def backward(batch: Batch) -> None:
        loss_of(net(batch[0]), batch[1]).backward()

    return backward


def plain_loop(net: Transformer) -> Callable[[Batch], None]:
    """Gradients of micro-batches, whose losses are divided by their number."""

    def backward(batch: Batch) -> None:
        for text, targets in zip(batch[0].split(PARTS), batch[1].split(PARTS), strict=True):
            (loss_of(net(text), targets) / len(PARTS)).backward()

    return backward


def with_gradacc(net: Transformer) -> Callable[[Batch], None]:
    """Gradients of micro-batches, weighted by their characters."""
    acc = gradacc.GradientAccumulator(net, every=len(PARTS))
    acc.attach(net)

    def backward(batch: Batch) -> None:
        for text, targets in zip(batch[0].split(PARTS), batch[1].split(PARTS), strict=True):
            with acc.micro_batch(weight=count(targets)):
                loss_of(net(text), targets).backward()
        acc.take().assign_to(net)

    return backward


WAYS = {"full batch": full_batch, "plain loop": plain_loop, "gradacc": with_gradacc}


def distance(net: Transformer, batch: Batch) -> float:
    """How far the gradients in `.grad` are from those of the full batch, relative to their norm."""
    expected = torch.autograd.grad(loss_of(net(batch[0]), batch[1]), list(net.parameters()))
    away = [p.grad - g for p, g in zip(net.parameters(), expected, strict=True) if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(away) / torch.nn.utils.get_total_norm(expected))


def peak_bytes() -> int:
    """The most that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def train(way: str, steps: int) -> Outcome:
    """Train one way."""
    torch.set_num_threads(gradacc.num_threads())
    net, data = model(), batches(sum(PARTS))
    optimizer, backward = torch.optim.AdamW(net.parameters(), lr=3e-3), WAYS[way](net)
    seconds, characters, distances, grown = 0.0, 0, [], 0
    before = peak_bytes()
    for step in range(steps):
        batch = next(data)
        start = time.perf_counter()
        backward(batch)
        seconds += time.perf_counter() - start
        characters += count(batch[1])
        if step == 0:
            grown = peak_bytes() - before
        if step % 10 == 0:
            distances.append(distance(net, batch) if way != "full batch" else 0.0)
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
    with torch.no_grad():
        text, targets = next(batches(sequences=32, seed=1))
        loss = loss_of(net(text), targets).item()
    return Outcome(statistics.median(distances), loss, characters / seconds, grown)


def main() -> None:
    """Train the ways that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--way", choices=WAYS, action="append")
    arguments = parser.parse_args()
    print(f"{'':12}{'distance':>12}{'loss':>8}{'char/s':>10}{'grown':>12}")
    for way in arguments.way or WAYS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            distance, loss, speed, grown = process.submit(train, way, arguments.steps).result()
        print(f"{way:12}{distance:12.1e}{loss:8.3f}{speed:10,.0f}{grown / 2**20:8.0f} MiB")


if __name__ == "__main__":
    main()
