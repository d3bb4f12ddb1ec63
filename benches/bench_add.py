"""Adding one micro-batch of GPT-2 small's gradients (148 tensors, 124 M elements), against PyTorch's own ops."""

import gradacc
import pytest
import torch


def gpt2_small():
    width = 768
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str, scope="module")
def gradients(request):
    return [torch.randn(shape).to(request.param) for shape in gpt2_small()]


@pytest.mark.benchmark(group="add")
def test_gradacc(benchmark, gradients):
    acc = gradacc.GradientAccumulator(enumerate(gradients))
    acc.add(gradients)
    benchmark(acc.add, gradients)


@pytest.mark.benchmark(group="add")
def test_torch_foreach_add(benchmark, gradients):
    sums = [torch.zeros(gradient.shape) for gradient in gradients]
    benchmark(torch._foreach_add_, sums, gradients)
