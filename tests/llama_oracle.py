"""A Llama in float64 numpy, written apart from jaxq/models, and tiny checkpoints with random weights for it.

Weights go by their Hugging Face names, ``(n, k)``. A layer may be a QTensor instead: then its codes are decoded here,
and its activations rounded as the scheme says.
"""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxq.models import LlamaConfig
from jaxq.qtensor import SCHEMES, QTensor

SMALL = LlamaConfig(
    vocab_size=260, d_model=72, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=12, d_ff=88, dtype=jnp.float32
)
_BLEND = (64 * 5e5 ** (-1 / 6) / (2 * np.pi) - 1) / 3  # of the only frequency between 1 and 4 turns in 64 tokens
FAMILIES = {
    "llama": SMALL,
    "llama3": dataclasses.replace(
        SMALL, rope_theta=5e5, rope_divisors=(1, 1 / ((1 - _BLEND) / 8 + _BLEND), 8, 8, 8, 8)
    ),
    "mistral": dataclasses.replace(SMALL, sliding_window=5),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True, tied_head=True, rope_theta=1e6),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, head_dim=20, norm_eps=1e-6),
}


def random_weights(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights large enough that attention and logits are far from uniform."""
    rng = np.random.default_rng(seed)
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(n: int, k: int) -> np.ndarray:
        return (rng.standard_normal((n, k)) * 1.5 / np.sqrt(k)).astype(np.float32)

    def vector(n: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.standard_normal((config.vocab_size, config.d_model)).astype(np.float32),
        "model.norm.weight": vector(config.d_model),
    }
    if config.tied_head:
        weights["model.embed_tokens.weight"] *= 2 / np.sqrt(config.d_model, dtype=np.float32)
    else:
        weights["lm_head.weight"] = matrix(config.vocab_size, config.d_model)
    for i in range(config.num_layers):
        layer = {
            "input_layernorm.weight": vector(config.d_model),
            "post_attention_layernorm.weight": vector(config.d_model),
            "self_attn.q_proj.weight": matrix(width, config.d_model),
            "self_attn.k_proj.weight": matrix(kv_width, config.d_model),
            "self_attn.v_proj.weight": matrix(kv_width, config.d_model),
            "self_attn.o_proj.weight": matrix(config.d_model, width),
            "mlp.gate_proj.weight": matrix(config.d_ff, config.d_model),
            "mlp.up_proj.weight": matrix(config.d_ff, config.d_model),
            "mlp.down_proj.weight": matrix(config.d_model, config.d_ff),
        }
        if config.qkv_bias:
            layer |= {
                f"self_attn.{p}_proj.bias": vector(w) for p, w in zip("qkv", (width, kv_width, kv_width), strict=True)
            }
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": vector(config.head_dim)}
            layer |= {"self_attn.k_norm.weight": vector(config.head_dim)}
        weights |= {f"model.layers.{i}.{name}": array for name, array in layer.items()}
    return weights


def logits(config: LlamaConfig, weights: dict[str, np.ndarray | QTensor], tokens: list[int]) -> np.ndarray:
    """Float64 ``(s, vocab_size)``: loops over heads and positions, as the papers write it."""
    s, groups = len(tokens), config.num_heads // config.num_kv_heads

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps) * weights[name]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        w = weights[f"{name}.weight"]
        y = _quantized(x, w) if isinstance(w, QTensor) else x @ np.float64(w).T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turn(x: np.ndarray) -> np.ndarray:  # (s, head_dim), as complex numbers
        half = config.head_dim // 2
        divisors = np.ones(half) if config.rope_divisors is None else np.array(config.rope_divisors)
        angles = np.arange(s)[:, None] * config.rope_theta ** (-np.arange(half) / half) / divisors
        pairs = x[:, 0::2] + 1j * x[:, 1::2] if config.rope_interleaved else x[:, :half] + 1j * x[:, half:]
        pairs = pairs * np.exp(1j * angles)
        if config.rope_interleaved:
            return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = np.float64(weights["model.embed_tokens.weight"])[tokens]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm.weight")
        q, k, v = (linear(y, f"{layer}.self_attn.{p}_proj").reshape(s, -1, config.head_dim) for p in "qkv")
        if config.qk_norm:
            q, k = norm(q, f"{layer}.self_attn.q_norm.weight"), norm(k, f"{layer}.self_attn.k_norm.weight")
        heads = np.zeros((s, config.num_heads, config.head_dim))
        for h in range(config.num_heads):
            scores = turn(q[:, h]) @ turn(k[:, h // groups]).T / np.sqrt(config.head_dim)
            for at in range(s):
                first = 0 if config.sliding_window is None else max(0, at - config.sliding_window + 1)
                seen = np.exp(scores[at, first : at + 1] - scores[at, first : at + 1].max())
                heads[at, h] = seen / seen.sum() @ v[first : at + 1, h // groups]
        x = x + linear(heads.reshape(s, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm.weight")
        gate = linear(y, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    x = norm(x, "model.norm.weight")
    return x @ np.float64(weights["model.embed_tokens.weight"]).T if config.tied_head else linear(x, "lm_head")


def _quantized(x: np.ndarray, w: QTensor) -> np.ndarray:
    """``x @ w`` with the weight as its codes say and the activations as its scheme rounds them."""
    k, n = w.global_shape
    group = np.arange(k) // (w.group_size or k)
    u, scales = np.float64(w.codes()), np.float64(w.scales)[:, :n]
    if w.subscales is not None:
        sub = np.float64(w.subscales)[group, :n]
        decoded = scales * (u * sub[..., 0] + sub[..., 1] - 128)
    else:
        zeros = 2 ** (w.bits - 1) if w.zeros is None else np.float64(w.zeros)[group, :n]
        decoded = scales[group] * (u - zeros)
    if SCHEMES[w.scheme].act_bits == 16:
        return np.float64(x.astype(ml_dtypes.bfloat16)) @ decoded
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.rint(x / scale) @ decoded * scale


def perplexity(config: LlamaConfig, weights: dict[str, np.ndarray | QTensor], tokens: list[int]) -> float:
    """Of one window."""
    scores = logits(config, weights, tokens)[:-1]
    top = scores.max(axis=-1, keepdims=True)
    log_sums = top[:, 0] + np.log(np.exp(scores - top).sum(axis=-1))
    return float(np.exp(np.mean(log_sums - scores[np.arange(len(tokens) - 1), tokens[1:]])))


def huggingface_json(family: str, config: LlamaConfig) -> dict[str, object]:
    """The ``config.json`` of a model."""
    found: dict[str, object] = {
        "model_type": "llama" if family == "llama3" else family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_length,
    }
    if family == "llama3":  # keeps frequencies of more than 4 turns in 64 tokens, divides those of less than 1 by 8
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    return found


def write_huggingface(
    folder, family: str, config: LlamaConfig, weights: dict[str, np.ndarray], shards: int = 1
) -> None:
    """Writes ``config.json``, safetensors and a byte-level ``tokenizer.json``."""
    (folder / "config.json").write_text(json.dumps(huggingface_json(family, config)))
    byte_tokens().save(str(folder / "tokenizer.json"))
    if shards == 1:
        safetensors.numpy.save_file(weights, folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        safetensors.numpy.save_file({n: w for n, w in weights.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def byte_tokens() -> Tokenizer:
    """A tokenizer of 256 bytes and no merges, in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
