"""One micro-batch, and whole windows, against PyTorch's own ops."""

import gradacc
import pytest
import torch
from conftest import GPT2_SMALL, count

SMALL = [(64,)] * 2000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ELEMENTS = count(GPT2_SMALL)


@pytest.fixture(scope="module", params=DTYPES)
def large(request):
    return [torch.randn(shape).to(DTYPES[request.param]) for shape in GPT2_SMALL]


@pytest.fixture(scope="module", params=DTYPES)
def small(request):
    return [torch.randn(shape).to(DTYPES[request.param]) for shape in SMALL]


def opened(gradients, **options):
    acc = gradacc.GradientAccumulator(enumerate(gradients), **options)
    acc.add(gradients)
    return acc


def add_bytes(gradients):
    """The gradient read, the float32 sum read and written."""
    return sum(g.numel() * (g.element_size() + 8) for g in gradients)


class TestAddGpt2Small:
    """Add the gradients of GPT-2 small, 148 tensors of 124 M elements, to float32 sums."""

    def test_gradacc(self, timed, large, threads):
        timed(opened(large).add, large, len_bytes=add_bytes(large))

    def test_torch_foreach_add(self, timed, large, threads):
        timed(torch._foreach_add_, [torch.zeros(g.shape) for g in large], large, len_bytes=add_bytes(large))

    def test_torch_add_one_by_one(self, timed, large, threads):
        sums = [torch.zeros(g.shape) for g in large]

        def add():
            for total, g in zip(sums, large, strict=True):
                total.add_(g)

        timed(add, len_bytes=add_bytes(large))

    def test_numpy_loop(self, timed, large):
        if large[0].dtype != torch.float32:
            pytest.skip("NumPy has no bfloat16")
        sums, arrays = [torch.zeros(g.shape).numpy() for g in large], [g.numpy() for g in large]

        def add():
            for total, g in zip(sums, arrays, strict=True):
                total += g

        timed(add, len_bytes=add_bytes(large))

    def test_triad_of_torch(self, timed, threads):
        """Not an accumulation: what memory gives. Two arrays read and one written, of the same size in all."""
        a, b, c = (torch.ones(ELEMENTS) for _ in range(3))
        timed(lambda: torch.add(a, b, alpha=3, out=c), len_bytes=12 * ELEMENTS)


class TestChecks:
    """The same add with what else may be asked of it."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"micro_norms": True}, {"on_nonfinite": "skip"}, {"on_nonfinite": "raise"}],
        ids=["plain", "micro_norms", "skip", "raise"],
    )
    def test_gradacc(self, timed, large, options):
        timed(opened(large, **options).add, large)

    def test_torch_add_then_check_then_norm(self, timed, large):
        sums = [torch.zeros(g.shape) for g in large]

        def add():
            torch._foreach_add_(sums, large)
            torch.stack(torch._foreach_norm(large, dtype=torch.float32)).norm().isfinite().item()

        timed(add)


class TestFirstAdd:
    """The first add of a window, which writes into a recycled buffer."""

    def test_gradacc(self, benchmark, large):
        acc = opened(large)
        benchmark.extra_info["bytes"] = sum(g.numel() * (g.element_size() + 4) for g in large)
        benchmark.pedantic(acc.add, (large,), setup=lambda: acc.take() and None, rounds=9)

    def test_torch_foreach_copy(self, timed, large):
        sums = [torch.zeros(g.shape) for g in large]
        timed(torch._foreach_copy_, sums, large, len_bytes=sum(g.numel() * (g.element_size() + 4) for g in large))


class TestAdd2000SmallTensors:
    """Add 2,000 tensors of 64 elements."""

    def test_gradacc_list(self, timed, small):
        timed(opened(small).add, small, rounds=200)

    def test_gradacc_dict(self, timed, small):
        grads = {f"layers.{i}.weight": g for i, g in enumerate(small)}
        acc = gradacc.GradientAccumulator(grads)
        acc.add(grads)
        timed(acc.add, grads, rounds=200)

    def test_torch_foreach_add(self, timed, small):
        timed(torch._foreach_add_, [torch.zeros(g.shape) for g in small], small, rounds=200)


class TestWindow:
    """A window of 8 micro-batches, divided by 8, clipped to norm 1, and handed over."""

    def test_gradacc(self, timed, large):
        acc = gradacc.GradientAccumulator(enumerate(large))

        def window():
            for _ in range(8):
                acc.add(large)
            grads = acc.take()
            grads.clip_(1.0)
            return grads.torch()

        timed(window, rounds=3)

    def test_torch(self, timed, large):
        params = [torch.zeros(g.shape, requires_grad=True) for g in large]
        for p in params:
            p.grad = torch.zeros_like(p)

        def window():
            sums = [p.grad for p in params]
            torch._foreach_zero_(sums)
            for _ in range(8):
                torch._foreach_add_(sums, large)
            torch._foreach_div_(sums, 8.0)
            torch.nn.utils.clip_grad_norm_(params, 1.0)

        timed(window, rounds=3)
