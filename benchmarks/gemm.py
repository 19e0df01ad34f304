"""Times the matmuls of every scheme beside bfloat16, and the memory-bound operations beside a copy.

python -m benchmarks.gemm RESULTS.jsonl [--m 1,16] [--nk 4096x4096] [--kernels]
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxq
from benchmarks.timing import environment, kernel_us, wall_us

# Layers of Llama 3 8B: q/k/v, output, gate and up, down projection.
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
TOKENS = [1, 16, 64, 256, 1024, 4096]
FORMATS: dict[str, tuple[str, int | None]] = {
    "bf16": ("bf16", None),
    "w4a16_g128": ("W4A16", 128),
    "w8a16_channel": ("W8A16", None),
    "w8a8": ("W8A8", None),
    "w4a8_channel": ("W4A8", None),
    "w4a8_g64": ("W4A8", 64),
}


def random_weight(seed: int, scheme: str, group_size: int | None, k: int, n: int) -> Any:
    keys = jax.random.split(jax.random.key(seed), 4)
    if scheme == "bf16":
        return jax.random.normal(keys[0], (k, n), jnp.bfloat16)
    bits = jaxq.SCHEMES[scheme].bits
    codes = jax.random.bits(keys[0], (k, n), jnp.uint8) >> jnp.uint8(8 - bits)
    groups = 1 if group_size is None else k // group_size
    two_level = scheme == "W4A8" and group_size is not None
    scales = jax.random.uniform(keys[1], (1 if two_level else groups, n), minval=0.5, maxval=1.5) / 2**bits
    subscales = None
    if two_level:
        s = jax.random.randint(keys[2], (groups, n), 1, 17)
        b = (jax.random.uniform(keys[3], (groups, n)) * (256 - 15 * s)).astype(jnp.int32)
        subscales = jnp.stack((s, b), axis=-1).astype(jnp.uint8)
    if scheme == "W4A16":
        scales = scales.astype(jnp.bfloat16)
    return jaxq.QTensor.from_codes(codes, scales, scheme=scheme, group_size=group_size, subscales=subscales)


def multiply(x: jax.Array, w: Any) -> jax.Array:
    return jaxq.matmul(x, w, implementation="cuda") if isinstance(w, jaxq.QTensor) else x @ w


def check(x: jax.Array, w: Any) -> None:
    """Refuses to time a wrong kernel."""
    if isinstance(w, jaxq.QTensor):
        got = multiply(x, w).astype(jnp.float32)
        want = jaxq.matmul(x, w, implementation="reference").astype(jnp.float32)
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert error < 1e-2, f"{w.scheme}: relative error {error}"


def time_gemms(
    formats: list[str],
    shapes: list[tuple[int, int]],
    tokens: list[int],
    profiles: bool,
    emit: Callable[..., None],
) -> None:
    rng = np.random.default_rng(0)
    for n, k in shapes:
        for name in formats:
            scheme, group_size = FORMATS[name]
            w = random_weight(0, scheme, group_size, k, n)
            nbytes = sum(a.nbytes for a in jax.tree.leaves(w))
            copies = max(4, min(40, int(300e6 // nbytes) + 1))
            weights = [jax.tree.map(lambda a: a + 0, w) for _ in range(copies)]
            run = jax.jit(lambda x, weights: [multiply(x, w) for w in weights])
            for m in tokens:
                x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
                check(x[: min(m, 64)], w)
                call = lambda run=run, x=x, weights=weights: run(x, weights)  # noqa: E731
                us = wall_us(call) / copies
                device = kernel_us(call) if profiles else None
                emit(
                    op="matmul",
                    scheme=name,
                    group_size=group_size,
                    m=m,
                    n=n,
                    k=k,
                    us=us,
                    kernel_us=device and device / copies,
                    bytes=nbytes + 2 * m * (k + n),
                )
            del weights


def time_memory(emit: Callable[..., None]) -> None:
    """Operations that only move memory: 64 MB and more."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8192, 4096)), jnp.bfloat16)
    xs = [x + jnp.bfloat16(i) for i in range(8)]
    operations: dict[str, tuple[Callable[[Any], Any], list[Any], int]] = {
        "copy": (lambda x: x + jnp.bfloat16(1), xs, 4 * x.size),
        "quantize_per_token": (lambda x: jaxq.quantize_per_token(x, implementation="cuda"), xs, 3 * x.size),
    }
    for name in ("w4a16_g128", "w8a16_channel", "w8a8", "w4a8_channel", "w4a8_g64"):
        w = random_weight(0, *FORMATS[name], 8192, 4096)
        nbytes = sum(a.nbytes for a in jax.tree.leaves(w))
        ws = [jax.tree.map(lambda a: a + 0, w) for _ in range(8)]
        operations[f"dequantize {name}"] = (
            lambda w: jaxq.dequantize(w, implementation="cuda"),
            ws,
            nbytes + 2 * 8192 * 4096,
        )
    for name, (operation, inputs, nbytes) in operations.items():
        run = jax.jit(lambda inputs, operation=operation: [operation(a) for a in inputs])
        call = lambda run=run, inputs=inputs: run(inputs)  # noqa: E731
        us, device = wall_us(call) / len(inputs), kernel_us(call)
        emit(op=name, m=8192, k=4096, us=us, kernel_us=device and device / len(inputs), bytes=nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--nk", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--kernels", action="store_true", help="also read each kernel's time from the profiler")
    args = parser.parse_args()
    facts = environment()
    with open(args.results, "w") as file:

        def emit(**row: Any) -> None:
            row = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
            file.write(json.dumps(row | facts) + "\n")
            file.flush()
            rate = row["bytes"] / row["us"] / 1e6
            kernel = "" if row["kernel_us"] is None else f" ({row['kernel_us']:.1f} in kernels)"
            shape = f"{row['n']}x{row['k']} m={row['m']}" if "n" in row else ""
            print(
                f"{row.get('scheme', row['op']):24} {shape:22} {row['us']:9.1f} us{kernel} {rate:.2f} TB/s", flush=True
            )

        time_memory(emit)
        shapes = [tuple(int(v) for v in nk.split("x")) for nk in args.nk.split(",")]
        time_gemms(args.formats.split(","), shapes, [int(v) for v in args.m.split(",")], args.kernels, emit)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
