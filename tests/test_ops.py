"""The public face of the operations: shapes, dtypes, act-order, and what each of them refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import _ffi, ops
from jaxq.qtensor import QTensor

OPS = {"w4a16": ops.w4a16_matmul, "w8a16": ops.w8a16_matmul, "w8a8": ops.w8a8_matmul, "w4a8": ops.w4a8_matmul}


@pytest.fixture
def w(rng) -> QTensor:
    return oracle.random_weight(rng, "w4a16", k=100, n=70, group_size=32)


@pytest.fixture
def w8a8(rng) -> QTensor:
    return oracle.random_weight(rng, "w8a8", k=100, n=70)


X = jnp.linspace(-1, 1, 300, dtype=jnp.bfloat16).reshape(3, 100)
CODES = jnp.arange(300, dtype=jnp.int32).reshape(3, 100).astype(jnp.int8)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 0, 3), (0,)])
def test_leading_axes_are_rows(rng, name, lead):
    w = oracle.random_weight(rng, name, k=100, n=70)
    x = jnp.asarray(rng.normal(size=(*lead, 100)), jnp.bfloat16)
    y = OPS[name](x, w)
    assert y.shape == (*lead, 70) and y.dtype == jnp.bfloat16
    rows = OPS[name](x.reshape(-1, 100) if x.size else x.reshape(0, 100), w)
    np.testing.assert_array_equal(y, rows.reshape(*lead, 70))
    oracle.check(y, oracle.product(x, w, out_dtype="bfloat16"))


@pytest.mark.parametrize("name", OPS)
def test_matmul_is_the_op_of_the_scheme(rng, name):
    w = oracle.random_weight(rng, name, k=100, n=70)
    np.testing.assert_array_equal(ops.matmul(X, w), OPS[name](X, w))


@pytest.mark.parametrize("kind", ["w4a16", "w4a16-zeros", "w8a8", "w4a8-two-level"])
@pytest.mark.parametrize("group_size", [32, 48])
def test_act_order(rng, kind, group_size):
    w = oracle.random_weight(rng, kind, k=100, n=70, group_size=group_size, perm=True)
    oracle.check(ops.matmul(X, w), oracle.product(X, w, out_dtype="bfloat16"))


def test_float32_activations_are_rounded_to_bfloat16_and_float16_is_kept(rng, w):
    x = jnp.asarray(rng.normal(size=(3, 100)), jnp.float32)
    np.testing.assert_array_equal(
        ops.w4a16_matmul(x, w), ops.w4a16_matmul(x.astype(jnp.bfloat16), w, out_dtype=jnp.float32)
    )
    half = x.astype(jnp.float16)
    oracle.check(ops.w4a16_matmul(half, w), oracle.product(half, w, out_dtype="float16"))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float16", "float32"])
def test_bias_and_result_dtypes(rng, w, out_dtype, bias_dtype):
    bias = jnp.asarray(rng.normal(size=70), bias_dtype)
    y = ops.w4a16_matmul(X, w, bias, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    oracle.check(y, oracle.product(X, w, bias, out_dtype=out_dtype))


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_int8_activations_default_to_bfloat16(w8a8, shape):
    x_scale = jnp.linspace(0.01, 0.03, 3).reshape(shape)
    y = ops.w8a8_matmul(CODES, w8a8, x_scale=x_scale)
    assert y.dtype == jnp.bfloat16
    oracle.check(y, oracle.product(CODES, w8a8, x_scale=x_scale, out_dtype="bfloat16"))


def test_quantizing_first_is_the_same(rng, w8a8):
    x = jnp.asarray(rng.normal(size=(2, 3, 100)), jnp.float32)
    q, scale = ops.quantize_per_token(x)
    inside = ops.w8a8_matmul(x, w8a8)
    np.testing.assert_array_equal(ops.w8a8_matmul(q, w8a8, x_scale=scale, out_dtype=jnp.float32), inside)


def test_int32_ignores_no_scale(w8a8):
    sums = ops.w8a8_matmul(CODES, w8a8, out_dtype=jnp.int32)
    assert sums.dtype == jnp.int32
    np.testing.assert_array_equal(sums, ops.w8a8_matmul(CODES, w8a8, x_scale=jnp.ones(3), out_dtype=jnp.int32))


def test_out_scale_may_be_an_array(w8a8):
    scalar = ops.w8a8_matmul(X, w8a8, out_dtype=jnp.int8, out_scale=0.3)
    for out_scale in (jnp.float32(0.3), jnp.full((1,), 0.3), np.full((1, 1), 0.3, np.float32)):
        np.testing.assert_array_equal(scalar, ops.w8a8_matmul(X, w8a8, out_dtype=jnp.int8, out_scale=out_scale))


def test_numpy_arguments(w):
    np.testing.assert_array_equal(ops.w4a16_matmul(np.asarray(X), w, np.zeros(70, np.float32)), ops.w4a16_matmul(X, w))


REFUSALS = [
    (lambda w, v: ops.w4a16_matmul(jnp.float32(1), w), ValueError, "scalar"),
    (lambda w, v: ops.w4a16_matmul(X[:, :99], w), ValueError, r"x\.shape\[-1\]=99 .* k=100"),
    (lambda w, v: ops.w4a16_matmul(CODES, w), TypeError, "x has dtype int8, must be bfloat16, float16 or float32"),
    (lambda w, v: ops.w8a8_matmul(X.astype(jnp.int32), v), TypeError, "x has dtype int32, must be .* or int8"),
    (lambda w, v: ops.w4a16_matmul(X, v), ValueError, "scheme W8A8; multiply by it with w8a8_matmul"),
    (lambda w, v: ops.w4a16_matmul(X, w.packed), TypeError, "must be a QTensor"),
    (lambda w, v: ops.matmul(X, w.packed), TypeError, "must be a QTensor"),
    (lambda w, v: ops.matmul(CODES, v), TypeError, "x is int8.*w8a8_matmul"),
    (lambda w, v: ops.w4a16_matmul(X, dataclasses.replace(w, layout=7)), ValueError, "layout version 7"),
    (lambda w, v: ops.w4a16_matmul(X, stacked(w)), ValueError, r"leading axes \(1,\).*scan"),
    (lambda w, v: ops.dequantize(stacked(w)), ValueError, r"leading axes \(1,\).*vmap"),
    (lambda w, v: ops.dequantize(w, jnp.int8), TypeError, "dtype=int8 must be"),
    (lambda w, v: ops.w4a16_matmul(X, w, jnp.zeros(71)), ValueError, r"bias has shape \(71,\), must be .* \(70,\)"),
    (lambda w, v: ops.w4a16_matmul(X, w, jnp.zeros(70, jnp.int32)), TypeError, "bias has dtype int32"),
    (lambda w, v: ops.w4a16_matmul(X, w, out_dtype=jnp.int8), TypeError, "out_dtype=int8 must be bfloat16"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.uint8), TypeError, "out_dtype=uint8 must be .* or int32"),
    (lambda w, v: ops.w8a8_matmul(CODES, v), ValueError, r"x_scale is needed: float32 \(3, 1\)"),
    (lambda w, v: ops.w8a8_matmul(X, v, x_scale=jnp.ones(3)), ValueError, "leave x_scale out"),
    (lambda w, v: ops.w8a8_matmul(CODES, v, x_scale=jnp.ones(4)), ValueError, r"\(4,\), must be \(3, 1\) or \(3,\)"),
    (lambda w, v: ops.w8a8_matmul(CODES, v, x_scale=jnp.ones(3, jnp.bfloat16)), TypeError, "x_scale has dtype bfl"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.int32), TypeError, "needs an int8 x"),
    (lambda w, v: ops.w8a8_matmul(CODES, v, jnp.zeros(70), out_dtype=jnp.int32), ValueError, "neither bias nor relu"),
    (lambda w, v: ops.w8a8_matmul(CODES, v, out_dtype=jnp.int32, relu=True), ValueError, "neither bias nor relu"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.int8), ValueError, "needs out_scale"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_scale=1.0), ValueError, "int8 only; found out_dtype=bfloat16"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.int8, out_scale=0.0), ValueError, "out_scale=0.0 must be pos"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.int8, out_scale=jnp.ones(70)), ValueError, "one scalar"),
    (lambda w, v: ops.w8a8_matmul(X, v, out_dtype=jnp.int8, out_scale=jnp.int32(1)), TypeError, "out_scale has dtype"),
    (
        lambda w, v: ops.w4a16_matmul(X, w, implementation="xla"),
        ValueError,
        "'xla' must be None, 'cuda' or 'reference'",
    ),
    (lambda w, v: ops.quantize_per_token(jnp.float32(1)), ValueError, r"shape \(\)"),
    (lambda w, v: ops.quantize_per_token(jnp.ones((3, 0))), ValueError, "k >= 1"),
    (lambda w, v: ops.quantize_per_token(CODES), TypeError, "x has dtype int8"),
]


def stacked(w: QTensor) -> QTensor:
    return jax.tree.map(lambda a: a[None], w)


@pytest.mark.parametrize("call, error, message", REFUSALS)
def test_refusals(w, w8a8, call, error, message):
    with pytest.raises(error, match=message):
        call(w, w8a8)


def test_plain_sums_refuse_groups(rng):
    grouped = oracle.random_weight(rng, "w8a8", k=100, n=70, group_size=32)
    with pytest.raises(ValueError, match="group_size=32"):
        ops.w8a8_matmul(CODES, grouped, out_dtype=jnp.int32)


@pytest.mark.parametrize("kind, limit", [("w8a8", 131_071), ("w4a8", 131_071), ("w4a8-two-level", 65_793)])
def test_sums_that_could_leave_int32_are_refused(kind, limit):
    def abstract(k: int) -> QTensor:
        def make() -> QTensor:
            n, g = 64, 64 if kind == "w4a8-two-level" else None
            subscales = jnp.zeros((-(-k // 64), n, 2), jnp.uint8) if g else None
            codes = jnp.zeros((k, n), jnp.uint8)
            scheme = "W8A8" if kind == "w8a8" else "W4A8"
            return QTensor.from_codes(codes, jnp.ones((1, n)), scheme=scheme, group_size=g, subscales=subscales)

        return jax.eval_shape(make)

    def product(k: int) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(ops.matmul, jax.ShapeDtypeStruct((1, k), jnp.bfloat16), abstract(k))

    assert product(limit).shape == (1, 64)
    with pytest.raises(ValueError, match=f"k={limit + 1} must be at most {limit}"):
        product(limit + 1)


@pytest.mark.skipif(_ffi.has_cuda(), reason="for a machine without the kernels")
def test_cuda_is_refused_without_the_kernels(w):
    for call in (
        lambda: ops.w4a16_matmul(X, w, implementation="cuda"),
        lambda: ops.dequantize(w, implementation="cuda"),
        lambda: ops.quantize_per_token(X, implementation="cuda"),
    ):
        with pytest.raises(RuntimeError, match="implementation='cuda' cannot run"):
            call()


def test_reference_runs_everywhere(w):
    np.testing.assert_array_equal(
        ops.w4a16_matmul(X, w, implementation="reference").astype(jnp.float32),
        jax.jit(lambda x: ops.w4a16_matmul(x, w, implementation="reference"))(X).astype(jnp.float32),
    )
    oracle.check(ops.w4a16_matmul(X, w, implementation="reference"), oracle.product(X, w, out_dtype="bfloat16"))


def test_a_missing_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(_ffi, "_refusal", "not built; run: pip install")
    _ffi.status.cache_clear()
    try:
        assert _ffi.status() == "not built; run: pip install"
        assert not _ffi.has_cuda()
    finally:
        _ffi.status.cache_clear()


def test_on_cuda_without_the_kernels_it_warns_once(monkeypatch):
    monkeypatch.setattr(_ffi, "status", lambda: "not built")
    monkeypatch.setattr(_ffi, "runs_on_cuda", lambda: True)
    _ffi._warn_once.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="without its CUDA kernels, slowly: not built"):
            assert _ffi.falls_back()
        assert _ffi.falls_back()  # a second warning would be an error here
    finally:
        _ffi._warn_once.cache_clear()
