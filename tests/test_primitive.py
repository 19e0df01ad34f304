"""The primitives under JAX's transformations: jit, vmap, grad, scan, remat, x64, and pytrees of weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import ops
from jaxq.qtensor import QTensor

KINDS = ["w4a16", "w4a16-offsets", "w8a16", "w8a8", "w4a8", "w4a8-two-level"]
K, N = 96, 70


def make(rng: np.random.Generator, kind: str) -> QTensor:
    return oracle.random_weight(rng, kind, K, N, group_size=48 if "-" in kind else None)


def activations(rng: np.random.Generator, *lead: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=(*lead, K)), dtype)


def stack(*weights: QTensor) -> QTensor:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


@pytest.mark.parametrize("kind", KINDS)
def test_jit_is_eager(rng, kind):
    w, x = make(rng, kind), activations(rng, 3)
    np.testing.assert_array_equal(jax.jit(ops.matmul)(x, w), ops.matmul(x, w))


def test_the_jaxpr_names_the_primitive(rng):
    jaxpr = jax.make_jaxpr(ops.matmul)(activations(rng, 3), make(rng, "w4a8"))
    assert "jaxq_w4a8[" in str(jaxpr)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_activations_folds_into_m(rng, kind, axis):
    w, x = make(rng, kind), activations(rng, 4, 5)
    mapped = jax.vmap(ops.matmul, (axis, None), axis)
    np.testing.assert_array_equal(mapped(x, w), ops.matmul(x, w))
    jaxpr = str(jax.make_jaxpr(mapped)(x, w))
    assert jaxpr.count("jaxq_w") == 1 and "scan" not in jaxpr
    assert "[20,96]" in jaxpr or "[20,128]" in jaxpr  # all rows, one after another


def test_vmap_over_x_scale_alone_repeats_x(rng):
    w = make(rng, "w8a8")
    x, x_scale = jnp.ones((3, K), jnp.int8), jnp.asarray(rng.uniform(size=(4, 3)), jnp.float32)
    y = jax.vmap(lambda s: ops.w8a8_matmul(x, w, x_scale=s))(x_scale)
    np.testing.assert_array_equal(y, jnp.stack([ops.w8a8_matmul(x, w, x_scale=s) for s in x_scale]))


@pytest.mark.parametrize("kind", ["w4a16-offsets", "w4a8-two-level"])
@pytest.mark.parametrize("x_axis", [None, 0])
def test_vmap_over_weights(rng, kind, x_axis):
    weights, x = [make(rng, kind) for _ in range(3)], activations(rng, 3, 5)
    x = x if x_axis == 0 else x[0]
    y = jax.jit(jax.vmap(ops.matmul, (x_axis, 0)))(x, stack(*weights))
    rows = x if x_axis == 0 else [x] * 3
    np.testing.assert_array_equal(y, jnp.stack([ops.matmul(row, w) for row, w in zip(rows, weights, strict=True)]))


def test_vmap_over_bias(rng):
    w, x, bias = make(rng, "w4a16"), activations(rng, 3), jnp.asarray(rng.normal(size=(4, N)), jnp.float32)
    y = jax.vmap(lambda bias: ops.matmul(x, w, bias))(bias)
    for one, b in zip(y, bias, strict=True):
        oracle.check(one, oracle.product(x, w, b, out_dtype="float32"))


def test_scan_over_stacked_weights(rng):
    weights = [oracle.random_weight(rng, "w4a16", K, K, group_size=32) for _ in range(3)]
    x = activations(rng, 2) / K
    y, _ = jax.jit(lambda x, ws: jax.lax.scan(lambda x, w: (ops.matmul(x, w) / 8, None), x, ws))(x, stack(*weights))
    expected = x
    for w in weights:
        expected = ops.matmul(expected, w) / 8
    np.testing.assert_array_equal(y, expected)


def test_scan_and_remat_under_grad(rng):
    ws = stack(*[oracle.random_weight(rng, "w8a8", K, K) for _ in range(3)])
    x = activations(rng, 2)

    def loss(x: jax.Array, layer) -> jax.Array:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()

    plain = jax.jit(jax.grad(lambda x: loss(x, ops.matmul)))(x)
    remat = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(ops.matmul))))(x)
    np.testing.assert_array_equal(plain, remat)
    unrolled = jnp.ones((2, K))
    for i in reversed(range(3)):
        unrolled = unrolled @ jax.tree.map(lambda a, i=i: a[i], ws).dequantize().T
    np.testing.assert_allclose(plain, unrolled, rtol=1e-4, atol=1e-4)  # three float32 products of terms about 1


# Gradients


def gradients(w: QTensor, x: jax.Array, bias: jax.Array, dy: jax.Array) -> tuple[np.ndarray, ...]:
    """Float64 cotangents of x (straight through its quantization), weight and bias."""
    form = oracle.weight(w)
    dy = np.asarray(dy, np.float64)
    if "A16" in w.scheme:
        x = np.asarray(x).astype(np.float64)
    else:
        q, scale = oracle.per_token(x)
        x = q.astype(np.float64) * scale
    return dy @ form.values.T, x.T @ dy, dy.sum(0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_floats(rng, kind):
    w, x = make(rng, kind), activations(rng, 5)
    bias, dy = jnp.asarray(rng.normal(size=N), jnp.float32), jnp.asarray(rng.normal(size=(5, N)), jnp.float32)
    floats = {"x": x, "scales": w.scales, "bias": bias}
    offsets = w.zeros is not None and w.zeros.dtype != jnp.uint8
    if offsets:
        floats["zeros"] = w.zeros

    def product(floats: dict[str, jax.Array]) -> jax.Array:
        parts = {name: floats[name] for name in ("scales", "zeros") if name in floats}
        return ops.matmul(floats["x"], dataclasses.replace(w, **parts), floats["bias"], out_dtype=jnp.float32)

    (actual,) = jax.vjp(product, floats)[1](dy)
    dx, dw, dbias = gradients(w, x, bias, dy)
    np.testing.assert_allclose(actual["x"], dx, atol=1e-4)
    np.testing.assert_allclose(actual["bias"], dbias, rtol=1e-5, atol=1e-5)
    groups = 1 if w.group_size is None else -(-K // w.group_size)

    def by_group(a: np.ndarray) -> np.ndarray:  # K = 96 is two groups of 48
        return a.reshape(groups, -1, N).sum(1)

    dscales = by_group(dw * oracle.weight(w).steps)
    if w.subscales is not None:
        dscales = dscales.sum(0, keepdims=True)
    eps = float(jnp.finfo(w.scales.dtype).eps)
    rounding = EPS_OF_X[w.scheme] * by_group(np.abs(dw * oracle.weight(w).steps)).max()
    np.testing.assert_allclose(actual["scales"][:, :N].astype(jnp.float32), dscales, rtol=eps, atol=rounding)
    assert not actual["scales"][:, N:].any()
    if offsets:
        expected = by_group(dw)
        atol = EPS_OF_X[w.scheme] * np.abs(dw).sum(0).max()
        np.testing.assert_allclose(actual["zeros"][:, :N].astype(jnp.float32), expected, rtol=eps, atol=atol)


EPS_OF_X = {"W4A16": 2.0**-8, "W8A16": 2.0**-8, "W8A8": 1e-5, "W4A8": 1e-5}  # A16: x is rounded to bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bit_activations(rng, dtype):
    w, x = make(rng, "w4a16"), activations(rng, 5, dtype=dtype)
    dy = jnp.asarray(rng.normal(size=(5, N)), dtype)
    (dx,) = jax.vjp(lambda x: ops.matmul(x, w), x)[1](dy)
    assert dx.dtype == dtype
    form = oracle.weight(w)
    exact, size = np.asarray(dy, np.float64) @ form.values.T, np.abs(np.asarray(dy, np.float64)) @ np.abs(form.values).T
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_array_less(
        np.abs(np.asarray(dx, np.float64) - exact), eps * size
    )  # w and dx are rounded to 16 bits


def test_relu_masks_its_gradient(rng):
    w, x = make(rng, "w8a8"), activations(rng, 5)
    y, vjp = jax.vjp(lambda x: ops.w8a8_matmul(x, w, relu=True), x)
    (dx,) = vjp(jnp.ones_like(y))
    np.testing.assert_allclose(dx, (np.asarray(y) > 0) @ oracle.weight(w).values.T, atol=1e-4)


def test_gradient_of_x_scale(rng):
    w = make(rng, "w8a8")
    x = jnp.asarray(rng.integers(-127, 128, (5, K)), jnp.int8)
    d = jax.grad(lambda s: ops.w8a8_matmul(x, w, x_scale=s, out_dtype=jnp.float32).sum())(jnp.ones((5, 1)))
    np.testing.assert_allclose(d, (np.asarray(x) @ oracle.weight(w).values).sum(1, keepdims=True), rtol=1e-4, atol=1e-2)


def test_integer_leaves_have_no_cotangent(rng):
    w, x = make(rng, "w4a16"), activations(rng, 5)
    dw = jax.grad(lambda w: ops.matmul(x, w).sum(), allow_int=True)(w)
    assert dw.packed.dtype == jax.dtypes.float0
    assert dw.scales.dtype == w.scales.dtype and jnp.abs(dw.scales).sum() > 0


def test_grad_of_activations_with_the_weight_as_an_argument(rng):
    w, x = make(rng, "w4a8-two-level"), activations(rng, 5)
    dx = jax.jit(jax.grad(lambda x, w: ops.matmul(x, w).sum()))(x, w)
    np.testing.assert_allclose(dx, np.broadcast_to(oracle.weight(w).values.sum(1), (5, K)), atol=1e-4)


def test_integer_results_have_zero_gradients(rng):
    w, x = make(rng, "w8a8"), activations(rng, 5)

    def loss(x: jax.Array) -> jax.Array:
        return ops.w8a8_matmul(x, w, out_dtype=jnp.int8, out_scale=0.1).astype(jnp.float32).sum() + x.sum()

    np.testing.assert_array_equal(jax.grad(loss)(x), jnp.ones_like(x))


def test_gradients_pass_act_order_and_padding(rng):
    w = oracle.random_weight(rng, "w4a16", K, N, group_size=40, perm=True)
    x = activations(rng, 2, 3)
    dx = jax.grad(lambda x: ops.matmul(x, w).sum())(x)
    np.testing.assert_allclose(dx, np.broadcast_to(oracle.weight(w).values.sum(1), (2, 3, K)), atol=1e-4)


def test_vmap_of_grad(rng):
    w, x = make(rng, "w4a8"), activations(rng, 3, 5)

    def grad(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (ops.matmul(x, w) ** 2).sum())(x)

    np.testing.assert_allclose(jax.vmap(grad)(x), jnp.stack([grad(one) for one in x]), rtol=1e-5)


def test_gradient_of_dequantize(rng):
    w = oracle.random_weight(rng, "w8a16-offsets", K, N)
    scales = w.scales.astype(jnp.float32)
    dw = jnp.asarray(rng.normal(size=(K, N)), jnp.float32)

    def values(floats: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (ops.dequantize(dataclasses.replace(w, scales=floats[0], zeros=floats[1]), jnp.float32) * dw).sum()

    dscales, dzeros = jax.grad(values)((scales, w.zeros))
    np.testing.assert_allclose(dscales[0, :N], (dw * np.asarray(w.codes(), np.float32)).sum(0), rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(dzeros[0, :N], dw.sum(0), rtol=1e-3, atol=1e-4)


def test_gradient_of_the_token_scale(rng):
    x = activations(rng, 5)
    dx = jax.grad(lambda x: ops.quantize_per_token(x)[1].sum())(x)
    peaks = np.argmax(np.abs(x), axis=1)
    expected = np.zeros(x.shape)
    expected[np.arange(5), peaks] = np.sign(np.asarray(x)[np.arange(5), peaks]) / 127
    np.testing.assert_allclose(dx, expected, rtol=1e-6)


def test_forward_mode_is_refused_not_wrong(rng):
    w, x = make(rng, "w4a16"), activations(rng, 5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: ops.matmul(x, w), (x,), (x,))


@pytest.mark.parametrize("kind", ["w4a16", "w8a8"])
def test_x64(rng, kind):
    w, x = make(rng, kind), activations(rng, 3)
    expected = ops.matmul(x, w)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jax.jit(ops.matmul)(x, w), expected)
        assert jax.grad(lambda x: ops.matmul(x, w).sum())(x).dtype == jnp.float32
        with pytest.raises(TypeError, match="x has dtype float64"):
            ops.matmul(np.zeros((3, K)), w)


def test_quantize_and_dequantize_under_vmap(rng):
    x = activations(rng, 3, 5)
    for a, b in zip(jax.vmap(ops.quantize_per_token)(x), ops.quantize_per_token(x), strict=True):
        np.testing.assert_array_equal(a, b)
    weights = [make(rng, "w4a8-two-level") for _ in range(2)]
    stacked = jax.vmap(ops.dequantize)(stack(*weights))
    np.testing.assert_array_equal(stacked, jnp.stack([ops.dequantize(w) for w in weights]))
