"""Local processes of one group of torch.distributed, over gloo, that run functions of a test module together."""

import concurrent.futures
import datetime
import multiprocessing
import os
import tempfile

import torch
import torch.distributed as dist

SECONDS = 60


class Ranks:
    """`ranks(function, *args)` runs `function(rank, *args)` in every process; returns what each returned, or raised."""

    def __init__(self, count):
        self._scratch = tempfile.TemporaryDirectory()
        store, context = os.path.join(self._scratch.name, "store"), multiprocessing.get_context("spawn")
        self._processes = [
            concurrent.futures.ProcessPoolExecutor(1, context, join, (rank, count, store)) for rank in range(count)
        ]

    def __call__(self, function, *args):
        asked = [process.submit(function, rank, *args) for rank, process in enumerate(self._processes)]
        concurrent.futures.wait(asked, timeout=3 * SECONDS)
        return [answer.exception(timeout=0) or answer.result() for answer in asked]

    def stop(self):
        for process in self._processes:
            process.shutdown()  # one that waits for the others gives up after SECONDS
        self._scratch.cleanup()


def join(rank, count, store):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
