"""What the public operations refuse, and with which words: the operation, what was found, the rule, the remedy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxq import _ffi
from jaxq.qtensor import QTensor

FLOATS = ("bfloat16", "float16", "float32")


def check_weight(op: str, w: QTensor) -> None:
    """One weight, in a packed order that this library reads."""
    if not isinstance(w, QTensor):
        raise TypeError(f"{op}: w is a {type(w).__name__}, must be a QTensor; see jaxq.quantize_tensor")
    w.check()
    if w.packed.ndim != 3:
        raise ValueError(
            f"{op}: w has leading axes {w.packed.shape[:-3]}; scan or vmap over them (jax.lax.scan, jax.vmap)"
        )


def check_dtype(op: str, name: str, a: jax.Array, legal: tuple[str, ...]) -> None:
    """An array's dtype is one of the names."""
    if str(a.dtype) not in legal:
        raise TypeError(f"{op}: {name} has dtype {a.dtype}, must be {_one_of(legal)}; cast it")


def check_out_dtype(op: str, name: str, dtype: DTypeLike, legal: tuple[str, ...]) -> str:
    """The name of a dtype that was asked for, one of the legal ones."""
    found = jnp.dtype(dtype).name
    if found not in legal:
        raise TypeError(f"{op}: {name}={found} must be {_one_of(legal)}")
    return found


def _one_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def check_x_scale(
    op: str, x_scale: ArrayLike | None, x_is_int8: bool, out_dtype: str, lead: tuple[int, ...]
) -> jax.Array:
    """The scale of each token, float32 ``(..., 1)``."""
    if not x_is_int8:
        raise ValueError(f"{op}: x_scale goes with an int8 x only; a floating x is quantized inside, leave x_scale out")
    if x_scale is None:
        if out_dtype == "int32":
            return jnp.ones((*lead, 1), jnp.float32)  # plain sums have no scale
        raise ValueError(f"{op}: x is int8, so x_scale is needed: float32 {(*lead, 1)}, the scale of each token")
    x_scale = jnp.asarray(x_scale)
    check_dtype(op, "x_scale", x_scale, ("float32",))
    if x_scale.shape not in (lead, (*lead, 1)):
        raise ValueError(f"{op}: x_scale has shape {x_scale.shape}, must be {(*lead, 1)} or {lead}, one scale a token")
    return x_scale.reshape(*lead, 1)


def check_sums(op: str, w: QTensor) -> None:
    """Integer sums over k must fit int32 for any codes, -128 included."""
    is_wide = w.subscales is not None or (w.zeros is not None and w.bits == 8)
    largest = (2**31 - 1) // (128 * (255 if is_wide else 128))
    if w.shape[0] > largest:
        raise ValueError(
            f"{op}: k={w.shape[0]} must be at most {largest}, so that sums of int8 products fit int32; split the "
            "weight along k and add the results"
        )


def check_raw_sums(op: str, w: QTensor, x_is_int8: bool, bias: ArrayLike | None, relu: bool) -> None:
    """What out_dtype=int32 goes with."""
    if not x_is_int8:
        raise TypeError(f"{op}: out_dtype=int32 (plain sums) needs an int8 x; see quantize_per_token")
    if w.scales.shape[0] > 1 or w.zeros is not None:
        raise ValueError(
            f"{op}: out_dtype=int32 (plain sums) needs one scale per channel and no zeros; w has "
            f"group_size={w.group_size}, zeros={'None' if w.zeros is None else w.zeros.dtype}"
        )
    if bias is not None or relu:
        raise ValueError(f"{op}: out_dtype=int32 (plain sums) takes neither bias nor relu; apply them after the scales")


def check_out_scale(op: str, out_scale: ArrayLike | None, out_dtype: str) -> jax.Array:
    """The step of an int8 result, float32 ``(1,)``."""
    if out_dtype != "int8":
        raise ValueError(f"{op}: out_scale goes with out_dtype=int8 only; found out_dtype={out_dtype}")
    if out_scale is None:
        raise ValueError(f"{op}: out_dtype=int8 needs out_scale, the step of the result: a positive scalar")
    if isinstance(out_scale, int | float):
        if not 0 < out_scale < math.inf:
            raise ValueError(f"{op}: out_scale={out_scale} must be positive and finite")
        out_scale = np.float32(out_scale)
    out_scale = jnp.asarray(out_scale)
    check_dtype(op, "out_scale", out_scale, ("float32",))
    if out_scale.size != 1:
        raise ValueError(f"{op}: out_scale has shape {out_scale.shape}, must be one scalar for the whole result")
    return out_scale.reshape(1)


def forces_reference(op: str, implementation: str | None) -> bool:
    """Whether an ``implementation`` is "reference"; refuses "cuda" where the kernels do not run."""
    if implementation not in (None, "cuda", "reference"):
        raise ValueError(f"{op}: implementation={implementation!r} must be None, 'cuda' or 'reference'")
    if implementation == "cuda":
        reason = _ffi.status()
        if reason is None and jax.default_backend() != "gpu":
            reason = f"JAX's default backend here is {jax.default_backend()!r}"
        if reason is not None:
            raise RuntimeError(f"{op}: implementation='cuda' cannot run: {reason}; or leave implementation=None")
    return implementation == "reference"
