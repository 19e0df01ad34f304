"""The reference against the float64 oracle, on every form of a weight; what it must get exactly, it gets exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import ops
from jaxq.qtensor import SCHEMES, QTensor

GROUPS = [
    pytest.param(None, id="per-channel"),
    pytest.param(48, id="g48-padded-to-64"),
    pytest.param(128, id="g128-with-a-tail"),
]
KINDS_AND_GROUPS = [
    pytest.param(kind, *group.values, id=f"{kind}-{group.id}")
    for kind in oracle.KINDS
    for group in GROUPS
    if not (kind == "w4a8-two-level" and group.values[0] is None)
]


def activations(rng: np.random.Generator, w: QTensor, m: int, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """Random x ``(m, k)`` of that dtype, and its scales if it is int8."""
    k = w.shape[0]
    if dtype == "int8":
        scale = jnp.asarray(rng.uniform(0.005, 0.02, (m, 1)), jnp.float32)
        return jnp.asarray(rng.integers(-127, 128, (m, k)), jnp.int8), scale
    return jnp.asarray(rng.normal(size=(m, k)), dtype), None


@pytest.mark.parametrize("kind, group_size", KINDS_AND_GROUPS)
def test_product_is_within_the_oracles_bound(rng, kind, group_size):
    w = oracle.random_weight(rng, kind, k=200, n=100, group_size=group_size)
    bias = jnp.asarray(rng.normal(size=100), jnp.float32)
    x, _ = activations(rng, w, 5, "float32")
    oracle.check(ops.matmul(x, w, bias), oracle.product(x, w, bias, out_dtype="float32"))


@pytest.mark.parametrize("kind", ["w8a8", "w8a8-zeros", "w4a8", "w4a8-two-level"])
def test_int8_activations(rng, kind):
    w = oracle.random_weight(rng, kind, k=1100, n=70, group_size=64 if kind == "w4a8-two-level" else None)
    x, x_scale = activations(rng, w, 3, "int8")
    op = ops.w8a8_matmul if w.bits == 8 else ops.w4a8_matmul
    actual = op(x, w, x_scale=x_scale, out_dtype=jnp.float32)
    oracle.check(actual, oracle.product(x, w, x_scale=x_scale, out_dtype="float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w8a8", "w4a8"])
def test_activation_dtypes(rng, kind, dtype):
    w = oracle.random_weight(rng, kind, k=130, n=65)
    x, _ = activations(rng, w, 4, dtype)
    y = ops.matmul(x, w)
    assert y.dtype == dtype
    oracle.check(y, oracle.product(x, w, out_dtype=dtype))


@pytest.mark.parametrize("kind, group_size", KINDS_AND_GROUPS[::2])
def test_one_hot_rows_select_rows_of_the_weight(rng, kind, group_size):
    w = oracle.random_weight(rng, kind, k=70, n=65, group_size=group_size)
    x = jnp.eye(70, dtype=jnp.bfloat16)
    y = ops.matmul(x, w, out_dtype=jnp.float32)
    if SCHEMES[w.scheme].act_bits == 16:
        np.testing.assert_array_equal(y, w.dequantize(jnp.float32))
    else:  # codes 127 of scale 1 / 127
        oracle.check(y, oracle.product(x, w, out_dtype="float32"))


@pytest.mark.parametrize("kind, group_size", KINDS_AND_GROUPS[1::2])
def test_dequantize_is_the_qtensors(rng, kind, group_size):
    w = oracle.random_weight(rng, kind, k=200, n=100, group_size=group_size, perm=True)
    expected = oracle.weight(w)
    actual = ops.dequantize(w, jnp.float32)
    np.testing.assert_array_less(np.abs(actual - expected.values), 2 * oracle.EPS * expected.magnitudes + 1e-30)
    np.testing.assert_array_equal(ops.dequantize(w), w.dequantize(jnp.bfloat16))


@pytest.mark.parametrize("k", [64, 1024, 1088, 5000])  # one piece of an exact sum, its limit, more than one, several
def test_plain_sums_are_exact(rng, k):
    w = oracle.random_weight(rng, "w8a8", k, n=66)
    x = jnp.asarray(rng.integers(-127, 128, (3, k)), jnp.int8)
    sums = ops.w8a8_matmul(x, w, out_dtype=jnp.int32)
    exact = np.asarray(x).astype(np.int64) @ (np.asarray(w.codes()).astype(np.int64) - 128)
    np.testing.assert_array_equal(sums, exact)


@pytest.mark.parametrize("code", [0, 255])
def test_sums_of_extreme_codes_are_exact(code):
    k = 4096
    w = QTensor.from_codes(jnp.full((k, 64), code, jnp.uint8), jnp.ones((1, 64)), scheme="W8A8")
    x = jnp.concatenate([jnp.full((1, k), v, jnp.int8) for v in (-127, 127)])
    sums = ops.w8a8_matmul(x, w, out_dtype=jnp.int32)
    np.testing.assert_array_equal(sums, np.array([[-127], [127]]) * k * (code - 128) * np.ones((1, 64), np.int64))


def test_large_integer_sums_are_rounded_after_zero_points_are_subtracted():
    """With two levels u * s + b - 128 is 1 here, though codes of 255 enter: the sum must be exactly k * 127."""
    k = 2048
    subscales = jnp.broadcast_to(jnp.array([1, 114], jnp.uint8), (k // 64, 64, 2))  # 15 * 1 + 114 - 128 = 1
    w = QTensor.from_codes(
        jnp.full((k, 64), 15, jnp.uint8), jnp.ones((1, 64)), scheme="W4A8", group_size=64, subscales=subscales
    )
    y = ops.w4a8_matmul(jnp.full((1, k), 127, jnp.int8), w, x_scale=jnp.ones((1, 1)), out_dtype=jnp.float32)
    np.testing.assert_array_equal(y, np.full((1, 64), k * 127.0))


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w8a8", "w4a8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_token_spoils_its_own_row_only(rng, kind, value):
    w = oracle.random_weight(rng, kind, k=100, n=70)
    x = jnp.asarray(rng.normal(size=(3, 100)), jnp.bfloat16)
    clean, spoiled = ops.matmul(x, w), ops.matmul(x.at[1, 7].set(value), w)
    np.testing.assert_array_equal(spoiled[::2], clean[::2])
    assert not jnp.isfinite(spoiled[1]).any()


@pytest.mark.parametrize("kind", ["w4a16", "w4a16-offsets", "w8a8", "w4a8"])
def test_a_zero_token_gives_the_bias(rng, kind):
    w = oracle.random_weight(rng, kind, k=100, n=70)
    bias = jnp.asarray(rng.normal(size=70), jnp.float32)
    y = ops.matmul(jnp.zeros((2, 100), jnp.bfloat16), w, bias, out_dtype=jnp.float32)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 70)))


def test_relu_and_int8_output(rng):
    w = oracle.random_weight(rng, "w8a8", k=100, n=70)
    bias = jnp.asarray(rng.normal(size=70), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(6, 100)), jnp.float32)
    y = ops.w8a8_matmul(x, w, bias, relu=True)
    oracle.check(y, oracle.product(x, w, bias, out_dtype="float32", relu=True))
    assert (y == 0).any() and (y > 0).any()
    q = ops.w8a8_matmul(
        x, w, bias, relu=True, out_dtype=jnp.int8, out_scale=0.125
    )  # a power of two: y / 0.125 is exact
    np.testing.assert_array_equal(q, np.clip(np.rint(np.asarray(y) / 0.125), -128, 127).astype(np.int8))
    assert q.max() == 127


def test_relu_keeps_nan(rng):
    w = oracle.random_weight(rng, "w8a8", k=100, n=70)
    assert jnp.isnan(ops.w8a8_matmul(jnp.full((1, 100), jnp.nan), w, relu=True)).all()


def test_quantize_per_token_is_the_definition(rng):
    x = rng.normal(size=(7, 130)) * 10.0 ** rng.integers(-30, 30, (7, 1))
    x[2] = 0
    x = jnp.asarray(x, jnp.float32)
    q, scale = ops.quantize_per_token(x)
    expected_q, expected_scale = oracle.per_token(x)
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_array_equal(scale, expected_scale)
