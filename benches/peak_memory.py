"""The most memory a process has had resident, in several scenarios, each in a process of its own.

Prints a line of JSON, in bytes: of "windows", the size of the sums, and the peak after 2 windows of 4 micro-batches and
after 200 more; of "backward", for bfloat16 parameters of GPT-2 small, the size of the float32 sums and of the largest
gradient, and by how much the peak grows in two backward passes that drop the gradients, and in two that add them.
"""

import json
import resource
import subprocess
import sys

import gradacc
import numpy as np

ELEMENTS = 10_000_000


def peak_bytes() -> int:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def windows() -> dict[str, int]:
    """Hold each window's gradients while the next fills."""
    gradient = {"w": np.ones(ELEMENTS, np.float32)}
    acc, held, peaks = gradacc.GradientAccumulator(gradient, every=4), None, []
    for window in range(202):
        while not acc.add(gradient):
            pass
        held = acc.take().numpy()
        if window in (1, 201):
            peaks.append(peak_bytes())
    assert held is not None
    return {"sums": acc.nbytes, "peak after 2 windows": peaks[0], "peak after 202 windows": peaks[1]}


def backward(attach: bool) -> dict[str, int]:
    """Run backward twice, with an accumulator attached or with hooks that drop each gradient."""
    import during_backward

    warm = during_backward.Parameters([(2**20,)] * 2)  # whatever torch and the engine make once
    for run in (during_backward.hooked(warm, None), during_backward.attached(during_backward.Parameters([(2**20,)]))):
        run()
    model = during_backward.Parameters(during_backward.GPT2_SMALL)
    run = during_backward.attached(model) if attach else during_backward.hooked(model, None)
    before = peak_bytes()
    for _ in range(2):
        run()
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    sums = gradacc.GradientAccumulator(model).nbytes
    return {"sums": sums, "largest gradient": largest, "growth": peak_bytes() - before}


SCENARIOS = {"windows": windows, "floor": lambda: backward(False), "attached": lambda: backward(True)}


def main() -> None:
    """Run one scenario, or all of them."""
    if len(sys.argv) == 2:
        print(json.dumps(SCENARIOS[sys.argv[1]]()))
        return
    found = {}
    for name in SCENARIOS:
        done = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True)
        found[name] = json.loads(done.stdout)
    floor, attached = found.pop("floor"), found.pop("attached")
    found["backward"] = {
        "sums": attached["sums"],
        "largest gradient": attached["largest gradient"],
        "growth when gradients are dropped": floor["growth"],
        "growth when they are added": attached["growth"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
