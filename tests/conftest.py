"""Settings of every test: eight fake CPU devices, no implicit promotion, GPU tests only where there is one."""

import os

# Before JAX is imported: sharding is tested on fake devices.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, rather than skip, where the GPU tests cannot run"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a GPU test where the kernels do not run, so that a fallback can never pass it."""
    if item.get_closest_marker("gpu") is None:
        return
    from jaxq import _ffi

    reason = _ffi.status()
    if reason is None and not _ffi.runs_on_cuda():
        reason = "JAX has no CUDA device"
    if reason is not None:
        (pytest.fail if item.config.getoption("--require-gpu") else pytest.skip)(f"needs the CUDA kernels: {reason}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of this test alone, the same in every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
