"""The operations on flattened, padded operands, and their reverse-mode derivatives in plain jnp.

Activations, scales, floating zeros and bias have cotangents; integer arrays have none. Rounding activations to int8 is
passed straight through.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxq import primitive, reference
from jaxq.qtensor import SCHEMES
from jaxq.quantizers import per_token

Operands = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about an operation on a weight; see ``primitive.py``."""

    scheme: str
    n: int
    group: int
    out_dtype: str
    relu: bool = False
    force_reference: bool = False

    def of_weight(self, out_dtype: Any) -> dict[str, Any]:
        """Static parameters of the weight's dequantization."""
        facts = SCHEMES[self.scheme]
        return dict(bits=facts.bits, act_bits=facts.act_bits, n=self.n, group=self.group, out_dtype=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gemm(call: Call, operands: Operands) -> jax.Array:
    """The product ``(m, n)`` of the operands that ``partitioning.py`` names."""
    facts = SCHEMES[call.scheme]
    x = operands["x"]
    if facts.act_bits == 16 and x.dtype == jnp.float32:
        operands = operands | {"x": x.astype(jnp.bfloat16)}  # in here, so that its gradient is float32
    (y,) = primitive.GEMMS[facts.bits, facts.act_bits](
        operands,
        n=call.n,
        group=call.group,
        out_dtype=call.out_dtype,
        relu=call.relu,
        config=-1,
        force_reference=call.force_reference,
    )
    return y


def _gemm_fwd(call: Call, operands: Operands) -> tuple[jax.Array, Any]:
    y = gemm(call, operands)
    return y, (operands, y if call.relu else None)


def _gemm_bwd(call: Call, residuals: Any, dy: jax.Array) -> tuple[Any]:
    operands, y = residuals
    if dy.dtype == jax.dtypes.float0:  # of an integer result
        return (dict.fromkeys(operands),)
    pullback = functools.partial(_pullback, call)
    return (_float_cotangents(pullback, operands, y, dy),)


def _pullback(call: Call, operands: Operands, y: jax.Array | None, dy: jax.Array) -> Operands:
    """Cotangents of the floating operands; those that nobody wants are dead code under ``jax.jit``."""
    if y is not None:
        dy = jnp.where(y > 0, dy, jnp.zeros_like(dy))
    x, dy32 = operands["x"], dy.astype(jnp.float32)
    # A 16-bit cotangent meets a weight rounded to its own dtype: tensor cores, and half the memory.
    w = reference.dequantize(operands, **call.of_weight(dy.dtype))
    dx = jnp.dot(dy, w.T, precision=_precision(dy), preferred_element_type=jnp.float32)
    cotangents = {}
    if x.dtype == jnp.int8:
        cotangents["x_scale"] = jnp.sum(x.astype(jnp.float32) * dx, axis=1, keepdims=True)
        x_values = x.astype(jnp.float32) * operands["x_scale"]
    else:
        cotangents["x"] = dx.astype(x.dtype)
        x_values = x.astype(jnp.float32)
        if SCHEMES[call.scheme].act_bits == 8:
            codes, x_scale = per_token(x)
            x_values = codes.astype(jnp.float32) * x_scale
    dw = jnp.dot(x_values.T, dy32, precision=jax.lax.Precision.HIGHEST)
    cotangents |= _weight_cotangents(call, operands, dw)
    if "bias" in operands:
        padding = operands["bias"].shape[0] - call.n
        cotangents["bias"] = jnp.pad(jnp.sum(dy32, axis=0), (0, padding)).astype(operands["bias"].dtype)
    return cotangents


def _weight_cotangents(call: Call, operands: Operands, dw: jax.Array) -> Operands:
    """Of scales and floating zeros, in which the weight is linear."""
    floats = {name: operands[name] for name in ("scales", "zeros") if name in operands and _is_floating(operands[name])}

    def weight(floats: Operands) -> jax.Array:
        return reference.dequantize(operands | floats, **call.of_weight(jnp.float32))

    (cotangents,) = jax.vjp(weight, floats)[1](dw)
    result: Operands = cotangents
    return result


def _float_cotangents(pullback: Any, operands: Operands, *args: Any) -> dict[str, jax.Array | None]:
    """Runs a pullback; None for the integer operands, and for ``out_scale``, which only integer results have."""
    shardings = {name: jax.typeof(a).sharding for name, a in operands.items() if _is_floating(a)}
    cotangents = primitive.without_explicit_axes(pullback, shardings)(operands, *args)
    return dict.fromkeys(operands) | cotangents


def _is_floating(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def _precision(a: jax.Array) -> jax.lax.Precision:
    """Of a product that should be as exact as its operands."""
    return jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


gemm.defvjp(_gemm_fwd, _gemm_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dequantize(call: Call, arrays: Operands) -> jax.Array:
    """The weight ``(k as packed, n)``."""
    (w,) = primitive.DEQUANTIZE(arrays, **call.of_weight(call.out_dtype), force_reference=call.force_reference)
    return w


def _dequantize_bwd(call: Call, arrays: Operands, dw: jax.Array) -> tuple[Any]:
    def pullback(arrays: Operands, dw: jax.Array) -> Operands:
        return _weight_cotangents(call, arrays, dw.astype(jnp.float32))

    return (_float_cotangents(pullback, arrays, dw),)


dequantize.defvjp(lambda call, arrays: (dequantize(call, arrays), arrays), _dequantize_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantize_per_token(force_reference: bool, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes ``(m, k)`` and scales ``(m, 1)`` of ``(m, k)``; the scales have a derivative."""
    q, scale = primitive.QUANTIZE_PER_TOKEN({"x": x}, force_reference=force_reference)
    return q, scale


def _quantize_bwd(force_reference: bool, x: jax.Array, cotangents: Any) -> tuple[jax.Array]:
    _, dscale = cotangents

    def scale(x: jax.Array) -> jax.Array:  # in a form that can be differentiated
        return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True) * (1 / 127)

    def pullback(x: jax.Array, dscale: jax.Array) -> jax.Array:
        (dx,) = jax.vjp(scale, x)[1](dscale)
        return dx

    return (primitive.without_explicit_axes(pullback, jax.typeof(x).sharding)(x, dscale),)


quantize_per_token.defvjp(lambda force_reference, x: (quantize_per_token(force_reference, x), x), _quantize_bwd)
