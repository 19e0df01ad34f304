"""The meaning of every op in plain jnp: what runs off CUDA, and what backward passes and the kernels' tests build on.

Operands come by name, flattened and padded as ``partitioning.py`` lists them. Codes and their sums stay exact; scales
are applied in float32; the result is rounded once. Nothing here knows about leading axes, gradients or devices.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxq import packing
from jaxq.quantizers import per_token


def gemm(
    operands: Mapping[str, jax.Array],
    *,
    bits: int,
    act_bits: int,
    n: int,
    group: int,
    out_dtype: DTypeLike,
    relu: bool,
) -> jax.Array:
    """``epilogue(x @ w)``, ``(m, n)``; a float x of 8-bit activations is quantized per token first.

    With ``out_dtype`` int32 (int8 x, one scale per channel): the plain integer sums.

    Args:
      operands: see ``partitioning.py``.
      bits: of a weight's code.
      act_bits: of an activation as it meets the code.
      n: channels of the result, without the padding.
      group: rows of a padded group, 0 for one scale per channel.
      out_dtype: of the result.
      relu: whether negative results become 0.
    """
    x, x_scale, scales = operands["x"], None, operands["scales"]
    if act_bits == 8:
        x, x_scale = (x, operands["x_scale"]) if x.dtype == jnp.int8 else per_token(x)
    if scales.shape[0] > 1 or has_offsets(operands):
        y = _dot(x, dequantize(operands, bits=bits, act_bits=act_bits, n=n, group=group, out_dtype=jnp.float32))
    else:
        steps = _steps(operands, bits, act_bits, group)[:, :n]
        y = _dot(x, steps) if act_bits == 16 else _exact_dot(x, steps, _largest_step(operands, bits))
        if jnp.dtype(out_dtype) == jnp.int32:
            return y
        y = y.astype(jnp.float32) * scales[:, :n].astype(jnp.float32)
    if x_scale is not None:
        y = y * x_scale
    return epilogue(y, operands, out_dtype=out_dtype, relu=relu)


def epilogue(y: jax.Array, operands: Mapping[str, jax.Array], *, out_dtype: DTypeLike, relu: bool) -> jax.Array:
    """From float32 products ``(m, n)`` to the result: bias, ReLU, division by ``out_scale``, one rounding."""
    if "bias" in operands:
        y = y + operands["bias"][None, : y.shape[1]].astype(jnp.float32)
    if relu:
        y = jnp.where(y < 0, 0, y)  # NaN stays
    if "out_scale" in operands:
        y = jnp.clip(jnp.rint(y / operands["out_scale"][None, :]), -128, 127)
    return y.astype(out_dtype)


def dequantize(
    operands: Mapping[str, jax.Array],
    *,
    bits: int,
    act_bits: int,
    n: int,
    group: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """The weight ``(k as packed, n)``: float32 arithmetic, one rounding. Arguments as of ``gemm``."""
    w = _steps(operands, bits, act_bits, group).astype(jnp.float32)
    w = w * _of_rows(operands["scales"].astype(jnp.float32), w.shape[0], group)
    if has_offsets(operands):
        w = w + _of_rows(operands["zeros"].astype(jnp.float32), w.shape[0], group)
    return w[:, :n].astype(out_dtype)


def has_offsets(operands: Mapping[str, jax.Array]) -> bool:
    """Whether the zeros are floating: added to the scaled codes, not subtracted from the codes."""
    return "zeros" in operands and operands["zeros"].dtype != jnp.uint8


def _steps(operands: Mapping[str, jax.Array], bits: int, act_bits: int, group: int) -> jax.Array:
    """What the scales multiply: codes less their zero points, int32 ``(k, n)`` as packed."""
    packed = operands["packed"]
    if (bits, act_bits, group) == (4, 8, 0) and "zeros" not in operands:
        packed = packed ^ 0x88  # see qtensor.signed_nibbles
    u = packing.unpack(packed, bits, act_bits).astype(jnp.int32)
    if "subscales" in operands:
        subscales = _of_rows(operands["subscales"].astype(jnp.int32), u.shape[0], group)
        return u * subscales[..., 0] + subscales[..., 1] - 128
    if "zeros" not in operands:
        return u - 2 ** (bits - 1)
    if has_offsets(operands):
        return u
    return u - _of_rows(operands["zeros"].astype(jnp.int32), u.shape[0], group)


def _largest_step(operands: Mapping[str, jax.Array], bits: int) -> int:
    if "subscales" in operands:
        return 128
    return 2**bits - 1 if "zeros" in operands else 2 ** (bits - 1)


def _of_rows(a: jax.Array, k: int, group: int) -> jax.Array:
    """Rows of groups ``(groups, n, ...)`` to rows of k; the padding of k may reach past the last group, or end in it.

    PERF: not jnp.repeat, a gather: on a CPU it doubles the time of a (1, 1536) x (1536, 1536) product of W4A16.
    """
    groups, *rest = a.shape
    if groups == 1:
        return a
    rows = jnp.broadcast_to(a[:, None], (groups, group, *rest)).reshape(-1, *rest)[:k]
    return jnp.pad(rows, [(0, k - rows.shape[0]), *[(0, 0)] * len(rest)], mode="edge")


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w``, float32 throughout."""
    return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _exact_dot(x: jax.Array, steps: jax.Array, largest: int) -> jax.Array:
    """Integer ``x @ steps``, int32: float32 products of pieces of k whose sums are exact, at most 2**24.

    NOTE: not a dot of int8, which is several times slower on a CPU.
    """
    rows = 2**24 // (128 * largest)
    pieces = [_dot(x[:, i : i + rows], steps[i : i + rows]).astype(jnp.int32) for i in range(0, x.shape[1], rows)]
    return sum(pieces[1:], start=pieces[0])
