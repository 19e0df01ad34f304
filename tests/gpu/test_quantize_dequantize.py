"""The activation quantizer and the dequantizer, bit for bit. Needs a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantize_per_token(rng, dtype):
    shapes = [(1, 1), (1, 4096), (3, 7), (16, 14336), (17, 100), (600, 128), (513, 576), (700, 4096), (5, 40_000)]
    shapes.append((70_000, 33))  # more rows than a 16-bit grid axis holds
    xs = [jnp.asarray(rng.normal(size=(m, k)) * 10.0 ** rng.uniform(-4, 4, (m, 1)), dtype) for m, k in shapes]
    results = jax.jit(lambda xs: [ops.quantize_per_token(x, implementation="cuda") for x in xs])(xs)
    for x, (q, scale) in zip(xs, results, strict=True):
        want_q, want_scale = oracle.per_token(x)
        np.testing.assert_array_equal(scale, want_scale)
        np.testing.assert_array_equal(q, want_q)


@pytest.mark.parametrize("m", [8, 600])
def test_quantize_rows_without_a_scale(rng, m):
    x = np.asarray(rng.normal(size=(m, 256)), np.float32)
    x[1] = 0
    x[2, 5] = np.nan
    x[3, 6] = -np.inf
    x[4] = 1e-40
    q, scale = ops.quantize_per_token(jnp.asarray(x), implementation="cuda")
    q, scale = np.asarray(q), np.asarray(scale)
    assert scale[1] == 1 and scale[4] == 1 and np.isnan(scale[2]) and np.isnan(scale[3])
    assert not q[1:5].any()
    want_q, want_scale = oracle.per_token(np.delete(x, [1, 2, 3, 4], 0))
    np.testing.assert_array_equal(np.delete(q, [1, 2, 3, 4], 0), want_q)
    np.testing.assert_array_equal(np.delete(scale, [1, 2, 3, 4], 0), want_scale)


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_dequantize(rng, kind):
    dtypes = ("bfloat16", "float16", "float32")
    shapes = [(64, 64, 64, False), (456, 77, 48, False), (1000, 200, 128, True), (320, 33, None, False)]
    if kind == "w4a8-two-level":
        shapes.pop()
    weights = [oracle.random_weight(rng, kind, *shape) for shape in shapes]
    results = jax.jit(lambda ws: [[ops.dequantize(w, d, implementation="cuda") for d in dtypes] for w in ws])(weights)
    for w, result in zip(weights, results, strict=True):
        form = oracle.weight(w)
        for dtype, got in zip(dtypes, result, strict=True):
            got = np.asarray(got).astype(np.float64)
            if kind.endswith("offsets"):  # a product and a sum
                eps = float(jnp.finfo(dtype).eps)
                bound = eps * np.abs(form.values) + 2 * oracle.EPS * form.magnitudes
                assert np.all(np.abs(got - form.values) <= bound + float(jnp.finfo(dtype).smallest_subnormal))
            else:
                exact = np.asarray(jnp.asarray(form.values, jnp.float32).astype(dtype)).astype(np.float64)
                np.testing.assert_array_equal(got, exact)


def test_dequantize_large(rng):
    """Against a product with the identity: another kernel, the same weight."""
    w = oracle.random_weight(rng, "w4a16", 4096, 1024, 128)
    y = ops.w4a16_matmul(jnp.eye(4096, dtype=jnp.bfloat16), w, out_dtype=jnp.float32, implementation="cuda")
    np.testing.assert_array_equal(ops.dequantize(w, jnp.float32, implementation="cuda"), y)
    assert jax.devices()[0].platform == "gpu"
