"""How the custom calls live in XLA's runtime: repeatable, captured, concurrent, under transformations. Needs a GPU."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxq import ops

pytestmark = pytest.mark.gpu

KINDS = ["w4a16", "w4a16-zeros", "w8a16", "w8a8", "w4a8", "w4a8-two-level", "w4a8-zeros"]


def random_weight(rng, kind, k, n):
    return oracle.random_weight(rng, kind, k, n, None if kind in ("w8a8", "w4a8") else 64)


def cuda(x, w):
    return ops.matmul(x, w, implementation="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_runs_are_bitwise_equal(rng, kind):
    w = random_weight(rng, kind, 2048, 320)  # k is split where tiles are few
    xs = [jnp.asarray(rng.normal(size=(m, 2048)), jnp.bfloat16) for m in (1, 16, 40, 200)]
    call = jax.jit(lambda xs, w: [cuda(x, w) for x in xs])
    first = jax.tree.map(np.asarray, call(xs, w))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, call(xs, w), first)


@pytest.mark.parametrize("kind", KINDS)
def test_jit_of_scan_with_element_wise_work_between(rng, kind):
    """A decode loop: twelve layers, captured by command buffers, replayed on new inputs."""
    layers = [random_weight(rng, kind, 256, 256) for _ in range(12)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    @jax.jit
    def run(x, stacked):
        return jax.lax.scan(lambda x, w: (jnp.tanh(cuda(x, w) / 8), None), x, stacked)[0]

    @jax.jit
    def unrolled(x, layers):
        for w in layers:
            x = jnp.tanh(cuda(x, w) / 8)
        return x

    target = "jaxq_" + layers[0].scheme.lower().removesuffix("_asym")
    assert unrolled.lower(jnp.ones((4, 256), jnp.bfloat16), layers).compile().as_text().count(f'"{target}"') == 12
    for seed in range(3):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(4, 256)), jnp.bfloat16)
        want = x
        for w in layers:
            want = jnp.tanh(cuda(want, w) / 8)
        for _ in range(3):
            np.testing.assert_array_equal(unrolled(x, layers), want)
        np.testing.assert_array_equal(run(x, stacked), want)


@pytest.mark.parametrize("kind", ["w4a16", "w8a8", "w4a8-two-level"])
def test_threads_share_a_weight(rng, kind):
    """No state outlives a call: the same weight, many calls at once."""
    w = random_weight(rng, kind, 1024, 192)
    xs = [jnp.asarray(rng.normal(size=(m, 1024)), jnp.bfloat16) for m in (1, 5, 16, 40, 100, 200)]
    call = jax.jit(cuda)
    want = [np.asarray(call(x, w)) for x in xs]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            for got, expected in zip(pool.map(lambda x: np.asarray(call(x, w)), xs), want, strict=True):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_independent_branches_of_one_program(rng, kind):
    w = random_weight(rng, kind, 512, 192)
    xs = [jnp.asarray(rng.normal(size=(m, 512)), jnp.bfloat16) for m in (1, 16, 33, 150)]
    together = jax.jit(lambda xs, w: [cuda(x, w) for x in xs])(xs, w)
    for got, x in zip(together, xs, strict=True):
        np.testing.assert_array_equal(got, cuda(x, w))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_its_neighbours(rng, kind):
    w = random_weight(rng, kind, 512, 192)
    x = jnp.asarray(rng.normal(size=(16, 512)), jnp.bfloat16)
    y = np.asarray(cuda(x, w))
    other = x.at[1:].set(jnp.asarray(rng.normal(size=(15, 512)), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(cuda(other, w))[0], y[0])


@pytest.mark.parametrize("kind", ["w4a16", "w8a8", "w4a8-two-level"])
def test_transformations(rng, kind):
    w = random_weight(rng, kind, 200, 70)
    x = jnp.asarray(rng.normal(size=(3, 5, 200)), jnp.bfloat16)
    y = cuda(x, w)
    np.testing.assert_array_equal(jax.vmap(cuda, (0, None))(x, w), y)

    def loss(implementation):
        return lambda x: (ops.matmul(x, w, implementation=implementation).astype(jnp.float32) ** 2).sum()

    got = jax.jit(jax.grad(jax.checkpoint(loss("cuda"))))(x).astype(jnp.float32)
    want = jax.grad(loss("reference"))(x).astype(jnp.float32)
    assert jnp.linalg.norm(got - want) <= 2e-2 * jnp.linalg.norm(want)  # the result is rounded to bfloat16 in between


@pytest.mark.parametrize("kind", oracle.KINDS)
def test_cuda_and_reference_agree(rng, kind):
    """On the same codes: XLA's division on a GPU may round an activation that lies halfway to the other side."""
    w = random_weight(rng, kind, 320, 130)
    x = jnp.asarray(rng.normal(size=(9, 320)), jnp.bfloat16)
    call, facts = ops.matmul, {}
    if w.scheme in ("W8A8", "W4A8"):
        x, x_scale = ops.quantize_per_token(x, implementation="cuda")
        call, facts = {"W8A8": ops.w8a8_matmul, "W4A8": ops.w4a8_matmul}[w.scheme], dict(x_scale=x_scale)
    expected = oracle.product(x, w, out_dtype="float32", **facts)
    for implementation in ("cuda", "reference"):
        oracle.check(call(x, w, out_dtype=jnp.float32, implementation=implementation, **facts), expected)
