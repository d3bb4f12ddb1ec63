"""The most memory a process has had resident after 2 windows of 4 micro-batches, and after 200 more.

Prints a line of JSON: the size of the sums, and both figures, in bytes.
"""

import json
import resource
import sys

import gradacc
import numpy as np

ELEMENTS = 10_000_000


def peak_bytes() -> int:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Run the windows, holding each window's gradients while the next fills."""
    gradient = {"w": np.ones(ELEMENTS, np.float32)}
    acc, held, peaks = gradacc.GradientAccumulator(gradient, every=4), None, []
    for window in range(202):
        while not acc.add(gradient):
            pass
        held = acc.take().numpy()
        if window in (1, 201):
            peaks.append(peak_bytes())
    assert held is not None
    print(json.dumps({"sums": acc.nbytes, "peak after 2 windows": peaks[0], "peak after 202 windows": peaks[1]}))


if __name__ == "__main__":
    main()
