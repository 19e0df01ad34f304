"""Quantizers against plain numpy statements of each scheme, bit for bit; their bounds, special values and refusals."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxq.qtensor import SCHEMES
from jaxq.quantizers import per_token, quantize_tensor

F32 = np.float32
TINY = np.finfo(F32).tiny
CASES = [
    ("W4A16", "default", False),
    ("W4A16", None, False),
    ("W4A16_ASYM", 33, False),
    ("W4A16_ASYM", None, False),
    ("W8A16", None, False),
    ("W8A16", 48, False),
    ("W8A8", "default", False),
    ("W4A8", None, False),
    ("W4A8", "default", False),
    ("W4A8", 7, False),
    ("W4A8", "default", True),
    ("W4A8", 33, True),
]


def bf16(a):
    return a.astype(ml_dtypes.bfloat16).astype(F32)


def normal_or_one(scale):
    return np.where(scale >= TINY, scale, F32(1))


def oracle(w, scheme, group_size, exact_scales):
    """Codes (k, n), scales, and zeros or subscales or None, of round-to-nearest: one group at a time, in float32."""
    k, n = w.shape
    bits = SCHEMES[scheme].bits
    rows = group_size or k
    groups = [w[start : start + rows].astype(F32) for start in range(0, k, rows)]
    least = [np.minimum(group.min(axis=0), 0) for group in groups]
    greatest = [np.maximum(group.max(axis=0), 0) for group in groups]
    codes, scales, extra = [], [], []

    if scheme == "W4A16_ASYM" or exact_scales:
        for group, low, high in zip(groups, least, greatest, strict=True):
            scale = bf16(normal_or_one((high - low) * F32(1 / 15)))
            zero = np.clip(np.rint(-low * (1 / scale)), 0, 15)
            codes.append(np.clip(np.rint(group * (1 / scale)) + zero, 0, 15))
            scales.append(scale)
            extra.append(zero)
    elif scheme == "W4A8" and group_size:
        base = np.zeros(n, F32)
        for low, high in zip(least, greatest, strict=True):
            base = np.maximum.reduce([base, (high - low) * F32(1 / 240), -low * F32(1 / 128), high * F32(1 / 127)])
        scale = normal_or_one(base)
        scales.append(scale)
        for group, low, high in zip(groups, least, greatest, strict=True):
            span = (high - low) * (1 / scale)
            s = np.clip(np.maximum(np.rint(span * F32(1 / 15)), np.ceil(span * F32(1 / 16))), 1, 16).astype(F32)
            zero = np.rint(-low * (1 / (scale * s)))
            for channel in range(n):  # the zero points that the invariant allows, one by one
                legal = [z for z in range(16) if z * s[channel] <= 128 and (15 - z) * s[channel] <= 127]
                zero[channel] = min(legal, key=lambda z, at=zero[channel]: abs(z - at))
            codes.append(np.clip(np.rint(group * (1 / (scale * s))) + zero, 0, 15))
            extra.append(np.stack([s, 128 - zero * s], -1))
    else:
        top = 2 ** (bits - 1) - 1
        for group, low, high in zip(groups, least, greatest, strict=True):
            scale = normal_or_one(np.maximum(-low, high) * F32(1 / top))
            if scheme == "W4A16" or group_size:
                scale = bf16(scale)
            codes.append(np.clip(np.rint(group * (1 / scale)), -top, top) + top + 1)
            scales.append(scale)
    return np.concatenate(codes), np.stack(scales), np.stack(extra) if extra else None


def special_weight(k=100, n=40, dtype=F32):
    """Channels of every kind that has gone wrong before, then normal ones."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((k, n)).astype(F32)
    w[:, 0] = 0
    w[:, 1] = np.abs(w[:, 1])  # one-sided
    w[:, 2] = -np.abs(w[:, 2])
    w[:, 3] = 0.01
    w[:, 3][k // 2] = 100  # an outlier: every other group is narrow
    w[:, 4] *= 1e-20
    w[:, 5] *= 1e25
    w[:, 6] = 1e-39  # denormal
    w[:, 7] = 1e-44
    w[: k // 2, 8] = 0  # groups of zeros in a channel that has others
    w[::2, 9] = 0
    w[:, 10] = -3
    w[:, 11] = np.linspace(-8, 7, k)
    w[:, 12] = np.linspace(0, 1, k) ** 8  # groups of very different spans
    w[:, 13] = TINY
    return np.where(np.abs(w) < 6e4, w, 1).astype(dtype) if dtype == np.float16 else w.astype(dtype)


def true_parts(weight):
    """What `oracle` returns, read from a QTensor without its padding."""
    (k, n), size = weight.shape, weight.group_size
    groups = 1 if size is None else -(-k // size)
    extra = weight.zeros if weight.zeros is not None else weight.subscales
    scales = weight.scales[: 1 if weight.subscales is not None else groups, :n]
    return (
        np.asarray(weight.codes()),
        np.asarray(scales, F32),
        None if extra is None else np.asarray(extra)[:groups, :n],
    )


def check_against_oracle(w, scheme, group_size, exact_scales):
    weight = quantize_tensor(w, scheme, group_size=group_size, exact_scales=exact_scales)
    codes, scales, extra = oracle(w, scheme, weight.group_size, exact_scales)
    got_codes, got_scales, got_extra = true_parts(weight)
    np.testing.assert_array_equal(got_scales, scales)
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_extra, extra)
    return weight


@pytest.mark.parametrize(
    "dtype,scheme,group_size,exact_scales",
    [(F32, *case) for case in CASES]
    + [(dtype, scheme, "default", False) for dtype in (ml_dtypes.bfloat16, np.float16) for scheme in ("W4A16", "W4A8")],
)
def test_equals_the_oracle(dtype, scheme, group_size, exact_scales):
    check_against_oracle(special_weight(dtype=dtype), scheme, group_size, exact_scales)


@pytest.mark.parametrize("k,n,group_size", [(1, 1, 1), (1, 65, None), (65, 1, 64), (64, 3, 1), (10, 3, 10)])
@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W4A8"])
def test_equals_the_oracle_in_odd_shapes(scheme, k, n, group_size):
    w = np.random.default_rng(k + n).standard_normal((k, n)).astype(F32)
    weight = check_against_oracle(w, scheme, group_size, False)
    assert weight.shape == (k, n)


def test_dtypes_and_default_groups():
    w = special_weight(k=192)
    found = {name: quantize_tensor(w, name) for name in SCHEMES}
    assert [weight.group_size for weight in found.values()] == [128, 128, None, None, 64]
    assert [str(weight.scales.dtype) for weight in found.values()] == ["bfloat16"] * 2 + ["float32"] * 3
    assert found["W4A16_ASYM"].zeros.dtype == found["W4A8"].subscales.dtype == jnp.uint8
    assert quantize_tensor(w, "W8A16", group_size=64).scales.dtype == jnp.bfloat16
    exact = quantize_tensor(w, "W4A8", exact_scales=True)
    assert (exact.scales.dtype, exact.zeros.dtype, exact.subscales) == (jnp.bfloat16, jnp.uint8, None)
    assert quantize_tensor(w[:50], "W4A16").group_size == 50  # a default does not exceed k
    assert quantize_tensor(w, "W4A16", group_size=-1).group_size is None


def step_and_bound(weight):
    """Distance of neighbouring codes, and how many of it a value may be off; both (groups, n)."""
    _, scales, extra = true_parts(weight)
    if weight.subscales is not None:
        # Half a step; and where the group's span is clipped, span - 15 s <= min(s, 7.5) more (see _two_level).
        s = extra[..., 0].astype(F32)
        return scales * s, 0.5 + np.minimum(s, 7.5) / s
    if weight.zeros is not None:  # both ends of the range may round outwards; a bfloat16 scale may be 2**-8 too small
        return scales, np.full(scales.shape, 0.5 + 15 * 2**-8)
    return scales, np.full(scales.shape, 0.5)


@pytest.mark.parametrize("scheme,group_size,exact_scales", CASES)
def test_error_is_bounded_and_zero_is_kept(scheme, group_size, exact_scales):
    w = special_weight()
    w[np.abs(w) < TINY] = 0  # XLA on a CPU reads denormals as zero; so does the grid: scale 1, zero codes
    weight = quantize_tensor(w, scheme, group_size=group_size, exact_scales=exact_scales)
    step, bound = step_and_bound(weight)
    rows = np.arange(w.shape[0]) // (weight.group_size or w.shape[0])
    back = np.asarray(weight.dequantize())
    slack = 2.0**-24 * 4 * 128  # float32 roundings of w / scale, which is at most 128
    error = np.abs(back.astype(np.float64) - w)
    allowed = step[rows].astype(np.float64) * (bound[rows] + slack)
    allowed = np.where(np.abs(w) <= TINY, TINY, allowed)  # at the end of the normal numbers a row may become zeros
    assert (error <= allowed).all()
    assert (back[w == 0] == 0).all()
    assert not back[:, [0, 6, 7]].any()


def test_exact_scales_are_more_faithful_than_two_level():
    w = np.random.default_rng(4).standard_t(4, (512, 64)).astype(F32)  # heavy tails, as weights have
    two_level, exact = (quantize_tensor(w, "W4A8", group_size=64, exact_scales=e).dequantize() for e in (False, True))
    assert np.square(exact - w).sum() < np.square(two_level - w).sum()


@pytest.mark.parametrize("group_size", [1, 7, 32, 64, 100])
def test_two_level_codes_are_bytes(group_size):
    rng = np.random.default_rng(group_size)
    for w in (special_weight(), special_weight()[::-1] * -1, rng.standard_t(2, (100, 40)).astype(F32)):
        weight = quantize_tensor(w, "W4A8", group_size=group_size)
        s, b = np.moveaxis(np.asarray(weight.subscales).astype(np.int32), -1, 0)
        assert s.min() >= 1 and s.max() <= 16
        assert (b + 15 * s <= 255).all()
        scales = np.asarray(weight.scales)
        assert (scales >= TINY).all() and np.isfinite(scales).all()


def test_two_level_reaches_both_ends_of_a_byte():
    w = np.concatenate([np.linspace(-128, 127, 64), np.linspace(-120, 120, 64)]).reshape(2, 64).T.astype(F32)
    weight = quantize_tensor(w, "W4A8", group_size=64)
    s, b = np.asarray(weight.subscales)[0, :2].astype(np.int32).T
    assert s[1] == 16 and b[1] == 0  # the widest group: u from 0 to 240
    assert b[0] + 15 * s[0] <= 255
    np.testing.assert_allclose(np.asarray(weight.dequantize()).min(axis=0), [-128, -128], rtol=0.07)


def test_jit_and_eval_shape_agree_with_eager():
    w = jnp.asarray(special_weight())
    for scheme in SCHEMES:
        eager = quantize_tensor(w, scheme)
        jitted = jax.jit(lambda w, scheme=scheme: quantize_tensor(w, scheme))(w)
        spec = jax.eval_shape(lambda w, scheme=scheme: quantize_tensor(w, scheme), w)
        assert jax.tree.structure(eager) == jax.tree.structure(jitted) == jax.tree.structure(spec)
        for a, b, c in zip(*map(jax.tree.leaves, (eager, jitted, spec)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert (a.shape, a.dtype) == (c.shape, c.dtype)


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W4A8"])
def test_leading_axes_are_separate_weights(scheme):
    w = np.random.default_rng(3).standard_normal((2, 3, 70, 9)).astype(F32)
    weight = quantize_tensor(w, scheme, group_size=32)
    assert weight.shape == (70, 9)
    assert weight.packed.shape[:2] == (2, 3)
    one = jax.tree.map(lambda a: a[1, 2], weight)
    alone = quantize_tensor(w[1, 2], scheme, group_size=32)
    jax.tree.map(np.testing.assert_array_equal, one, alone)
    assert weight.dequantize().shape == w.shape


def test_layers_are_quantized_one_after_the_other():
    layer, layers = ((*lead, 256, 256) for lead in ((), (8,)))

    def temporaries(shape):
        spec = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.jit(lambda w: quantize_tensor(w, "W4A8")).lower(spec).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(layers) <= temporaries(layer) + 4 * 256 * 256  # and a slice of the stack


def test_split_layers_stay_where_they_are():
    w = np.random.default_rng(3).standard_normal((4, 128, 64)).astype(F32)
    mesh = jax.make_mesh((4,), ("layers",), axis_types=(jax.sharding.AxisType.Auto,))
    weight = quantize_tensor(jax.device_put(w, NamedSharding(mesh, P("layers"))), "W4A8")
    for array, whole in zip(*map(jax.tree.leaves, (weight, quantize_tensor(w, "W4A8"))), strict=True):
        assert array.sharding.shard_shape(array.shape)[0] == 1
        np.testing.assert_array_equal(array, whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**126])
def test_refuses_values_that_no_scale_fits(bad):
    w = np.ones((300, 77), F32)
    w[5, 1] = bad
    with pytest.raises(ValueError, match=re.escape(f"blocks.3.fc1: value {F32(bad)} at (5, 1) must be finite")):
        quantize_tensor(w, "W4A16", name="blocks.3.fc1")
    jax.jit(lambda w: quantize_tensor(w, "W4A16"))(w)  # values are not looked at under jit


@pytest.mark.parametrize(
    "shape,dtype,kwargs,error,match",
    [
        ((8, 3), F32, dict(scheme="W2A16"), ValueError, "scheme='W2A16' is unknown; use one of W4A16"),
        ((8, 3), F32, dict(group_size=9), ValueError, "layer: group_size=9 must be 1 to k=8"),
        ((8, 3), F32, dict(group_size=0), ValueError, "group_size=0 must be a positive int"),
        ((8, 3), F32, dict(group_size=4.0), ValueError, "group_size=4.0 must be a positive int"),
        ((8, 3), F32, dict(group_size="all"), ValueError, "group_size='all' must be a positive int"),
        ((8, 3), F32, dict(exact_scales=True), ValueError, "layer: exact_scales=True.*scheme='W4A16'"),
        (
            (8, 3),
            F32,
            dict(scheme="W4A8", group_size=None, exact_scales=True),
            ValueError,
            "layer: exact_scales=True needs a group_size",
        ),
        ((8,), F32, {}, ValueError, r"layer: shape \(8,\) must be \(\.\.\., k, n\)"),
        ((0, 3), F32, {}, ValueError, r"layer: shape \(0, 3\)"),
        ((8, 3), np.int32, {}, TypeError, "layer: dtype int32 must be float32"),
        ((8, 3), np.float64, {}, TypeError, "layer: dtype float64 must be float32.*cast"),
    ],
)
def test_quantize_tensor_refuses(shape, dtype, kwargs, error, match):
    with pytest.raises(error, match=match):
        quantize_tensor(np.ones(shape, dtype), **(dict(scheme="W4A16", name="layer") | kwargs))


def per_token_oracle(x):
    x = x.astype(F32)
    absmax = np.abs(x).max(axis=-1, keepdims=True)
    q, scale = np.zeros(x.shape, np.int8), np.ones(absmax.shape, F32)
    for row in np.ndindex(x.shape[:-1]):
        if not np.isfinite(absmax[row]):
            scale[row] = np.nan
        elif absmax[row] >= 2.0**-117:
            scale[row] = absmax[row] / F32(127)
            q[row] = np.clip(np.rint(x[row] * (F32(127) / absmax[row])), -127, 127)
    return q, scale


def special_tokens(dtype):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((300, 77)) * 2.0 ** rng.integers(-8, 8, (300, 1))).astype(dtype)
    x[0] = 0
    x[1] = -0.0
    x[2, 5] = np.nan
    x[3, 5] = np.inf
    x[4, 5] = -np.inf
    x[5, :] = np.arange(77) - 38.5  # ties
    x[5, 0] = 127
    x[6] = 1
    x[7] = -1
    x[8] = ml_dtypes.finfo(dtype).max
    x[9] = ml_dtypes.finfo(dtype).tiny
    x[10] = ml_dtypes.finfo(dtype).smallest_subnormal
    x[11, 1:] = 0  # one value alone
    if dtype != np.float16:
        x[12] = 2.0**-117
        x[12, 1] = 2.0**-127  # denormal, in the smallest row that has a scale
        x[13] = 2.0**-118
    return x


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16, np.float16])
def test_per_token_equals_the_oracle(dtype, jit):
    x = special_tokens(dtype)
    q, scale = (jax.jit(per_token) if jit else per_token)(jnp.asarray(x))
    want_q, want_scale = per_token_oracle(x)
    np.testing.assert_array_equal(scale, want_scale)  # NaN equals NaN here
    np.testing.assert_array_equal(q, want_q)
    assert q.dtype == jnp.int8 and scale.dtype == jnp.float32


def test_per_token_special_rows():
    x = special_tokens(F32)
    q, scale = map(np.asarray, per_token(jnp.asarray(x)))
    np.testing.assert_array_equal(scale[[0, 1, 9, 10]], 1)  # zeros, and rows too small for a scale
    assert not q[[0, 1, 2, 3, 4, 9, 10]].any()
    assert np.isnan(scale[2:5]).all() and np.isfinite(np.delete(scale, [2, 3, 4])).all()
    np.testing.assert_array_equal(q[5, 1:5], [-38, -36, -36, -34])  # -37.5, -36.5, -35.5, -34.5: ties go to even
    assert (q[6] == 127).all() and (q[7] == -127).all() and (q[8] == 127).all()


def test_per_token_error_and_leading_axes():
    x = np.random.default_rng(2).standard_normal((2, 3, 5, 33)).astype(F32)
    q, scale = map(np.asarray, per_token(jnp.asarray(x)))
    assert q.shape == x.shape and scale.shape == (2, 3, 5, 1)
    error = np.abs(q.astype(np.float64) * scale - x)
    assert (error <= scale.astype(np.float64) * (0.5 + 127 * 4 * 2.0**-24)).all()
    alone_q, alone_scale = per_token(jnp.asarray(x[1, 2]))
    np.testing.assert_array_equal(alone_q, q[1, 2])
    np.testing.assert_array_equal(alone_scale, scale[1, 2])
