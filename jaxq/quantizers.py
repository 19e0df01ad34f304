"""Floats to codes and scales, by rounding to nearest: weights ahead of time, activations per token.

Everything here is plain jnp and data-free. `qtensor.py` says what the codes mean, `packing.py` where they stand.

A scale is always a normal number. Where it would not be (a channel or group of zeros or denormals) it is 1 and every
code stands for zero, so that it dequantizes to exact zeros, with or without flushing of denormals.

NOTE: XLA turns a division by a constant or by a broadcast into a multiplication by the reciprocal, which rounds once
more. So reciprocals are written out below, and results do not depend on what a compiler makes of a division.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxq.qtensor import QTensor, Scheme, check_group_size, find_scheme

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def quantize_tensor(
    w: jax.Array | np.ndarray,
    scheme: str,
    *,
    group_size: int | str | None = "default",
    exact_scales: bool = False,
    name: str = "w",
) -> QTensor:
    """Quantizes a weight by rounding each value to the nearest code of its channel or group.

    ================  ================================================================  ===========================
    scheme            code of a value                                                   scales
    ================  ================================================================  ===========================
    W4A16             ``round(w / scale)``, ``scale = absmax / 7``                      bfloat16
    W4A16_ASYM        ``round(w / scale) + zero``, ``scale = (max - min) / 15``         bfloat16
    W8A16, W8A8       ``round(w / scale)``, ``scale = absmax / 127``                    float32; of groups bfloat16
    W4A8 per channel  as W4A16                                                          float32
    W4A8 in groups    two-level: a group's integer step on the channel's int8 grid      float32, subscales
    ... exact scales  as W4A16_ASYM                                                     bfloat16
    ================  ================================================================  ===========================

    Rounding is to nearest, ties to even, with the scale as stored. Zero is a code of every grid: pruned weights stay
    zero. Runs eagerly, under ``jax.jit`` and under ``jax.eval_shape``; only eager values are checked.

    Args:
      w: ``(k, n)``, or ``(..., k, n)`` with leading axes (layers); float32, bfloat16 or float16.
      scheme: a name of ``SCHEMES``.
      group_size: rows of k that share a scale, 1 to k; the last group may be short. None (or -1) for one scale per
        channel. "default" is the scheme's own, or k where that is smaller.
      exact_scales: W4A8 in groups only: a bfloat16 scale and a uint8 zero point per group in place of the two-level
        integer steps. More faithful, but slower to multiply by.
      name: what error messages call the weight, such as its layer.

    Returns:
      A ``QTensor`` of logical shape ``(k, n)`` whose arrays carry the leading axes.

    Raises:
      TypeError: ``w`` is not float32, bfloat16 or float16.
      ValueError: NaN, infinity or a magnitude of 2**126 and more in ``w``; fewer than two axes or none of some axis; an
        unknown scheme; ``group_size`` outside 1..k; ``exact_scales`` without groups or with another scheme than W4A8.
    """
    facts = find_scheme(scheme)
    if w.dtype not in _FLOATS:
        raise TypeError(f"{name}: dtype {w.dtype} must be float32, bfloat16 or float16; cast the weight")
    if w.ndim < 2 or 0 in w.shape:
        raise ValueError(f"{name}: shape {w.shape} must be (..., k, n) with no empty axis")
    if exact_scales and scheme != "W4A8":
        raise ValueError(f"{name}: exact_scales=True is a choice of scheme='W4A8' only; found {scheme=}")
    k = w.shape[-2]
    if group_size == "default":
        group_size = facts.group_size and min(facts.group_size, k)
    group_size = check_group_size(group_size)
    if group_size is not None and group_size > k:
        raise ValueError(f"{name}: group_size={group_size} must be 1 to k={k} (or None for one scale per channel)")
    if exact_scales and group_size is None:
        raise ValueError(f"{name}: exact_scales=True needs a group_size; one scale per channel is exact already")
    if isinstance(w, jax.core.Tracer):
        return _quantize(w, scheme, group_size, exact_scales)
    w = jnp.asarray(w)
    if not _all_legal(w):
        at = tuple(int(i) for i in np.argwhere(~np.asarray(_is_legal(w)))[0])
        raise ValueError(
            f"{name}: value {w[at]} at {at} must be finite and below 2**126; repair the weight or leave it float"
        )
    layers_are_split = w.sharding.shard_shape(w.shape)[:-2] != w.shape[:-2]
    return _quantize(w, scheme, group_size, exact_scales, at_once=layers_are_split)


def per_token(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes each row of activations to int8 with one scale: ``x ~ q * scale``.

    In float32, every operation rounded to nearest: ``scale = absmax / 127``, ``q = round(x * (127 / absmax))``, ties to
    even. A row of magnitudes below 2**-117 gets scale 1 and codes 0: denormals, which some platforms flush, then decide
    nothing. A row with NaN or infinity gets scale NaN and codes 0, so that all its products are NaN and no other row is
    touched.

    Args:
      x: ``(..., k)``, float32, bfloat16 or float16.

    Returns:
      ``q`` int8 ``(..., k)``, -127 to 127, and ``scale`` float32 ``(..., 1)``.
    """
    x = x.astype(jnp.float32)
    # XLA's maximum of floats may drop NaN. Bit patterns order as magnitudes do, and NaN stands above them all.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    absmax = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), jnp.float32)
    is_zero, is_finite = absmax < 2.0**-117, jnp.isfinite(absmax)
    # |x| * (127 / absmax) is at most 127 and two roundings, which round() removes: no clip is needed.
    q = jnp.where(is_finite & ~is_zero, jnp.rint(x * (127 / absmax)), 0).astype(jnp.int8)
    scale = absmax / jax.lax.optimization_barrier(jnp.full_like(absmax, 127))  # see NOTE: this one is a true division
    return q, jnp.where(is_finite, jnp.where(is_zero, 1, scale), jnp.nan)


def _is_legal(w: jax.Array) -> jax.Array:
    return jnp.abs(w.astype(jnp.float32)) < 2.0**126  # False for NaN


@jax.jit
def _all_legal(w: jax.Array) -> jax.Array:
    return _is_legal(w).all()


@functools.partial(jax.jit, static_argnames=("scheme", "group_size", "exact_scales", "at_once"))
def _quantize(w: jax.Array, scheme: str, group_size: int | None, exact_scales: bool, at_once: bool = False) -> QTensor:
    """One layer after the other, so that one alone has temporaries; ``at_once`` where devices hold different layers."""
    if w.ndim > 2:
        layer = functools.partial(
            _quantize, scheme=scheme, group_size=group_size, exact_scales=exact_scales, at_once=at_once
        )
        return jax.vmap(layer)(w) if at_once else jax.lax.map(layer, w)
    k, n = w.shape
    facts = find_scheme(scheme)
    groups = _split_groups(w.astype(jnp.float32), group_size)
    if facts.asymmetric or exact_scales:
        parts = _asymmetric(groups)
    elif scheme == "W4A8" and group_size is not None:
        parts = _two_level(groups)
    else:
        parts = _symmetric(groups, facts, scale_dtype=_scale_dtype(scheme, group_size))
    codes = parts.pop("codes").reshape(-1, n)[:k]
    return QTensor.from_codes(codes, scheme=scheme, group_size=group_size, **parts)


def _symmetric(groups: jax.Array, facts: Scheme, scale_dtype: jnp.dtype) -> dict[str, jax.Array]:
    """Zero in the middle: codes -7..7 or -127..127 (the code -8 or -128 stays unused)."""
    top = 2 ** (facts.bits - 1) - 1
    scales = _normal_or_one(jnp.max(jnp.abs(groups), axis=1) * (1 / top)).astype(scale_dtype)
    codes = jnp.rint(groups * (1 / scales.astype(jnp.float32))[:, None])
    return dict(codes=jnp.clip(codes, -top, top).astype(jnp.int8), scales=scales)  # a rounded scale may be too small


def _asymmetric(groups: jax.Array) -> dict[str, jax.Array]:
    """Integer zero point: codes 0..15 from the least to the greatest value, zero included."""
    least, greatest = _range_with_zero(groups)
    scales = _normal_or_one((greatest - least) * (1 / 15)).astype(jnp.bfloat16)
    reciprocal = 1 / scales.astype(jnp.float32)
    zeros = jnp.clip(jnp.rint(-least * reciprocal), 0, 15)
    codes = jnp.clip(jnp.rint(groups * reciprocal[:, None]) + zeros[:, None], 0, 15)
    return dict(codes=codes.astype(jnp.uint8), scales=scales, zeros=zeros.astype(jnp.uint8))


def _two_level(groups: jax.Array) -> dict[str, jax.Array]:
    """Groups that are integers on the channel's int8 grid: ``w = scale * (u * s + b - 128)``, ``b + 15 * s <= 255``.

    The channel's scale is the least that lets its widest group span 15 steps of s = 16 and its extremes be int8. With
    b = 128 - zero * s, zero is a code; the bounds on zero are the invariant: zero * s <= 128, (15 - zero) * s <= 127.
    """
    least, greatest = _range_with_zero(groups)
    scale = jnp.maximum((greatest - least) * (1 / 240), jnp.maximum(-least * (1 / 128), greatest * (1 / 127)))
    scale = _normal_or_one(jnp.max(scale, axis=0, keepdims=True))  # (1, n)

    span = (greatest - least) * (1 / scale)
    # Rounding the step down clips at most 7.5 units of the scale, and a search does no better. In a narrow group that
    # would be many steps, hence the second bound: never more than one.
    step = jnp.maximum(jnp.rint(span * (1 / 15)), jnp.ceil(span * (1 / 16)))
    s = jnp.clip(step.astype(jnp.int32), 1, 16)
    reciprocal = 1 / (scale * s.astype(jnp.float32))
    zero = jnp.rint(-least * reciprocal).astype(jnp.int32)
    zero = jnp.clip(zero, jnp.maximum(15 - 127 // s, 0), jnp.minimum(128 // s, 15))
    codes = jnp.clip(jnp.rint(groups * reciprocal[:, None]) + zero[:, None].astype(jnp.float32), 0, 15)
    subscales = jnp.stack((s, 128 - zero * s), axis=-1)
    return dict(codes=codes.astype(jnp.uint8), scales=scale, subscales=subscales.astype(jnp.uint8))


def _split_groups(w: jax.Array, group_size: int | None) -> jax.Array:
    """``(k, n)`` to ``(groups, rows, n)``. Zeros fill the last group: they change no absmax and no range with zero."""
    k, n = w.shape
    rows = group_size or k
    return jnp.pad(w, [(0, -k % rows), (0, 0)]).reshape(-1, rows, n)


def _range_with_zero(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest value of each group and of 0: ``(groups, n)`` both."""
    return jnp.min(groups, axis=1, initial=0), jnp.max(groups, axis=1, initial=0)


def _scale_dtype(scheme: str, group_size: int | None) -> jnp.dtype:
    return jnp.float32 if group_size is None and scheme != "W4A16" else jnp.bfloat16


def _normal_or_one(scale: jax.Array) -> jax.Array:
    return jnp.where(scale >= np.finfo(np.float32).tiny, scale, 1)
