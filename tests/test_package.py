"""The package itself: what it imports, what its environment variables do, and that what its documents say runs."""

import doctest
import importlib
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import gradacc
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_framework_is_imported():
    done = python("""
import sys, gradacc, numpy as np
acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
acc.add({"w": np.ones(2, np.float32)})
acc.take().numpy()
print(*{"torch", "jax", "lightning", "optax", "ml_dtypes", "brainpy", "brainstate"} & set(sys.modules))
""")
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_framework_that_is_not_installed_is_named():
    done = python("""
import sys
sys.modules["torch"] = None
import gradacc, numpy as np
acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
acc.add({"w": np.ones(2, np.float32)})
acc.take().torch()
""")
    assert "import of torch halted" in done.stderr


def test_simd_level_can_be_forced():
    done = python(
        "import gradacc; print(gradacc.simd_level(), gradacc.num_threads())",
        GRADACC_SIMD="scalar",
        GRADACC_NUM_THREADS="3",
    )
    assert done.stdout.split() == ["scalar", "3"]


DIGEST = """
import hashlib, gradacc, ml_dtypes, numpy as np
digest = hashlib.sha256()
for n in (1, 67, 1000, 300_007, 4_000_000):
    x = np.random.default_rng(n).standard_normal(n, np.float32)
    acc = gradacc.GradientAccumulator({"a": x, "b": ((n,), "bfloat16"), "c": ((n,), "float16")}, micro_norms=True)
    for weight in (1, 0.3):
        acc.add({"a": x, "b": x.astype(ml_dtypes.bfloat16), "c": x.astype(np.float16)}, weight)
        digest.update(acc.last.norm.hex().encode())
    grads = acc.take()
    digest.update(grads.norm().hex().encode())
    for array in grads.numpy().values():
        digest.update(array)
print(gradacc.simd_level(), gradacc.num_threads(), digest.hexdigest())
"""


def test_same_bits_on_every_simd_level_and_for_any_number_of_threads():
    digests = set()
    for level, threads in [("scalar", "1"), ("avx2", "2"), ("avx512", "1"), ("avx512", "3")]:
        done = python(DIGEST, GRADACC_SIMD=level, GRADACC_NUM_THREADS=threads)
        if "this machine has no" not in done.stderr:
            assert done.stdout.split()[:2] == [level, threads], done.stderr
            digests.add(done.stdout.split()[2])
    assert len(digests) == 1


def test_other_threads_run_while_gradients_are_added():
    """The GIL is released around kernels: another thread counts on, as it does while this one sleeps."""
    turned = np.ones((4000, 5000), np.float32).T  # slow to gather
    acc = gradacc.GradientAccumulator({"w": turned})
    counts, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1

    def counted_per_second(call):
        start, before = time.perf_counter(), counts[0]
        call()
        return (counts[0] - before) / (time.perf_counter() - start)

    thread, threads = threading.Thread(target=count), gradacc.num_threads()
    gradacc.set_num_threads(1)
    thread.start()
    try:
        acc.add({"w": turned})
        asleep = counted_per_second(lambda: time.sleep(0.1))
        assert counted_per_second(lambda: acc.add({"w": turned})) > asleep / 5
    finally:
        stop.set()
        thread.join()
        gradacc.set_num_threads(threads)


@pytest.mark.parametrize(("variable", "value"), [("GRADACC_SIMD", "sse9"), ("GRADACC_NUM_THREADS", "0")])
def test_wrong_environment_variable_is_a_clear_error(variable, value):
    done = python('import gradacc; gradacc.GradientAccumulator({"w": ((2,), "float32")})', **{variable: value})
    assert f"gradacc.ArgumentError: {variable}: " in done.stderr
    assert value in done.stderr


def test_set_num_threads():
    before = gradacc.num_threads()
    gradacc.set_num_threads(3)
    assert gradacc.num_threads() == 3
    gradacc.set_num_threads(before)
    with pytest.raises(gradacc.ArgumentError, match="num_threads"):
        gradacc.set_num_threads(0)


def test_command_line():
    done = subprocess.run([sys.executable, "-m", "gradacc"], capture_output=True, text=True, check=True, timeout=60)
    assert gradacc.__version__ in done.stdout
    assert gradacc.simd_level() in done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child():
    """The parent's threads exist, and the child has none of them."""
    done = python("""
import os, signal, gradacc, numpy as np
g = np.ones(2**20, np.float32)
acc = gradacc.GradientAccumulator({"w": g})
acc.add({"w": g})
child = os.fork()
if child == 0:
    signal.alarm(20)
    acc.add({"w": 3 * g})
    os._exit(0 if (acc.take().numpy()["w"] == 2).all() else 1)
assert os.waitpid(child, 0)[1] == 0
acc.add({"w": 5 * g})
assert (acc.take().numpy()["w"] == 3).all()
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_child_forked_while_another_thread_adds_does_not_hang():
    done = python("""
import os, signal, threading, gradacc, numpy as np
g = np.ones(2**24, np.float32)
acc = gradacc.GradientAccumulator({"w": g})
stop = threading.Event()

def work():
    while not stop.is_set():
        acc.add({"w": g})

thread = threading.Thread(target=work)
thread.start()
while acc.count < 3:
    pass
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        acc.count
        os._exit(0)
    except gradacc.GradaccError as error:
        os._exit(0 if "forked" in str(error) else 1)
stop.set()
thread.join()
assert os.waitpid(child, 0)[1] == 0
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "accumulator",
        "schedule",
        "torch.optimizer",
        "jax.accumulator",
        "jax.functional",
        "jax.micro_batches",
        "optax",
        "brainpy",
        "brainstate",
    ],
)
def test_examples_in_docstrings(name):
    if name.startswith("brain"):
        pytest.importorskip(name)
    module = importlib.import_module(f"gradacc.{name}")
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


# All but the table of contents.
PAGES = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_examples_in_the_documents(page, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(ROOT)
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": "example"})


def test_a_process_ends_quietly_with_exports_alive():
    done = python("""
import sys, threading, gradacc, numpy as np
acc = gradacc.GradientAccumulator({"w": ((100000,), "float32")})
acc.add({"w": np.ones(100000, np.float32)})
grads = acc.take()
gradient = grads["w"]
capsules = [gradient.__dlpack__(), gradient.__dlpack__(max_version=(1, 0))]
held = [grads, grads.numpy(), np.from_dlpack(gradient), *capsules]
acc.add({"w": np.ones(100000, np.float32)})
cycle = []
cycle.append((cycle, held, acc))
sys.modules["kept"] = held
threading.Thread(target=lambda: held, daemon=True).start()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
