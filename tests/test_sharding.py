"""Sharded operands: the partitioning of the custom calls, run on fake CPU devices, and the reference's own lowering.

The custom calls run on CUDA alone. So the partitioning is exercised by operations that differ from jaxq's in one thing:
they have it on CPUs, with plain JAX in the place of the custom call. It records the sizes that one device gets.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxq import ops, packing, primitive
from jaxq.qtensor import QTensor

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight (fake) devices")

M, K, N = 16, 512, 256
LOCAL: list[tuple[int, int, int]] = []  # (m, n, k) of one device, of each tracing


def plain(meaning: Any, dims: str) -> Any:
    """A stand-in for a custom call: ``meaning`` of one device's arrays, whatever the mesh."""

    def kernel(arrays: dict[str, jax.Array], config: int = -1, **params: Any) -> Any:
        k = arrays["packed"].shape[1] * packing.BLOCK if "packed" in arrays else arrays["x"].shape[1]
        LOCAL.append((arrays["x"].shape[0] if "x" in arrays else 0, params.get("n", 0), k))
        sharding = jax.typeof(next(iter(arrays.values()))).sharding.update(spec=P(None, None))
        call = jax.jit(functools.partial(meaning, **params))  # its constants must not show, see custom_partitioning
        return primitive.without_explicit_axes(call, tuple(sharding for _ in dims.split()))(arrays)

    return kernel


def on_cpu(op: primitive.Op) -> primitive.Op:
    kernel = plain(lambda arrays, **params: op.reference(arrays, **params), " ".join(dims for dims, _ in op.results))
    return primitive.Op(
        "cpu_" + op.primitive.name, op.results, op.reference, kernel, splits=op.partitioning.splits, platforms=("cpu",)
    )


PARTITIONED = {key: on_cpu(op) for key, op in primitive.GEMMS.items()}
PARTITIONED_DEQUANTIZE = on_cpu(primitive.DEQUANTIZE)
PARTITIONED_QUANTIZE = on_cpu(primitive.QUANTIZE_PER_TOKEN)


@pytest.fixture
def partitioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "GEMMS", PARTITIONED)
    monkeypatch.setattr(primitive, "DEQUANTIZE", PARTITIONED_DEQUANTIZE)
    monkeypatch.setattr(primitive, "QUANTIZE_PER_TOKEN", PARTITIONED_QUANTIZE)
    LOCAL.clear()


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("d", "t"), axis_types=(kind, kind))


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def put(a: jax.Array, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    """Shards an array; an axis that does not divide stays whole."""
    divides = [None if size == 1 or size % mesh.shape.get(e, 1) else e for e, size in zip(spec, a.shape, strict=False)]
    return jax.device_put(a, NamedSharding(mesh, P(*divides)))


def put_weight(w: QTensor, mesh: jax.sharding.Mesh, k: str | None, n: str | None) -> QTensor:
    axes = {"packed": (n, k), "scales": (k, n), "zeros": (k, n), "subscales": (k, n), "perm": ()}
    arrays = {name: put(getattr(w, name), mesh, *spec) for name, spec in axes.items() if getattr(w, name) is not None}
    return dataclasses.replace(w, **arrays)


def jit(op: Any, **kwargs: Any) -> Any:
    """``jax.jit`` that has not seen the operation before: it may have been another one."""
    return jax.jit(lambda *args: op(*args), **kwargs)


def collectives(compiled: Any) -> list[str]:
    text = compiled.as_text()
    return sorted(
        re.findall(r"\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", text)
    )


CASES = {  # specs of x, k, n -> (m, n, k) of a device, the result's spec, collectives
    "replicated": (P(), None, None, (16, 256, 512), P(), set()),
    "data": (P("d"), None, None, (8, 256, 512), P("d"), set()),
    "column": (P("d"), None, "t", (8, 64, 512), P("d", "t"), set()),
    "row": (P("d", "t"), "t", None, (8, 256, 128), P("d"), {"all-reduce"}),
    "row-of-a-whole-x": (P("d"), "t", None, (8, 256, 128), P("d"), {"all-reduce"}),
    "fsdp": (P("d"), "d", None, (8, 256, 512), P("d"), {"all-gather"}),
}


def parametrize_cases(kinds: list[tuple[str, int | None]]) -> Any:
    return pytest.mark.parametrize(
        "case, kind, group_size",
        [pytest.param(case, *kind, id=f"{case}-{kind[0]}-{kind[1]}") for case in CASES for kind in kinds],
    )


@parametrize_cases([("w4a16", 64), ("w4a16-offsets", None)])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_each_device_gets_its_share(rng, partitioned, axis_type, case, kind, group_size):
    x_spec, k, n, local, out, wanted = CASES[case]
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, kind, K, N, group_size)
    x, bias = jnp.asarray(rng.normal(size=(M, K)), jnp.bfloat16), jnp.asarray(rng.normal(size=N), jnp.float32)
    args = put(x, mesh, *x_spec), put_weight(w, mesh, k, n), put(bias, mesh, n)
    compiled = jit(ops.matmul).lower(*args).compile()
    y = compiled(*args)
    assert LOCAL[-1] == local
    assert set(collectives(compiled)) == wanted
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, out), 2)
    oracle.check(y, oracle.product(x, w, bias, out_dtype="bfloat16"))


@pytest.mark.parametrize("kind, group_size", [("w8a8", None), ("w4a8", None), ("w4a8-two-level", 64)])
@pytest.mark.parametrize("k, n", [("t", None), (None, "t"), ("t", "d")])
def test_int8_activations(rng, partitioned, kind, group_size, k, n):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, kind, K, N, group_size)
    x = jnp.asarray(rng.integers(-127, 128, (M, K)), jnp.int8)
    x_scale = jnp.asarray(rng.uniform(0.01, 0.02, (M, 1)), jnp.float32)
    op = ops.w8a8_matmul if kind == "w8a8" else ops.w4a8_matmul
    call = jax.jit(lambda x, w, s: op(x, w, x_scale=s, out_dtype=jnp.float32))
    y = call(put(x, mesh, "d", k), put_weight(w, mesh, k, n), put(x_scale, mesh, "d"))
    assert LOCAL[-1][1:] == (N // (1 if n is None else mesh.shape[n]), K // (1 if k is None else mesh.shape[k]))
    oracle.check(y, oracle.product(x, w, x_scale=x_scale, out_dtype="float32", shards=4))


def test_each_shard_of_k_quantizes_its_part_of_a_float_x(rng, partitioned):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w8a8", K, N)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    y = jit(ops.matmul)(put(x, mesh, "d", "t"), put_weight(w, mesh, "t", None))
    values = oracle.weight(w).values
    expected = sum(
        (lambda q, scale: scale * (q.astype(np.float64) @ part))(*oracle.per_token(x_part))
        for x_part, part in zip(np.split(np.asarray(x), 4, axis=1), np.split(values, 4), strict=True)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_bias_relu_and_rounding_come_after_the_sum(rng, partitioned):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w8a8", K, N)
    x = jnp.asarray(rng.integers(-127, 128, (M, K)), jnp.int8)
    x_scale, bias = jnp.full((M, 1), 2.0**-7), jnp.asarray(rng.normal(size=N), jnp.float32)

    def call(x, w, bias):
        return ops.w8a8_matmul(x, w, bias, x_scale=x_scale, out_dtype=jnp.int8, out_scale=0.25, relu=True)

    y = jax.jit(call)(put(x, mesh, "d", "t"), put_weight(w, mesh, "t", None), bias)
    assert LOCAL[-1] == (8, 256, 128)
    exact, bound = oracle.product(x, w, bias, x_scale, out_dtype="float32", relu=True, shards=4)
    low, high = (np.clip(np.rint((exact + e) / 0.25), -128, 127) for e in (-bound, bound))
    assert ((low <= np.asarray(y)) & (np.asarray(y) <= high)).all()


def test_plain_sums_stay_int32(rng, partitioned):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w8a8", K, N)
    x = jnp.asarray(rng.integers(-127, 128, (M, K)), jnp.int8)
    call = jax.jit(lambda x, w: ops.w8a8_matmul(x, w, out_dtype=jnp.int32))
    sums = call(put(x, mesh, "d", "t"), put_weight(w, mesh, "t", None))
    assert LOCAL[-1] == (8, 256, 128)
    np.testing.assert_array_equal(sums, np.asarray(x, np.int64) @ (np.asarray(w.codes(), np.int64) - 128))


@pytest.mark.parametrize("out", [P("d", "t"), P(("t",), None), P("d")], ids=str)
def test_a_result_split_like_k_is_reduce_scattered(rng, partitioned, out):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w4a16", K, N, 64)
    x, bias = jnp.asarray(rng.normal(size=(M, K)), jnp.bfloat16), jnp.asarray(rng.normal(size=N), jnp.float32)
    x_spec = ("d", "t") if out[0] == "d" else (None, "t")
    args = put(x, mesh, *x_spec), put_weight(w, mesh, "t", None), bias
    compiled = jit(ops.matmul, out_shardings=NamedSharding(mesh, out)).lower(*args).compile()
    assert collectives(compiled) == (["all-reduce"] if out == P("d") else ["reduce-scatter"])
    oracle.check(compiled(*args), oracle.product(x, w, bias, out_dtype="bfloat16"))


@pytest.mark.parametrize(
    "k, n, group_size, k_axis, n_axis",
    [
        pytest.param(512, 256, 96, "t", None, id="groups-end-inside-blocks"),
        pytest.param(512, 256, 320, "d", None, id="as-many-groups-as-shards-but-elsewhere"),
        pytest.param(320, 256, 64, "t", None, id="five-blocks-in-four"),
        pytest.param(512, 200, 64, None, "t", id="n-ends-inside-a-block"),
        pytest.param(512, 192, 64, None, "d", id="three-blocks-in-two"),
    ],
)
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_what_does_not_divide_is_gathered(rng, partitioned, axis_type, k, n, group_size, k_axis, n_axis):
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, "w4a16", k, n, group_size)
    x = jnp.asarray(rng.normal(size=(M, k)), jnp.bfloat16)
    y = jit(ops.matmul)(put(x, mesh, None, k_axis), put_weight(w, mesh, k_axis, n_axis))
    assert LOCAL[-1] == (M, n, packing.padded_k(k, group_size))
    oracle.check(y, oracle.product(x, w, out_dtype="bfloat16"))


def test_column_then_row_is_one_all_reduce(rng, partitioned):
    mesh = mesh_of(AUTO)
    up, down = oracle.random_weight(rng, "w4a16", 64, K, 32), oracle.random_weight(rng, "w4a16", K, 64, 64)
    x = put(jnp.asarray(rng.normal(size=(M, 64)), jnp.bfloat16), mesh, "d")
    args = x, put_weight(up, mesh, None, "t"), put_weight(down, mesh, "t", None)
    compiled = jax.jit(lambda x, up, down: ops.matmul(jax.nn.relu(ops.matmul(x, up)), down)).lower(*args).compile()
    assert collectives(compiled) == ["all-reduce"]
    hidden = jax.nn.relu(ops.matmul(x, up, implementation="reference"))
    oracle.check(compiled(*args), oracle.product(hidden, down, out_dtype="bfloat16"))


@pytest.mark.parametrize(
    "axis_type, lead",
    [(AUTO, P("d")), (EXPLICIT, P("d")), (EXPLICIT, P(None, "t")), (EXPLICIT, P("d", "t"))],  # NOTE: on an
    # automatic mesh the compiler keeps only the first of the leading axes split, since all of them are rows to the call
    ids=str,
)
def test_sharded_leading_axes(rng, partitioned, axis_type, lead):
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, "w4a16", K, N, 64, perm=True)
    x = jnp.asarray(rng.normal(size=(4, 8, K)), jnp.bfloat16)
    y = jit(ops.matmul)(put(x, mesh, *lead), put_weight(w, mesh, None, None))
    assert LOCAL[-1][0] == 32 // np.prod([mesh.shape[a] for a in lead if a])
    oracle.check(y, oracle.product(x, w, out_dtype="bfloat16"))


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(rng, partitioned, check_vma):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w4a16", K, N, 64)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)

    def row(x, w):
        assert w.shape == (K // 4, N)
        return jax.lax.psum(ops.matmul(x, w), "t")

    k_of = dataclasses.replace(w, packed=P(None, "t"), scales=P("t"))
    call = jax.shard_map(row, mesh=mesh, in_specs=(P("d", "t"), k_of), out_specs=P("d"), check_vma=check_vma)
    y = jax.jit(call)(x, w)
    assert LOCAL[-1] == (8, 256, 128)
    oracle.check(y, oracle.product(x, w, out_dtype="float32"))

    def loss(x, scales):
        return call(x, dataclasses.replace(w, scales=scales)).sum()

    dx, dscales = jax.jit(jax.grad(loss, (0, 1)))(x, w.scales)
    values, steps = oracle.weight(w).values, oracle.weight(w).steps
    np.testing.assert_allclose(dx, np.broadcast_to(values.sum(1), (M, K)), atol=1e-3)
    expected = (np.asarray(x, np.float64).sum(0)[:, None] * steps).reshape(K // 64, 64, N).sum(1)
    np.testing.assert_allclose(
        dscales.astype(jnp.float32), expected, rtol=2.0**-7, atol=2.0**-8 * np.abs(expected).max()
    )


def test_shard_map_over_n_has_shards_of_its_own_n(rng, partitioned):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w8a8", K, N)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)

    def column(x, w):
        assert w.shape == (K, N // 4)
        return ops.matmul(x, w)

    n_of = dataclasses.replace(w, packed=P("t"), scales=P(None, "t"))
    call = jax.shard_map(column, mesh=mesh, in_specs=(P("d"), n_of), out_specs=P("d", "t"))
    oracle.check(jax.jit(call)(x, w), oracle.product(x, w, out_dtype="float32"))


def test_act_order_refuses_shards_of_k_in_shard_map(rng):
    mesh, w = mesh_of(AUTO), oracle.random_weight(rng, "w4a16", K, N, 64, perm=True)
    k_of = dataclasses.replace(w, packed=P(None, "t"), scales=P("t"), perm=P())
    call = jax.shard_map(ops.matmul, mesh=mesh, in_specs=(P(None, "t"), k_of), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"perm has shape \(512,\), must be \(128,\)"):
        call(jnp.ones((M, K), jnp.bfloat16), w)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("case", ["column", "row"])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "partitioned"])
def test_gradients_of_sharded_operands(rng, request, axis_type, case, kernels):
    if kernels:
        request.getfixturevalue("partitioned")
    x_spec, k, n, *_ = CASES[case]
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, "w4a16-f32-scales", K, N, 64)
    x, bias = jnp.asarray(rng.normal(size=(M, K)), jnp.float32), jnp.zeros(N)

    def loss(x, scales, bias, w):
        return ops.matmul(x, dataclasses.replace(w, scales=scales), bias).sum()

    w_put, x_put = put_weight(w, mesh, k, n), put(x, mesh, *x_spec)
    args = x_put, w_put.scales, put(bias, mesh, n), w_put
    grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    for grad, arg in zip(grads, args[:3], strict=True):
        if axis_type == EXPLICIT:
            assert jax.typeof(grad).sharding == jax.typeof(arg).sharding
    values, steps = oracle.weight(w).values, oracle.weight(w).steps
    expected = (np.asarray(x, np.float64).sum(0)[:, None] * steps).reshape(K // 64, 64, N).sum(1)
    np.testing.assert_allclose(grads[0], np.broadcast_to(values.sum(1), (M, K)), atol=1e-3)
    np.testing.assert_allclose(grads[1], expected, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(grads[2], np.full(N, float(M)))


@parametrize_cases([("w4a16", 64), ("w8a8", None)])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_the_reference_is_partitioned_by_the_compiler(rng, axis_type, case, kind, group_size):
    x_spec, k, n, _, out, _ = CASES[case]
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, kind, K, N, group_size)
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    y = jit(ops.matmul)(put(x, mesh, *x_spec), put_weight(w, mesh, k, n))
    if axis_type == EXPLICIT:
        assert jax.typeof(y).sharding.spec == P(*out, *[None] * (2 - len(out)))
    oracle.check(y, oracle.product(x, w, out_dtype="float32", shards=8))


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "partitioned"])
def test_scan_and_vmap_over_sharded_operands(rng, request, kernels):
    if kernels:
        request.getfixturevalue("partitioned")
    mesh = mesh_of(AUTO)
    weights = [oracle.random_weight(rng, "w4a16", K, K, 64) for _ in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *weights)
    split = dataclasses.replace(
        stacked, packed=put(stacked.packed, mesh, None, "t"), scales=put(stacked.scales, mesh, None, None, "t")
    )
    x = jnp.asarray(rng.normal(size=(4, 8, K)), jnp.float32)

    def layers(x, ws):
        return jax.lax.scan(lambda x, w: (ops.matmul(x, w) / 16, None), x, ws)[0]

    y = jax.jit(jax.vmap(layers, (0, None)))(put(x, mesh, "d"), split)
    expected = x
    for w in weights:
        expected = ops.matmul(expected, w, implementation="reference") / 16
    # the second product rounds its float32 inputs to bfloat16, where a last bit of float32 may decide
    np.testing.assert_allclose(y, expected, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("k, n", [("t", None), (None, "t"), ("d", "t")])
def test_dequantize_keeps_the_shards(rng, partitioned, axis_type, k, n):
    mesh, w = mesh_of(axis_type), oracle.random_weight(rng, "w4a8-two-level", K, N, 64)
    compiled = jax.jit(lambda w: ops.dequantize(w, jnp.float32)).lower(split := put_weight(w, mesh, k, n)).compile()
    values = compiled(split)
    assert not collectives(compiled)
    assert LOCAL[-1] == (0, N // (1 if n is None else mesh.shape[n]), K // (1 if k is None else mesh.shape[k]))
    assert values.sharding.is_equivalent_to(NamedSharding(mesh, P(k, n)), 2)
    np.testing.assert_array_equal(values, w.dequantize())


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "partitioned"])
def test_quantize_per_token_sees_whole_tokens(rng, request, axis_type, kernels):
    if kernels:
        request.getfixturevalue("partitioned")
    mesh, x = mesh_of(axis_type), jnp.asarray(rng.normal(size=(M, K)), jnp.float32)
    q, scale = jit(ops.quantize_per_token)(put(x, mesh, "d", "t"))
    if kernels:
        assert LOCAL[-1] == (8, 0, K)
    expected_q, expected_scale = oracle.per_token(x)
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_array_equal(scale, expected_scale)
