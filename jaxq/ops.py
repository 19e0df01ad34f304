"""The public operations: leading axes, act-order, padding. ``checks.py`` refuses, ``gradients.py`` differentiates.

``y = x @ dequantize(w)``, in the arithmetic that a scheme's name promises. Every operation works eagerly and under
``jax.jit``, ``vmap``, ``scan``, ``remat`` and ``shard_map``, and with sharded arguments. Reverse-mode gradients reach
activations, scales, floating zeros and bias; integer arrays have none.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxq import checks, gradients, packing, primitive
from jaxq.checks import FLOATS
from jaxq.packing import BLOCK
from jaxq.partitioning import mesh_axes
from jaxq.qtensor import SCHEMES, QTensor

_OP_OF_SCHEME = {
    "W4A16": "w4a16_matmul",
    "W4A16_ASYM": "w4a16_matmul",
    "W8A16": "w8a16_matmul",
    "W8A8": "w8a8_matmul",
    "W4A8": "w4a8_matmul",
}


def w4a16_matmul(
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies 16-bit activations by a 4-bit weight: ``x @ dequantize(w) + bias``.

    Codes less their zero points are exact in 16 bits, products accumulate in float32, scales and bias are applied in
    float32, and the result is rounded once. A float32 x is rounded to bfloat16 first: that is what A16 means. float16
    and bfloat16 stay as they are.

    Args:
      x: ``(..., k)``, at least one axis; bfloat16, float16 or float32.
      w: logical ``(k, n)``, scheme W4A16 or W4A16_ASYM.
      bias: None or ``(n,)``, bfloat16, float16 or float32.
      out_dtype: bfloat16, float16 or float32; ``x.dtype`` if None.
      implementation: None for the CUDA kernel where there is one and plain JAX elsewhere; "cuda" or "reference" (plain
        JAX) to insist.

    Returns:
      ``(..., n)`` of ``out_dtype``.

    Raises:
      TypeError: a dtype is none of those named, or w is no QTensor.
      ValueError: ``x.shape[-1]`` differs from k, bias is not ``(n,)``, w has another scheme, another layout version or
        leading axes, or the implementation is unknown.
      RuntimeError: ``implementation="cuda"`` where the kernels do not run.
    """
    return _matmul("w4a16_matmul", x, w, bias, out_dtype=out_dtype, implementation=implementation)


def w8a16_matmul(
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies 16-bit activations by an 8-bit weight: ``x @ dequantize(w) + bias``.

    As ``w4a16_matmul`` in everything but the weight's scheme, W8A16.
    """
    return _matmul("w8a16_matmul", x, w, bias, out_dtype=out_dtype, implementation=implementation)


def w8a8_matmul(
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None = None,
    *,
    x_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    out_scale: ArrayLike | None = None,
    relu: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies 8-bit activations by an 8-bit weight: ``x_scale * (x @ codes) * scales + bias``.

    Integer products are summed exactly in int32; scales, bias and ReLU are applied in float32; the result is rounded
    once. A floating x is quantized inside, one scale a token, as by ``quantize_per_token``; gradients pass straight
    through that rounding.

    Args:
      x: ``(..., k)``, at least one axis; bfloat16, float16 or float32, or int8 codes -127 to 127.
      w: logical ``(k, n)``, scheme W8A8.
      bias: None or ``(n,)``, bfloat16, float16 or float32.
      x_scale: float32 ``(..., 1)`` or ``(...,)``, the scale of each token, with an int8 x and only then.
      out_dtype: bfloat16, float16 or float32; int8, with ``out_scale``; or int32 for the plain sums ``x @ codes`` of an
        int8 x (no scale is applied to them: ``x_scale`` may be left out; neither bias nor ReLU). If None, ``x.dtype``,
        and bfloat16 for an int8 x.
      out_scale: positive scalar, or float32 array of one element: the result is
        ``clip(round(y / out_scale), -128, 127)``.
      relu: whether negative results become 0, before ``out_scale``.
      implementation: as of ``w4a16_matmul``.

    Returns:
      ``(..., n)`` of ``out_dtype``.

    Raises:
      TypeError: a dtype is none of those named, or w is no QTensor.
      ValueError: ``x.shape[-1]`` differs from k; k is so large that sums could leave int32; ``x_scale`` or
        ``out_scale`` is missing, not wanted or of another shape; otherwise as of ``w4a16_matmul``.
      RuntimeError: as of ``w4a16_matmul``.
    """
    return _matmul(
        "w8a8_matmul",
        x,
        w,
        bias,
        x_scale=x_scale,
        out_dtype=out_dtype,
        out_scale=out_scale,
        relu=relu,
        implementation=implementation,
    )


def w4a8_matmul(
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None = None,
    *,
    x_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies 8-bit activations by a 4-bit weight: ``x_scale * (x @ dequantize(w)) + bias``.

    With one scale per channel and with two-level groups integer products are summed exactly in int32. With one scale
    per group they are scaled and summed in float32.

    Args:
      x: ``(..., k)``, at least one axis; bfloat16, float16 or float32 (quantized inside, one scale a token, as by
        ``quantize_per_token``; gradients pass straight through), or int8 codes -127 to 127.
      w: logical ``(k, n)``, scheme W4A8.
      bias: None or ``(n,)``, bfloat16, float16 or float32.
      x_scale: float32 ``(..., 1)`` or ``(...,)``, the scale of each token, with an int8 x and only then.
      out_dtype: bfloat16, float16 or float32; if None, ``x.dtype``, and bfloat16 for an int8 x.
      implementation: as of ``w4a16_matmul``.

    Returns:
      ``(..., n)`` of ``out_dtype``.

    Raises:
      TypeError, ValueError, RuntimeError: as of ``w8a8_matmul``.
    """
    return _matmul("w4a8_matmul", x, w, bias, x_scale=x_scale, out_dtype=out_dtype, implementation=implementation)


def matmul(
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies floating activations by a weight of any scheme: the op that the scheme's name stands for.

    Arguments, result and errors as of ``w4a16_matmul`` and ``w8a8_matmul``.
    """
    if not isinstance(w, QTensor):
        raise TypeError(f"matmul: w is a {type(w).__name__}, must be a QTensor; see jaxq.quantize_tensor")
    if jnp.result_type(x) == jnp.int8:
        raise TypeError(
            f"matmul: x is int8, must be floating; pass codes and their x_scale to {_OP_OF_SCHEME[w.scheme]}"
        )
    return _matmul(_OP_OF_SCHEME[w.scheme], x, w, bias, out_dtype=out_dtype, implementation=implementation)


def quantize_per_token(x: ArrayLike, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Quantizes activations to int8, one scale for each row of the last axis: ``x ~ q * scale``.

    ``scale = absmax / 127`` and ``q = round(x * (127 / absmax))``, ties to even, in float32. A row of zeros, or below
    2**-117, gets codes 0 and scale 1; one with NaN or infinity codes 0 and scale NaN, so that its products are NaN. The
    gradient is the scale's; codes have none (a floating x of ``w8a8_matmul`` has the straight-through one).

    Args:
      x: ``(..., k)``, at least one axis and k >= 1; bfloat16, float16 or float32.
      implementation: as of ``w4a16_matmul``.

    Returns:
      ``q`` int8 ``(..., k)`` and ``scale`` float32 ``(..., 1)``.

    Raises:
      TypeError: x has another dtype.
      ValueError: x is a scalar or k is 0, or the implementation is unknown.
      RuntimeError: as of ``w4a16_matmul``.
    """
    op = "quantize_per_token"
    x = jnp.asarray(x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {x.shape}, must be (..., k) with k >= 1")
    checks.check_dtype(op, "x", x, FLOATS)
    force_reference = checks.forces_reference(op, implementation)
    rows, lead = _flatten(x)
    q, scale = gradients.quantize_per_token(force_reference, rows)
    return _unflatten(q, lead), _unflatten(scale, lead)


def dequantize(w: QTensor, dtype: DTypeLike = jnp.bfloat16, *, implementation: str | None = None) -> jax.Array:
    """The weight that the codes stand for: float32 arithmetic, one rounding.

    Args:
      w: logical ``(k, n)``, of any scheme.
      dtype: bfloat16, float16 or float32.
      implementation: as of ``w4a16_matmul``.

    Returns:
      ``(k, n)`` of ``dtype``, rows in their logical order.

    Raises:
      TypeError: another dtype, or w is no QTensor.
      ValueError: w has leading axes or another layout version, or the implementation is unknown.
      RuntimeError: as of ``w4a16_matmul``.
    """
    op = "dequantize"
    checks.check_weight(op, w)
    dtype = checks.check_out_dtype(op, "dtype", dtype, FLOATS)
    k, n = w.shape
    force_reference = checks.forces_reference(op, implementation)
    call = gradients.Call(w.scheme, n, _padded_group(w), dtype, force_reference=force_reference)
    arrays = _arrays(w)
    arrays = dict(zip(arrays, primitive.same_varying(*arrays.values()), strict=True))
    rows = packing.unpad_k(gradients.dequantize(call, arrays).T, k, w.group_size).T
    return rows if w.perm is None else _permute(rows.T, jnp.argsort(w.perm)).T


def _matmul(
    op: str,
    x: ArrayLike,
    w: QTensor,
    bias: ArrayLike | None,
    *,
    x_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None,
    out_scale: ArrayLike | None = None,
    relu: bool = False,
    implementation: str | None,
) -> jax.Array:
    """Checks the arguments of ``op``, brings them into the form of a GEMM, multiplies."""
    checks.check_weight(op, w)
    if _OP_OF_SCHEME[w.scheme] != op:
        raise ValueError(f"{op}: w has scheme {w.scheme}; multiply by it with {_OP_OF_SCHEME[w.scheme]}, or matmul")
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x is a scalar, must be (..., k)")
    k, n = w.shape
    if x.shape[-1] != k:
        raise ValueError(f"{op}: x.shape[-1]={x.shape[-1]} must be the weight's k={k} (its shape is {w.shape})")
    if w.perm is not None and w.perm.shape != (k,):
        raise ValueError(f"{op}: w.perm has shape {w.perm.shape}, must be ({k},); act-order has no shards along k")
    checks.check_dtype(op, "x", x, FLOATS if SCHEMES[w.scheme].act_bits == 16 else (*FLOATS, "int8"))
    x_is_int8 = x.dtype == jnp.int8
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if x_is_int8 else x.dtype
    legal = (*FLOATS, "int8", "int32") if op == "w8a8_matmul" else FLOATS
    out_dtype = checks.check_out_dtype(op, "out_dtype", out_dtype, legal)
    force_reference = checks.forces_reference(op, implementation)

    operands = _arrays(w)
    if x_is_int8 or x_scale is not None:
        x_scale = checks.check_x_scale(op, x_scale, x_is_int8, out_dtype, x.shape[:-1])
        operands["x_scale"], _ = _flatten(x_scale)
    if SCHEMES[w.scheme].act_bits == 8:
        checks.check_sums(op, w)
    if out_dtype == "int32":
        checks.check_raw_sums(op, w, x_is_int8, bias, relu)
    if bias is not None:
        bias = jnp.asarray(bias)
        checks.check_dtype(op, "bias", bias, FLOATS)
        if bias.shape != (n,):
            raise ValueError(f"{op}: bias has shape {bias.shape}, must be (n,) = ({n},)")
        operands["bias"] = jnp.pad(bias, (0, w.padded_shape[1] - n)) if n % BLOCK else bias
    if out_scale is not None or out_dtype == "int8":
        operands["out_scale"] = checks.check_out_scale(op, out_scale, out_dtype)

    if w.perm is not None:
        x = _permute(x, w.perm)
    operands["x"], lead = _flatten(packing.pad_k(x, w.group_size))
    values = primitive.same_varying(*operands.values())
    call = gradients.Call(w.scheme, n, _padded_group(w), out_dtype, bool(relu), force_reference)
    return _unflatten(gradients.gemm(call, dict(zip(operands, values, strict=True))), lead)


def _arrays(w: QTensor) -> gradients.Operands:
    return {name: a for name in ("packed", "scales", "zeros", "subscales") if (a := getattr(w, name)) is not None}


def _padded_group(w: QTensor) -> int:
    return 0 if w.group_size is None else packing.padded_group(w.group_size)


def _permute(a: jax.Array, order: jax.Array) -> jax.Array:
    """Takes the last axis in another order."""
    sharding = jax.typeof(a).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return a.at[..., order].get(unique_indices=True, out_sharding=sharding if explicit else None)


# Leading axes


def _flatten(x: jax.Array) -> tuple[jax.Array, tuple[tuple[int, ...], PartitionSpec]]:
    """``(..., k)`` to ``(m, k)``, and what ``_unflatten`` needs: the leading axes and how they are split."""
    *lead, last = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)[: x.ndim]
    m = tuple(name for entry in lead for name in mesh_axes(entry))
    rows = _reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]), PartitionSpec(m or None, last))
    return rows, (x.shape[:-1], PartitionSpec(*lead))


def _unflatten(y: jax.Array, lead: tuple[tuple[int, ...], PartitionSpec]) -> jax.Array:
    shape, spec = lead
    last = (*jax.typeof(y).sharding.spec, None, None)[1]
    return _reshape(y, (*shape, y.shape[1]), PartitionSpec(*spec, last))


def _reshape(a: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    if a.shape == shape:
        return a
    mesh = jax.typeof(a).sharding.mesh
    return jax.lax.reshape(
        a, shape, out_sharding=NamedSharding(mesh, spec) if AxisType.Explicit in mesh.axis_types else None
    )
