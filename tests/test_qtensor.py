"""What a QTensor means: its codes, its floats, its shape; as a pytree; and what it refuses."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxq.qtensor import LAYOUT, SCHEMES, QTensor
from jaxq.quantizers import quantize_tensor

SHAPES = [(1, 1), (1, 70), (70, 1), (64, 64), (65, 63), (96, 40), (130, 129), (576, 192)]
GROUPED = [(1, 5, 1), (70, 3, 7), (96, 70, 32), (100, 65, 33), (130, 64, 48), (200, 1, 100), (576, 192, 64)]
FORMS = [(scheme, form) for scheme in ("W4A16", "W4A8", "W8A16") for form in ("symmetric", "zero points", "offsets")]


def random_weight(scheme, k, n, group_size, form="symmetric", scale_dtype=np.float32, seed=0):
    """Keyword arguments of ``from_codes``, as numpy arrays."""
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-k // group_size)
    top = 2 ** SCHEMES[scheme].bits
    parts = dict(codes=rng.integers(0, top, (k, n)).astype(np.uint8), scheme=scheme, group_size=group_size)
    parts["scales"] = rng.uniform(0.5, 2, (1 if form == "two-level" else groups, n)).astype(scale_dtype)
    if form == "zero points":
        parts["zeros"] = rng.integers(0, top, (groups, n)).astype(np.uint8)
    if form == "offsets":
        parts["zeros"] = rng.standard_normal((groups, n)).astype(scale_dtype)
    if form == "two-level":
        s = rng.integers(1, 17, (groups, n))
        b = rng.integers(0, 256 - 15 * s)
        parts["subscales"] = np.stack([s, b], -1).astype(np.uint8)
    return parts


def build(parts):
    arrays = {key: jnp.asarray(a) for key, a in parts.items() if isinstance(a, np.ndarray)}
    facts = {key: fact for key, fact in parts.items() if key not in arrays}
    return jax.jit(lambda arrays: QTensor.from_codes(**arrays, **facts))(arrays)


@jax.jit
def codes_and_weight(weight):
    return weight.codes(), weight.dequantize()


def float64_weight(parts):
    """The class docstring's formulas, row by row in float64."""
    codes = parts["codes"].astype(np.float64)
    k, n = codes.shape
    w = np.empty((k, n))
    for row in range(k):
        group = 0 if parts["group_size"] is None else row // parts["group_size"]
        scale = parts["scales"][0 if "subscales" in parts else group].astype(np.float64)
        zeros = parts.get("zeros")
        if "subscales" in parts:
            s, b = parts["subscales"][group].astype(np.float64).T
            value = scale * (codes[row] * s + b - 128)
        elif zeros is None:
            value = scale * (codes[row] - 2 ** (SCHEMES[parts["scheme"]].bits - 1))
        elif zeros.dtype == np.uint8:
            value = scale * (codes[row] - zeros[group].astype(np.float64))
        else:
            value = scale * codes[row] + zeros[group].astype(np.float64)
        w[row if parts.get("perm") is None else parts["perm"][row]] = value
    return w


def check_codes_and_weight(parts):
    weight = build(parts)
    codes, got = map(np.asarray, codes_and_weight(weight))
    np.testing.assert_array_equal(codes, parts["codes"])
    want = float64_weight(parts)
    if "zeros" in parts and parts["zeros"].dtype != np.uint8:  # product and sum round; a fused pair rounds once
        codes_bound = np.abs(want) + 2 * np.abs(parts["zeros"]).max() + 1
        assert (np.abs(got - want) <= 2**-23 * codes_bound).all()
    else:  # scale times a small integer is exact in float64, so one rounding decides
        np.testing.assert_array_equal(got, want.astype(np.float32))
    return weight


@pytest.mark.parametrize("k,n", SHAPES)
@pytest.mark.parametrize("scheme", ["W4A16", "W4A8", "W8A16", "W8A8"])
def test_codes_and_weight_per_channel(scheme, k, n):
    parts = random_weight(scheme, k, n, None)
    weight = check_codes_and_weight(parts)
    assert weight.shape == weight.global_shape == (k, n)
    assert weight.padded_shape == (-(-k // 64) * 64, -(-n // 64) * 64)


@pytest.mark.parametrize("k,n,group_size", GROUPED)
@pytest.mark.parametrize("scheme,form", [("W4A16", "zero points"), ("W4A8", "two-level")])
def test_codes_and_weight_in_groups(scheme, form, k, n, group_size):
    check_codes_and_weight(random_weight(scheme, k, n, group_size, form))


@pytest.mark.parametrize("group_size", [32, 33])
@pytest.mark.parametrize("scheme,form", FORMS)
def test_codes_and_weight_in_every_form(scheme, form, group_size):
    check_codes_and_weight(random_weight(scheme, 100, 65, group_size, form))


@pytest.mark.parametrize("scale_dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", ["symmetric", "offsets"])
def test_16_bit_scales(scale_dtype, form):
    check_codes_and_weight(random_weight("W4A16", 70, 33, 32, form, scale_dtype))


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_signed_and_unsigned_codes_are_one_weight(scheme):
    parts = random_weight(scheme, 70, 9, None)
    half = 2 ** (SCHEMES[scheme].bits - 1)
    signed = parts | dict(codes=(parts["codes"].astype(np.int32) - half).astype(np.int8))
    np.testing.assert_array_equal(build(signed).packed, build(parts).packed)


def test_perm_names_the_logical_row_of_each_packed_row():
    parts = random_weight("W4A16", 70, 9, 32, "zero points")
    parts["perm"] = np.random.default_rng(5).permutation(70).astype(np.int32)
    check_codes_and_weight(parts)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantize_rounds_once(dtype):
    parts = random_weight("W4A16", 65, 3, 32)
    want = float64_weight(parts).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(build(parts).dequantize(dtype), want)


def test_groups_cover_the_padding_of_k():
    """Kernels read the scales of every 32 rows of a packed weight, also of rows that only fill a block."""
    weight = build(random_weight("W4A8", 96, 3, 32, "two-level"))
    assert weight.padded_shape[0] == 128
    assert weight.subscales.shape == (4, 64, 2)
    assert weight.scales.shape == (1, 64)
    s, b = np.asarray(weight.subscales[3:]).astype(np.int32).reshape(-1, 2).T
    assert (b + 15 * s <= 255).all()
    assert build(random_weight("W4A16", 80, 3, 80, "zero points")).zeros.shape == (2, 64)


def test_a_shard_knows_its_shape_and_its_weight():
    parts = random_weight("W4A8", 4 * 48, 128, 48, "two-level")
    weight = build(parts)
    shard = dataclasses.replace(
        weight,
        packed=weight.packed[1:, 2:],
        scales=weight.scales[:, 64:],
        subscales=weight.subscales[2:, 64:],
    )
    assert shard.shape == (96, 64)
    assert shard.global_shape == (192, 128)
    np.testing.assert_array_equal(shard.codes(), parts["codes"][96:, 64:])
    np.testing.assert_array_equal(shard.dequantize(), weight.dequantize()[96:, 64:])


def test_leading_axes():
    layers = [build(random_weight("W4A16", 70, 9, 32, "zero points", seed=seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    assert stacked.shape == (70, 9)
    np.testing.assert_array_equal(stacked.codes(), jnp.stack([layer.codes() for layer in layers]))
    want = jnp.stack([layer.dequantize() for layer in layers])
    np.testing.assert_array_equal(stacked.dequantize(), want)
    _, scanned = jax.lax.scan(lambda carry, layer: (carry, layer.dequantize()), None, stacked)
    np.testing.assert_array_equal(scanned, want)


def test_is_a_pytree_of_its_arrays():
    weight = build(random_weight("W4A8", 70, 9, 32, "two-level"))
    assert len(jax.tree.leaves(weight)) == 3
    same = jax.jit(lambda w: w)(weight)
    assert jax.tree.structure(same) == jax.tree.structure(weight)
    np.testing.assert_array_equal(jax.jit(QTensor.dequantize)(weight), weight.dequantize())
    spec = jax.eval_shape(lambda w: w, weight)
    assert (spec.shape, spec.nbytes, spec.group_size) == (weight.shape, weight.nbytes, 32)


def test_pickles():
    weight = build(random_weight("W4A16", 70, 9, 32, "zero points"))
    back = pickle.loads(pickle.dumps(weight))
    assert jax.tree.structure(back) == jax.tree.structure(weight)
    np.testing.assert_array_equal(back.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    "scheme,exact_scales,bits",
    [
        ("W4A16", False, 4 + 16 / 128),
        ("W4A16_ASYM", False, 4 + (16 + 8) / 128),
        ("W4A8", False, 4 + 16 / 128 + 32 / 4096),  # two-level
        ("W4A8", True, 4 + (16 + 8) / 128),
    ],
)
def test_int4_in_groups_of_128_takes_at_most_4_3_bits_a_weight(scheme, exact_scales, bits):
    spec = jax.eval_shape(
        lambda w: quantize_tensor(w, scheme, group_size=128, exact_scales=exact_scales),
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
    )
    assert 8 * spec.nbytes / 4096**2 == bits <= 4.3


def test_nbytes_of_arrays():
    weight = build(random_weight("W8A8", 64, 64, None))
    assert weight.nbytes == 64 * 64 + 64 * 4


def test_refuses_another_layout_version():
    weight = dataclasses.replace(build(random_weight("W4A16", 64, 64, None)), layout=LAYOUT + 1)
    for read in (QTensor.codes, QTensor.dequantize):
        with pytest.raises(ValueError, match=f"layout version {LAYOUT + 1} is not the {LAYOUT}"):
            read(weight)


@pytest.mark.parametrize(
    "scheme,form,change,error,match",
    [
        ("W4A16", "symmetric", dict(scheme="W3A16"), ValueError, "'W3A16' is unknown.*W4A16, W4A16_ASYM"),
        ("W4A16", "symmetric", dict(codes=np.zeros(70, np.uint8)), ValueError, r"codes: shape \(70,\)"),
        ("W4A16", "symmetric", dict(codes=np.zeros((0, 9), np.uint8)), ValueError, r"codes: shape \(0, 9\)"),
        ("W4A16", "symmetric", dict(codes=np.zeros((70, 9), np.int32)), TypeError, "codes: dtype int32"),
        ("W4A16", "symmetric", dict(scales=np.ones((3, 9), np.int8)), TypeError, "scales: dtype int8"),
        ("W4A16", "symmetric", dict(scales=np.ones((2, 9), np.float32)), ValueError, r"scales.*\(2, 9\).*\(3, 9\)"),
        ("W4A16", "symmetric", dict(zeros=np.zeros((3, 9), np.int8)), TypeError, "zeros: dtype int8"),
        ("W4A16", "symmetric", dict(zeros=np.zeros((3, 8), np.uint8)), ValueError, r"zeros.*\(3, 8\).*\(3, 9\)"),
        ("W4A16", "symmetric", dict(perm=np.arange(69, dtype=np.int32)), ValueError, r"perm.*\(69,\).*\(70,\)"),
        ("W4A16", "symmetric", dict(perm=np.ones(70, np.float32)), TypeError, "perm: dtype float32"),
        ("W4A16", "symmetric", dict(group_size=0), ValueError, "group_size=0 must be a positive int"),
        ("W4A16", "symmetric", dict(group_size=-2), ValueError, "group_size=-2 must be a positive int"),
        ("W4A16", "symmetric", dict(group_size=True), ValueError, "group_size=True must be a positive int"),
        ("W4A16", "symmetric", dict(group_size=32.0), ValueError, "group_size=32.0 must be a positive int"),
        ("W4A8", "two-level", dict(scheme="W4A16"), ValueError, "subscales: need scheme='W4A8'.*'W4A16'"),
        ("W4A8", "two-level", dict(group_size=None), ValueError, "subscales: need.*group_size=None"),
        ("W4A8", "two-level", dict(zeros=np.zeros((3, 9), np.uint8)), ValueError, "subscales: need.*zeros=uint8"),
        ("W4A8", "two-level", dict(scales=np.ones((1, 9), np.float16)), TypeError, "subscales.*uint8 and float16"),
        ("W4A8", "two-level", dict(subscales=np.ones((3, 9, 2), np.int8)), TypeError, "subscales.*int8 and float32"),
        ("W4A8", "two-level", dict(subscales=np.ones((3, 9, 1), np.uint8)), ValueError, r"\(3, 9, 1\).*\(3, 9, 2\)"),
        ("W4A8", "two-level", dict(scales=np.ones((3, 9), np.float32)), ValueError, r"scales.*\(3, 9\).*\(1, 9\)"),
    ],
)
def test_from_codes_refuses(scheme, form, change, error, match):
    parts = random_weight(scheme, 70, 9, 32, form)
    build(parts)  # legal before the change
    with pytest.raises(error, match=match):
        build(parts | change)


def test_minus_one_is_per_channel():
    assert build(random_weight("W4A16", 70, 9, None) | dict(group_size=-1)).group_size is None
