"""Every GEMM kernel against float64 or exact integers, on the same codes. Needs a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import ops, packing, primitive
from jaxq.qtensor import SCHEMES, QTensor

pytestmark = pytest.mark.gpu

# Groups: per channel, the usual ones, one that is no multiple of 64, one that is padded.
GROUPS = [None, 128, 64, 32, 96, 100]
# Rows of the tables in cuda/gemm/select.h and prefill_sm90.h.
KERNELS = {"stream": 0, "tile32": 1, "tile64": 2, "tile128": 3, "wide": 8, "narrow": 9}


def groups_of(kind: str) -> list[int | None]:
    if kind in ("w8a8", "w4a8"):
        return [None]
    return [128, 64, 32, 96, 100] if kind == "w4a8-two-level" else GROUPS


def activations(rng, m: int, k: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(rng.normal(size=(m, k)), dtype)


@jax.jit
def matmul(x, w, bias=None):
    return ops.matmul(x, w, bias, out_dtype=jnp.float32, implementation="cuda")


def poison() -> None:
    """Leaves NaN in freed memory, so that an output or workspace that is not written shows."""
    jax.block_until_ready([jnp.full((1 << 22,), jnp.nan) for _ in range(8)])


# Many products share a program: compiling is what takes time.


@pytest.mark.parametrize("kind", ["w4a16", "w4a16-zeros", "w8a16", "w8a8", "w4a8", "w4a8-two-level", "w4a8-zeros"])
def test_every_small_m(rng, kind):
    k, n = 456, 77  # a tail group, a half stage, a ragged edge
    w = oracle.random_weight(rng, kind, k, n, None if kind in ("w8a8", "w4a8") else 64)
    x = activations(rng, 40, k)
    poison()
    results = jax.jit(lambda x, w: [matmul(x[:m], w) for m in range(41)])(x, w)
    y, bound = oracle.product(x, w, out_dtype="float32")
    for m, result in enumerate(results):
        oracle.check(result, (y[:m], bound[:m]))


@pytest.mark.parametrize("batch", range(12))
def test_odd_shapes(rng, batch):
    kinds, problems = list(oracle.KINDS), []
    for case in range(10 * batch, 10 * batch + 10):
        kind = kinds[case % len(kinds)]
        groups = groups_of(kind)
        m = [1, 2, 3, 7, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 300][case % 15]
        k, n = (int(2 * v + 1) for v in rng.integers((0, 0), (700, 300)))
        w = oracle.random_weight(rng, kind, k, n, groups[case % len(groups)])
        x = activations(rng, m, k, ["bfloat16", "float16", "float32"][case % 3])
        problems.append((x, w, jnp.asarray(rng.normal(size=n), ["float32", "bfloat16", "float16"][case % 3])))
    poison()
    for y, problem in zip(jax.jit(lambda ps: [matmul(*p) for p in ps])(problems), problems, strict=True):
        oracle.check(y, oracle.product(*problem, out_dtype="float32"))


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_every_kernel(rng, kind):
    """Each row of the kernel table, asked for by number, with every kind of group that it must know."""
    shapes = [(13, 1100, 333), (1, 64, 64), (16, 4096, 192), (9, 192, 65), (5, 520, 130)]
    problems = []
    for kernel, config in KERNELS.items():
        for i, group_size in enumerate(groups_of(kind)):
            m, k, n = shapes[i % len(shapes)]
            w = oracle.random_weight(rng, kind, k, n, group_size)
            problems.append((config, activations(rng, m if kernel == "stream" else 11 * m, k), w))

    def run(arrays):
        results = []
        for (x, w), (config, _, _) in zip(arrays, problems, strict=True):
            op = primitive.GEMMS[w.bits, SCHEMES[w.scheme].act_bits]
            facts = dict(n=w.shape[1], group=ops._padded_group(w), out_dtype="float32", relu=False, config=config)
            operands = {"x": packing.pad_k(x, w.group_size)} | ops._arrays(w)
            results.append(op(operands, force_reference=False, **facts)[0])
        return results

    poison()
    for y, (_, x, w) in zip(jax.jit(run)([p[1:] for p in problems]), problems, strict=True):
        oracle.check(y, oracle.product(x, w, out_dtype="float32"))


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w8a8", "w4a8", "w4a8-two-level"])
def test_result_dtypes(rng, kind):
    cases = [(m, n, dtype) for m in (1, 16, 17, 200) for n in (128, 77) for dtype in ("bfloat16", "float16", "float32")]
    problems = []
    for m, n, _ in cases:  # whole and ragged stores
        w = oracle.random_weight(rng, kind, 320, n, None if kind in ("w8a8", "w4a8") else 64)
        problems.append((activations(rng, m, 320), w))

    def run(problems):
        return [
            ops.matmul(x, w, out_dtype=dtype, implementation="cuda")
            for (x, w), (_, _, dtype) in zip(problems, cases, strict=True)
        ]

    for y, problem, (_, _, dtype) in zip(jax.jit(run)(problems), problems, cases, strict=True):
        oracle.check(y, oracle.product(*problem, out_dtype=dtype))


@pytest.mark.parametrize("m", [1, 16, 40, 130])
@pytest.mark.parametrize("k", [64, 1000, 65536])
def test_sums_are_exact_at_the_extremes(m, k):
    """-128 x -127 everywhere: the largest sums that the limits allow, in every kernel that m reaches."""
    codes = jnp.zeros((k, 72), jnp.uint8)  # -128
    w = QTensor.from_codes(codes, jnp.ones((1, 72)), scheme="W8A8")
    x = jnp.full((m, k), -127, jnp.int8)
    y = ops.w8a8_matmul(x, w, out_dtype=jnp.int32, implementation="cuda")
    np.testing.assert_array_equal(y, np.full((m, 72), 128 * 127 * k))


@pytest.mark.parametrize("m", [1, 40])
def test_two_level_sums_are_exact_at_the_extremes(m):
    k = 65536  # u * s + b - 128 = -128 everywhere
    w = QTensor.from_codes(
        jnp.zeros((k, 64), jnp.uint8),
        jnp.ones((1, 64)),
        scheme="W4A8",
        group_size=64,
        subscales=jnp.tile(jnp.asarray([16, 0], jnp.uint8), (k // 64, 64, 1)),
    )
    x = jnp.full((m, k), 127, jnp.int8)
    y = ops.w4a8_matmul(x, w, x_scale=jnp.ones((m, 1)), out_dtype=jnp.float32, implementation="cuda")
    np.testing.assert_array_equal(y, np.full((m, 64), -128 * 127 * k, np.float32))


@pytest.mark.parametrize("m", [5, 50, 200])
@pytest.mark.parametrize("relu", [False, True])
def test_int8_and_int32_results(rng, m, relu):
    w = oracle.random_weight(rng, "w8a8", 300, 70)
    x = jnp.asarray(rng.integers(-127, 128, (m, 300)), jnp.int8)
    codes = np.asarray(w.codes()).astype(np.int64) - 128
    sums = np.asarray(x).astype(np.int64) @ codes
    np.testing.assert_array_equal(ops.w8a8_matmul(x, w, out_dtype=jnp.int32, implementation="cuda"), sums)
    x_scale = jnp.asarray(rng.uniform(0.5, 1, (m, 1)), jnp.float32) / 127
    y, bound = oracle.product(x, w, x_scale=x_scale, out_dtype="float32", relu=relu)
    out_scale = float(np.abs(y).max()) / 100
    q = ops.w8a8_matmul(
        x, w, x_scale=x_scale, out_dtype=jnp.int8, out_scale=out_scale, relu=relu, implementation="cuda"
    )
    assert np.all(np.abs(np.asarray(q) - y / out_scale) <= 0.5 + 2 * bound / out_scale + 1e-5)


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w4a16-zeros", "w8a8", "w4a8", "w4a8-two-level"])
@pytest.mark.parametrize("m", [16, 100])
def test_one_hot_activations_return_the_weight(rng, kind, m):
    """Row i of x selects row i of the weight: exact, but for the scales' products."""
    k, n = 192, 70
    w = oracle.random_weight(rng, kind, k, n, None if kind in ("w8a8", "w4a8") else 64)
    x = jnp.eye(k, dtype=jnp.bfloat16)[50 : 50 + m]
    y = matmul(x, w)
    want = w.dequantize()[50 : 50 + m]
    if SCHEMES[w.scheme].act_bits == 8:
        np.testing.assert_allclose(y, want, rtol=4 * oracle.EPS)  # codes of 127 at a scale of 1 / 127
    else:
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("kind", ["w4a16", "w8a16", "w8a8", "w4a8", "w4a8-two-level", "w4a8-zeros"])
@pytest.mark.parametrize("m", [8, 33, 150])
def test_bad_tokens_stay_in_their_rows(rng, kind, m):
    w = oracle.random_weight(rng, kind, 200, 70, None if kind in ("w8a8", "w4a8") else 64)
    x = activations(rng, m, 200).at[2, 7].set(jnp.nan).at[4, 9].set(jnp.inf).at[5].set(0)
    bias = jnp.asarray(rng.normal(size=70), jnp.float32)
    y = np.asarray(matmul(x, w, bias))
    assert np.isnan(y[2]).all() and not np.isfinite(y[4]).any()
    if w.zeros is None:
        np.testing.assert_array_equal(y[5], bias)
    good = np.delete(np.arange(m), (2, 4))
    want, bound = oracle.product(x[good], w, bias, out_dtype="float32")
    oracle.check(jnp.asarray(y[good]), (want, bound))


@pytest.mark.parametrize("kind", ["w4a16", "w4a8-zeros"])
def test_group_scales_keep_their_digits(rng, kind):
    """Group scales spanning 1e4: the small ones still count where their groups alone have activations."""
    k, n = 512, 64
    codes = jnp.asarray(rng.integers(0, 16, (k, n)), jnp.uint8)
    scales = jnp.asarray(10.0 ** rng.uniform(-4, 0, (k // 64, n)), jnp.float32)
    zeros = jnp.full((k // 64, n), 8, jnp.uint8) if kind == "w4a8-zeros" else None
    w = QTensor.from_codes(codes, scales, scheme="W4A8" if zeros is not None else "W4A16", group_size=64, zeros=zeros)
    for m in (3, 40):
        x = jnp.zeros((m, k), jnp.bfloat16).at[:, 64:128].set(jnp.asarray(rng.normal(size=(m, 64)), jnp.bfloat16))
        oracle.check(matmul(x, w), oracle.product(x, w, out_dtype="float32"))


def test_large_m_and_many_tiles(rng):
    """More rows than a 16-bit grid axis holds."""
    w = oracle.random_weight(rng, "w8a8", 64, 64)
    x = jnp.asarray(rng.integers(-127, 128, (131_072 + 5, 64)), jnp.int8)
    y = ops.w8a8_matmul(x, w, out_dtype=jnp.int32, implementation="cuda")
    sums = np.asarray(x).astype(np.int32) @ (np.asarray(w.codes()).astype(np.int32) - 128)
    np.testing.assert_array_equal(y, sums)
