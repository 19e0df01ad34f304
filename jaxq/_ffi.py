"""Loads the CUDA extension, if there is one, and registers its custom call targets. The only file that knows it exists.

An extension built against a newer jaxlib must not be registered: XLA would refuse to start any backend.
"""

import functools
import importlib
import pathlib
import re
import warnings
from typing import Any

import jax

BUILD_COMMAND = "pip install -ve '.[gpu]'"


def _load() -> tuple[Any, str | None]:
    """The extension, or None and why."""
    try:
        extension: Any = importlib.import_module("jaxq._cuda")
    except ImportError as error:
        return None, (
            f"the CUDA extension is not built ({error}); on a machine with nvcc run: {BUILD_COMMAND} (with -e: in a "
            "checkout, Python finds the source before an installed copy)"
        )
    text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    runtime = tuple(int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))
    if extension.ffi_version > runtime:
        return None, (
            f"the CUDA extension was built for XLA's FFI {extension.ffi_version}, this jaxlib has {runtime}; "
            f"build it against this jaxlib or an older one: {BUILD_COMMAND}"
        )
    for target, capsule in extension.registrations().items():
        jax.ffi.register_ffi_target(target, capsule, platform="CUDA")
    return extension, None


_extension, _refusal = _load()


@functools.cache
def status() -> str | None:
    """None if the kernels run here; otherwise what is missing, with the remedy."""
    if _refusal is not None:
        return _refusal
    count = _extension.device_count()
    if not count:
        return "the driver shows no CUDA device"
    for i in range(count):
        major, minor = _extension.compute_capability(i)
        if major != 8 and (major, minor) != (9, 0):
            return f"CUDA device {i} has compute capability {major}.{minor}; the kernels need 8.0 to 9.0"
        compiled = [divmod(int(sm.rstrip("a")), 10) for sm in _extension.architectures.split()]
        if not any(major == a and minor >= b for a, b in compiled):  # code for 8.0 runs on 8.6
            return (
                f"CUDA device {i} has compute capability {major}.{minor}, the extension was compiled for sm "
                f"{_extension.architectures} (the GPUs of the machine that built it); run here: {BUILD_COMMAND}"
            )
    return None


def has_cuda() -> bool:
    """Whether the CUDA kernels are built, registered, and supported by every CUDA device of this machine."""
    return status() is None


@functools.cache
def runs_on_cuda() -> bool:
    """Whether JAX has CUDA devices in this process."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # unknown or absent backend
        return False


def falls_back() -> bool:
    """Whether code lowered for CUDA must do without the kernels: it would run here, where they are missing.

    False on a machine without CUDA devices, where such code can only be meant for another one. Warns, once.
    """
    if has_cuda() or not runs_on_cuda():
        return False
    _warn_once()
    return True


@functools.cache
def _warn_once() -> None:
    warnings.warn(f"jaxq runs without its CUDA kernels, slowly: {status()}", RuntimeWarning, stacklevel=2)
