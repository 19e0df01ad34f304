"""Writes the measured table of the README from a results file.

python -m benchmarks.table benchmarks/results/h200/gemm.jsonl
"""

import json
import pathlib
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"


def table(rows: list[dict]) -> str:
    """Markdown: microseconds of a call inside ``jax.jit``, and the ratio to ``jnp.dot`` in bfloat16."""
    gemms = [row for row in rows if row["op"] == "matmul"]
    times = {(row["n"], row["k"], row["scheme"], row["m"]): row["us"] for row in gemms}
    tokens = sorted({row["m"] for row in gemms})
    schemes = list(dict.fromkeys(row["scheme"] for row in gemms))
    facts = rows[0]
    lines = [
        "Microseconds a call inside `jax.jit`, and in brackets how many times faster than `jnp.dot` in bfloat16; "
        f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, jax {facts['jax']}, {facts['date']}. "
        "Cold L2, quantization of activations included; `python -m benchmarks.gemm`.",
        "",
        "| n x k | scheme | " + " | ".join(f"m = {m}" for m in tokens) + " |",
        "|---" * (len(tokens) + 2) + "|",
    ]
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in gemms):
        for scheme in schemes:
            cells = []
            for m in tokens:
                us, bf16 = times.get((n, k, scheme, m)), times.get((n, k, "bf16", m))
                ratio = "" if scheme == "bf16" or not us or not bf16 else f" ({bf16 / us:.2f})"
                cells.append("" if us is None else f"{us:.1f}{ratio}")
            if any(cells):  # a run may have been cut short
                lines.append(f"| {n} x {k} | {scheme} | " + " | ".join(cells) + " |")
    memory = [row for row in rows if row["op"] != "matmul"]
    if memory:
        copy = next(row["bytes"] / row["us"] for row in memory if row["op"] == "copy")
        lines += ["", "| 64 MB and more | TB/s | of a copy |", "|---|---|---|"]
        for row in memory:
            rate = row["bytes"] / row["us"]
            lines.append(f"| {row['op']} | {rate / 1e6:.2f} | {rate / copy:.0%} |")
    return "\n".join(lines)


def main() -> None:
    rows = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    text = README.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    README.write_text(f"{before}{START}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
