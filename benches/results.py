"""Writes RESULTS.md from what the benchmarks have measured; `make bench` runs it.

Usage: python results.py PYTEST_BENCHMARK_JSON CRITERION_FOLDER MEMORY_JSON BACKWARD_JSON RESULTS.md
"""

from __future__ import annotations

import json
import pathlib
import platform
import re
import sys
from collections import defaultdict
from importlib.metadata import version
from typing import Any

import gradacc

HEAD = """\
# Results

Measured by `make bench`, which writes this page; {date}.
{machine}, {cores} cores; gradacc {gradacc} at SIMD level {level}, Python {python}; {versions}.

Times are medians. A ratio is the other's time over that of gradacc in the same group: above 1, gradacc is faster. Bytes
per second count what must be read and written at least: for an add, the gradient read, the sum read and written.

## Where gradacc does not win

- Adding large gradients to sums of the same dtype is bound by memory for everybody: expect a ratio near 1 against
  `torch._foreach_add_`, and against a jitted, donated tree add in JAX.
- "skip" and "raise" read each gradient twice. Where reading alone takes all that memory gives, that costs half of a
  float32 add, and a third of a bfloat16 one.
- On a GPU, torch's own operations are used.
"""


def machine() -> str:
    """The processor's name."""
    try:
        names = re.findall(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def python_tables(report: dict[str, Any]) -> str:
    """One table for each class of benchmarks."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for benchmark in report["benchmarks"]:
        groups[re.search(r"::(\w+)::", benchmark["fullname"])[1]].append(benchmark)  # type: ignore[index]
    tables = []
    for name, benchmarks in groups.items():
        title = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-z])(?=[0-9])", " ", name.removeprefix("Test"))
        rows = [f"### {title}", "", "| | ms | GB/s | ratio |", "|---|---|---|---|"]
        named = [
            (*benchmark["name"].removeprefix("test_").rstrip("]").partition("[")[::2], benchmark)
            for benchmark in benchmarks
        ]
        ours: dict[str, float] = {}
        for call, case, benchmark in named:
            if call.startswith("gradacc"):
                # With options, it is compared with itself without.
                ours.setdefault(re.sub("-(plain|micro_norms|skip|raise)$", "", case), benchmark["stats"]["median"])
        for call, case, benchmark in named:
            median, len_bytes = benchmark["stats"]["median"], benchmark["extra_info"].get("bytes")
            base = ours.get(re.sub("-(plain|micro_norms|skip|raise)$", "", case))
            speed = f"{len_bytes / median / 1e9:.1f}" if len_bytes else ""
            ratio = f"{median / base:.2f}" if base else ""
            label = f"{call.replace('_', ' ')}{', ' if case else ''}{case.replace('-', ', ')}"
            rows.append(f"| {label} | {median * 1e3:.2f} | {speed} | {ratio} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def backward_table(milliseconds: dict[str, float]) -> str:
    """What was measured of each way, and what it takes over the floor."""
    floor = milliseconds["floor"]
    rows = ["| | ms | over the floor | ratio |", "|---|---|---|---|"]
    for way, median in milliseconds.items():
        over = median - floor
        ratio = f"{over / (milliseconds['gradacc'] - floor):.2f}" if over else ""
        rows.append(f"| {way} | {median:.1f} | {over:.1f} | {ratio} |")
    return "\n".join(rows)


def kernel_table(folder: pathlib.Path) -> str:
    """Gigabytes per second of one thread, by dtypes, SIMD level and length."""
    speeds: dict[str, dict[int, float]] = defaultdict(dict)
    for path in sorted(folder.glob("*/*/new/benchmark.json")):
        benchmark = json.loads(path.read_text())
        estimates = json.loads((path.parent / "estimates.json").read_text())
        nanoseconds = estimates["median"]["point_estimate"]
        speed = benchmark["throughput"]["Bytes"] / nanoseconds
        speeds[benchmark["group_id"]][int(benchmark["value_str"])] = speed
    lengths = sorted({length for speed in speeds.values() for length in speed})
    rows = ["| | " + " | ".join(f"{length:,}" for length in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for group, speed in speeds.items():
        rows.append(f"| {group} | " + " | ".join(f"{speed.get(length, 0):.1f}" for length in lengths) + " |")
    return "\n".join(rows)


def main() -> None:
    """Read the measurements, write the page."""
    report, criterion, memory, backward, page = map(pathlib.Path, sys.argv[1:])
    measured = json.loads(report.read_text())
    peaks = json.loads(memory.read_text())
    mebibytes = {
        scenario: ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
        for scenario, sizes in peaks.items()
    }
    head = HEAD.format(
        date=measured["datetime"][:10],
        machine=machine(),
        cores=measured["machine_info"]["cpu"].get("count", "?"),
        gradacc=gradacc.__version__,
        level=gradacc.simd_level(),
        python=platform.python_version(),
        versions=", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "optax", "numpy")),
    )
    sections = [
        head,
        "## In Python\n",
        python_tables(measured),
        "\n## During backward\n",
        "bfloat16 gradients of GPT-2 small, made as cheaply as can be, added to float32 sums while autograd produces "
        "them. The floor only drops them. The ways take turns: `python benches/during_backward.py`.\n",
        backward_table(json.loads(backward.read_text())),
        "\n## Kernels, one thread, GB/s by number of elements\n",
        kernel_table(criterion),
        "\n## Memory\n",
        f"Over 202 windows of 4 micro-batches, each held while the next fills: {mebibytes['windows']}.\n",
        "Two backward passes over the bfloat16 parameters of GPT-2 small, with an accumulator attached, or with hooks "
        f"that drop each gradient: {mebibytes['backward']}.",
    ]
    page.write_text("\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
