"""``python -m jaxq doctor``: what a bug report needs. It never fails: what cannot be found out is printed as such."""

import argparse
import importlib.metadata
import pathlib
import platform
import re
from collections.abc import Callable, Iterable, Sequence

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")


def main(argv: Sequence[str] = ()) -> int:
    """Prints the report; returns 0."""
    argparse.ArgumentParser(prog="python -m jaxq doctor", description=__doc__).parse_args(argv)
    for title, section in _SECTIONS.items():
        print(f"{title}\n{_guarded(section)}\n")
    return 0


def _guarded(section: Callable[[], Iterable[tuple[str, str]]]) -> str:
    """A section's rows as text; the error, as one of them, that ended it."""
    rows: list[tuple[str, str]] = []
    try:
        rows.extend(section())
    except Exception as error:  # whatever is broken here is what the report must show
        rows.append(("error", f"{type(error).__name__}: {error}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {value}".rstrip() for name, value in rows)


def _versions() -> Iterable[tuple[str, str]]:
    import jaxq

    yield "jaxq", f"{jaxq.__version__} in {pathlib.Path(jaxq.__file__).parent}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "-"


def _devices() -> Iterable[tuple[str, str]]:
    import jax

    yield "default backend", jax.default_backend()
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)  # CUDA devices have one
        yield str(device), device.device_kind + (f", compute capability {capability}" if capability else "")


def _extension() -> Iterable[tuple[str, str]]:
    import jax

    from jaxq import _ffi

    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    runtime = ".".join(re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text()))
    yield "kernels", "run here" if _ffi.has_cuda() else f"do not run here: {_ffi.status()}"
    yield "XLA FFI of jaxlib", runtime
    if (built := _ffi._extension) is not None:
        yield "XLA FFI of jaxq", ".".join(map(str, built.ffi_version))
        yield "CUDA of jaxq", f"{built.cuda_version // 1000}.{built.cuda_version % 1000 // 10}"


def _operations() -> Iterable[tuple[str, str]]:
    import jax

    from jaxq import _ffi

    if jax.default_backend() != "gpu":
        way = f"reference: the default backend is {jax.default_backend()}"
    elif _ffi.has_cuda():
        way = "cuda"
    else:
        way = f"reference, slowly: {_ffi.status()}"
    for operation in _OPERATIONS:
        yield operation, way


_OPERATIONS = ("w4a16_matmul", "w8a16_matmul", "w8a8_matmul", "w4a8_matmul", "quantize_per_token", "dequantize")
_SECTIONS = {
    "versions": _versions,
    "devices": _devices,
    "extension": _extension,
    "operations": _operations,
}
