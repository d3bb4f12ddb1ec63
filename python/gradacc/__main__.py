"""`python -m gradacc`: what this installation is and what it runs on."""

import platform

import gradacc


def main() -> None:
    """Print the version, and the SIMD level and number of threads in use."""
    print(f"gradacc {gradacc.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"SIMD level {gradacc.simd_level()} (GRADACC_SIMD forces one)")
    print(f"{gradacc.num_threads()} threads (GRADACC_NUM_THREADS sets them)")


if __name__ == "__main__":
    main()
