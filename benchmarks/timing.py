"""How long a jitted program takes, by the wall and by the device."""

import glob
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax


def wall_us(call: Callable[[], Any], repeats: int = 9, runs: int = 4) -> float:
    """Median wall-clock time of one run, from ``runs`` of them in a row, in microseconds."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(runs - 1):
            call()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) / runs * 1e6)
    return statistics.median(times)


def kernel_us(call: Callable[[], Any]) -> float | None:
    """Device time of all kernels of one run, in microseconds; None where the profiler has none."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        total = 0.0
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        total += sum(event.duration_ns for event in line.events) / 1e3
    return total or None


def environment() -> dict[str, str]:
    """What a figure depends on beside the code."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    header = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
    cuda = re.search(r"CUDA Version: ([\d.]+)", header)
    return dict(
        gpu=name.removeprefix("NVIDIA "),
        driver=driver,
        cuda=cuda[1] if cuda else "unknown",
        jax=jax.__version__,
        date=time.strftime("%Y-%m-%d"),
    )
