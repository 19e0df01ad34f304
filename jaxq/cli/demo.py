"""``python -m jaxq demo``: quantizes a language model to each scheme and shows what that costs and saves."""

import argparse
import collections
import dataclasses
import importlib.resources
import json
import pathlib
import platform
import re
import sys
import time
from collections.abc import Sequence

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from flax import nnx

import jaxq
from jaxq.models import Decoder, Llama, Tokenizer, load, perplexity, smollm2
from jaxq.nnx import QuantDense

WINDOW = 512  # tokens of context that the perplexity is measured with


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to quantize the layers; see ``jaxq.quantize_tensor``."""

    scheme: str
    group_size: int | str | None = "default"
    exact_scales: bool = False


VARIANTS = {
    "W8A16": Variant("W8A16"),
    "W8A8": Variant("W8A8"),
    "W4A16": Variant("W4A16"),
    "W4A16_ASYM": Variant("W4A16_ASYM"),
    "W4A8-channel": Variant("W4A8", None),
    "W4A8-g64": Variant("W4A8", 64),
    "W4A8-g64-exact": Variant("W4A8", 64, exact_scales=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one variant.

    Attributes:
      name: "float", or a name of ``VARIANTS``.
      weight_bytes: of the blocks' linear layers, scales and padding included.
      bits_per_weight: the same in bits, per weight.
      perplexity: of the demo's text, in windows of ``WINDOW`` tokens.
      text: greedy answer to the prompt.
      tokens_per_second: of that answer, one sequence, without the prompt and compilation.
      implementation: "xla" for float; "cuda" kernels or the "reference" for the quantized.
      custom_calls: how often the compiled step calls each of jaxq's kernels.
    """

    name: str
    weight_bytes: int
    bits_per_weight: float
    perplexity: float
    text: str
    tokens_per_second: float
    implementation: str
    custom_calls: dict[str, int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _parse(argv)
    try:
        path = smollm2.fetch() if args.model is None else args.model
        on_gpu = jax.default_backend() == "gpu"
        dtype = jnp.bfloat16 if on_gpu else jnp.float32
        model, tokenizer = load(path, dtype=dtype)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    max_tokens = args.max_tokens or (64 if on_gpu else 24)
    text = tokenizer.encode(prose())
    prompt = tokenizer.encode_chat(args.prompt)
    print(f"{pathlib.Path(path).name} in {jnp.dtype(dtype).name} on {jax.devices()[0].device_kind}")
    print(f"perplexity of {len(text)} tokens in windows of {WINDOW}; greedy answers to {args.prompt!r}\n")

    rows = []
    for name in ["float", *args.schemes]:
        started = time.perf_counter()
        variant = model if name == "float" else quantize(model, VARIANTS[name])
        rows.append(measure(name, variant, tokenizer, text, prompt, max_tokens))
        print(f"{name} ({time.perf_counter() - started:.0f} s): {rows[-1].text}\n", flush=True)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(_report(path, args.prompt, len(text), rows), indent=1) + "\n", encoding="utf-8")
    return 0


def prose() -> str:
    """The text to predict: four pages on everyday matters, written for this project, so in no model's training data."""
    return importlib.resources.files("jaxq.cli").joinpath("prose.txt").read_text(encoding="utf-8")


def quantize(model: Llama, variant: Variant) -> Llama:
    """The model with its blocks' linear layers quantized; embedding and head stay as they are."""
    if not variant.exact_scales:
        ignore = [] if model.config.tied_head else ["lm_head"]
        quantized: Llama = jaxq.quantize(model, variant.scheme, group_size=variant.group_size, ignore=ignore)
        return quantized
    model = nnx.clone(model)
    for block in model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(vars(part).items()):
                if isinstance(linear, nnx.Linear):
                    weight = jaxq.quantize_tensor(
                        linear.kernel[...], variant.scheme, group_size=variant.group_size, exact_scales=True
                    )
                    bias = None if linear.bias is None else linear.bias[...]
                    setattr(part, name, QuantDense.from_weight(weight, bias, dtype=linear.dtype))
    return model


def measure(
    name: str, model: Llama, tokenizer: Tokenizer, text: Sequence[int], prompt: Sequence[int], max_tokens: int
) -> Row:
    """Measures one variant; for the arguments see ``Row``."""
    layers = [
        m for block in model.layers for _, m in nnx.iter_modules(block) if isinstance(m, (nnx.Linear, QuantDense))
    ]
    weights = [m.weight if isinstance(m, QuantDense) else m.kernel[...] for m in layers]
    nbytes = sum(w.nbytes for w in weights)
    decoder = Decoder(model, max_length=len(prompt) + max_tokens, blockwise_steps=jax.default_backend() == "cpu")
    decoder.generate([prompt], max_tokens=2)  # compiles
    stream = decoder.stream([prompt], max_tokens=max_tokens)
    tokens = [next(stream).block_until_ready()]
    started = time.perf_counter()
    tokens += stream
    tokens[-1].block_until_ready()
    seconds = time.perf_counter() - started
    answer = np.concatenate(tokens).tolist()
    end = next((i for i, token in enumerate(answer) if token in tokenizer.stop_tokens), len(answer))
    on_cuda = jaxq.has_cuda() and jax.default_backend() == "gpu"
    compiled = decoder.lower_step().compile().as_text() if on_cuda else None
    calls = re.findall(r'custom_call_target="(jaxq_\w+)"', compiled or "")
    return Row(
        name=name,
        weight_bytes=nbytes,
        bits_per_weight=8 * nbytes / sum(m.in_features * m.out_features for m in layers),
        perplexity=perplexity(model, text, window=WINDOW),
        text=tokenizer.decode(answer[:end]),
        tokens_per_second=(max_tokens - 1) / seconds,
        implementation="xla" if name == "float" else "cuda" if on_cuda else "reference",
        custom_calls=dict(collections.Counter(calls)),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text; the perplexity also relative to the first row's."""
    lines = [f"{'':15} {'weights':>10} {'bits':>6} {'perplexity':>16} {'tokens/s':>9}  runs on"]
    for row in rows:
        change = "" if row is rows[0] else f" ({row.perplexity / rows[0].perplexity - 1:+.1%})"
        lines.append(
            f"{row.name:15} {row.weight_bytes / 1e6:>7.1f} MB {row.bits_per_weight:>6.2f} "
            f"{row.perplexity:>7.2f}{change:>9} {row.tokens_per_second:>9.1f}  {row.implementation}"
        )
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def schemes(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in VARIANTS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(VARIANTS)}")
        return names

    def at_least_two(text: str) -> int:
        if (number := int(text)) < 2:
            raise argparse.ArgumentTypeError(f"{number} must be at least 2")
        return number

    parser = argparse.ArgumentParser(prog="python -m jaxq demo", description=__doc__.split(": ", 1)[1])
    parser.add_argument(
        "--schemes",
        type=schemes,
        default=list(VARIANTS),
        metavar="A,B",
        help=f"of {', '.join(VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--model",
        type=pathlib.Path,
        metavar="PATH",
        help="a GGUF file, or a Hugging Face directory, of the Llama, Mistral, Qwen2 or Qwen3 family "
        "(default: SmolLM2-135M-Instruct, downloaded once)",
    )
    parser.add_argument(
        "--max-tokens", type=at_least_two, metavar="N", help="of the answers (default: 24, or 64 on a GPU)"
    )
    parser.add_argument("--prompt", default="Why is the sky blue?", metavar="TEXT", help="(default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results there as well")
    return parser.parse_args(argv)


def _report(path: pathlib.Path, prompt: str, num_tokens: int, rows: Sequence[Row]) -> dict[str, object]:
    device = jax.devices()[0]
    versions = {module.__name__: module.__version__ for module in (jaxq, jax, jaxlib, flax, np)}
    return {
        "versions": versions | {"python": platform.python_version()},
        "device": {"platform": device.platform, "kind": device.device_kind, "has_cuda_kernels": jaxq.has_cuda()},
        "model": path.name,
        "prompt": prompt,
        "perplexity_tokens": num_tokens,
        "perplexity_window": WINDOW,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
