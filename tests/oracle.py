"""What a quantized product must be, in float64 numpy, and how far float32 arithmetic may be from it.

Independent of ``jaxq.reference``: only the codes of a weight are read by jaxq. CPU and GPU tests share it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxq.qtensor import SCHEMES, QTensor

# Of one float32 operation. Twice the unit roundoff: tensor cores cut sums off instead of rounding them.
EPS = 2.0**-23

# Every form that a weight can have, and how `random_weight` makes it.
KINDS = {
    "w4a16": dict(scheme="W4A16"),
    "w4a16-f32-scales": dict(scheme="W4A16", scales=jnp.float32),
    "w4a16-f16-scales": dict(scheme="W4A16", scales=jnp.float16),
    "w4a16-zeros": dict(scheme="W4A16_ASYM", zeros=jnp.uint8),
    "w4a16-offsets": dict(scheme="W4A16", zeros=jnp.bfloat16),
    "w8a16": dict(scheme="W8A16"),
    "w8a16-zeros": dict(scheme="W8A16", zeros=jnp.uint8),
    "w8a16-offsets": dict(scheme="W8A16", zeros=jnp.float32),
    "w8a8": dict(scheme="W8A8", scales=jnp.float32),
    "w8a8-zeros": dict(scheme="W8A8", zeros=jnp.uint8),
    "w4a8": dict(scheme="W4A8", scales=jnp.float32),
    "w4a8-zeros": dict(scheme="W4A8", zeros=jnp.uint8),
    "w4a8-offsets": dict(scheme="W4A8", zeros=jnp.float32),
    "w4a8-two-level": dict(scheme="W4A8", scales=jnp.float32, two_level=True),
}


def random_weight(
    rng: np.random.Generator, kind: str, k: int, n: int, group_size: int | None = None, perm: bool = False
) -> QTensor:
    """A weight of that form with random codes, scales and zeros; values of about 1."""
    form = dict(scales=jnp.bfloat16, zeros=None, two_level=False) | KINDS[kind]
    codes = 2 ** SCHEMES[form["scheme"]].bits
    groups = 1 if group_size is None else -(-k // group_size)
    u = rng.integers(0, codes, (k, n), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, (1 if form["two_level"] else groups, n)) / (128 if form["two_level"] else codes / 2)
    zeros = subscales = None
    if form["zeros"] == jnp.uint8:
        zeros = jnp.asarray(rng.integers(0, codes, (groups, n), dtype=np.uint8))
    elif form["zeros"] is not None:
        zeros = jnp.asarray(rng.normal(size=(groups, n)), form["zeros"])
    if form["two_level"]:
        s = rng.integers(1, 17, (groups, n))
        subscales = jnp.asarray(np.stack((s, rng.integers(0, 256 - 15 * s)), axis=-1), jnp.uint8)
    return QTensor.from_codes(
        jnp.asarray(u),
        jnp.asarray(scales, form["scales"]),
        scheme=form["scheme"],
        group_size=group_size,
        zeros=zeros,
        subscales=subscales,
        perm=jnp.asarray(rng.permutation(k), jnp.int32) if perm else None,
    )


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight in float64: its values, and the magnitudes that its float32 form is computed from."""

    values: np.ndarray  # (k, n)
    magnitudes: np.ndarray  # (k, n)
    steps: np.ndarray  # (k, n): what the scales multiply


def weight(w: QTensor) -> Weight:
    """The formulas of ``QTensor``, one row at a time."""
    k, n = w.shape
    u = np.asarray(w.codes()).astype(np.float64)
    floats = (None if a is None else np.asarray(a).astype(np.float64) for a in (w.scales, w.zeros, w.subscales))
    scales, zeros, subscales = floats
    values, magnitudes, steps = np.zeros((k, n)), np.zeros((k, n)), np.zeros((k, n))
    for row in range(k):
        group = 0 if w.group_size is None else row // w.group_size
        scale = scales[0 if subscales is not None else group, :n]
        offset = np.zeros(n)
        step = u[row]
        if subscales is not None:
            step = step * subscales[group, :n, 0] + subscales[group, :n, 1] - 128
        elif zeros is None:
            step = step - 2 ** (w.bits - 1)
        elif w.zeros.dtype == jnp.uint8:
            step = step - zeros[group, :n]
        else:
            offset = zeros[group, :n]
        logical = row if w.perm is None else int(w.perm[row])
        values[logical] = scale * step + offset
        magnitudes[logical] = np.abs(scale * step) + np.abs(offset)
        steps[logical] = step
    return Weight(values, magnitudes, steps)


def per_token(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition of ``jaxq.quantize_per_token``, for finite x."""
    x = np.asarray(x).astype(np.float32)
    absmax = np.max(np.abs(x), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale, reciprocal = absmax / np.float32(127), np.float32(127) / absmax
        has_codes = absmax >= 2.0**-117
        q = np.where(has_codes, np.rint(x * reciprocal), 0)
    return q.astype(np.int8), np.where(has_codes, scale, np.float32(1))


def product(
    x: jax.Array,
    w: QTensor,
    bias: jax.Array | None = None,
    x_scale: jax.Array | None = None,
    *,
    out_dtype: str,
    relu: bool = False,
    shards: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The exact product ``(..., n)``, and a bound on the distance of a correct result of ``out_dtype``.

    Each output is a sum of k products of magnitude ``|x| |w|``, added one by one at worst: k roundings of partial sums
    no larger than ``|x| @ |w|``. Sums of integers are exact; then only the scales round, in each of ``shards`` of k.
    """
    facts, form = SCHEMES[w.scheme], weight(w)
    if facts.act_bits == 16:
        x = np.asarray(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x).astype(np.float64)
        scale = np.ones((*x.shape[:-1], 1))
    elif x.dtype == jnp.int8:
        scale = np.asarray(x_scale).astype(np.float64).reshape(*x.shape[:-1], 1)
        x = np.asarray(x).astype(np.float64)
    else:
        q, scale = per_token(x)
        x, scale = q.astype(np.float64), scale.astype(np.float64)
    y = scale * (x @ form.values)
    offsets = w.zeros is not None and w.zeros.dtype != jnp.uint8
    size = scale * (np.abs(x) @ form.magnitudes)
    if facts.act_bits == 8 and w.scales.shape[0] == 1 and not offsets:
        # Each shard rounds int32 to float32 and twice for its scales (one to spare), and then the sum rounds.
        error = 4 * EPS * np.abs(y) if shards == 1 else (shards + 4) * EPS * size
    else:
        error = (x.shape[-1] + 4) * EPS * size
    if bias is not None:
        y = y + np.asarray(bias).astype(np.float64)
        error = error + EPS * np.abs(y)
    if relu:
        y = np.maximum(y, 0)
    info = jnp.finfo(out_dtype)
    return y, error + float(info.eps) * (np.abs(y) + error) / 2 + float(info.smallest_subnormal)


def check(actual: jax.Array, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Asserts that a result is within the bound of ``product``, everywhere."""
    y, bound = expected
    assert actual.shape == y.shape
    excess = np.abs(np.asarray(actual).astype(np.float64) - y) - bound
    assert not np.isnan(excess).any(), "NaN in the result"
    if excess.size:
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        assert excess[worst] <= 0, f"{worst}: {actual[worst]} is not {y[worst]} within {bound[worst]}"
