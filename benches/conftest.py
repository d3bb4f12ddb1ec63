"""What the benchmarks share: the gradients of GPT-2 small, and how a call is timed."""

import gradacc
import pytest
import torch

WIDTH = 768
BLOCK = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
BLOCK += [(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
GPT2_SMALL = [(50257, WIDTH), (1024, WIDTH), *BLOCK * 12, (WIDTH,), (WIDTH,)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    """As many threads for gradacc and for torch."""
    before = gradacc.num_threads(), torch.get_num_threads()
    gradacc.set_num_threads(request.param)
    torch.set_num_threads(request.param)
    yield request.param
    gradacc.set_num_threads(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture
def timed(benchmark):
    """Time a call, and note the bytes that it must read and write at least, if it is bound by memory."""

    def run(call, *arguments, len_bytes=None, rounds=9):
        benchmark.extra_info["bytes"] = len_bytes
        benchmark.pedantic(call, arguments, rounds=rounds, warmup_rounds=2)

    return run


def count(shapes):
    """Elements of tensors of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)
