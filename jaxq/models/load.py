"""Fills a `Llama` from a GGUF file or a Hugging Face directory, tensor by tensor."""

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from tqdm import tqdm

from jaxq.checkpoints.gguf import GGUFFile
from jaxq.checkpoints.huggingface import HuggingFaceDirectory
from jaxq.models.llama import Llama, LlamaConfig
from jaxq.models.tokenizer import Tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

_GGUF_NAMES = {  # of modules outside the blocks, and in a block
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(path: str | os.PathLike[str], *, dtype: DTypeLike = jnp.bfloat16) -> tuple[Llama, Tokenizer]:
    """Loads a model and its tokenizer.

    Args:
      path: a GGUF file, or a directory with ``config.json``, safetensors and ``tokenizer.json``, of one of the families
        Llama, Mistral, Qwen2 and Qwen3.
      dtype: of the model, bfloat16 or float32.

    Raises:
      FileNotFoundError: the path, or a file in the directory, is not there.
      ValueError: a file is damaged, or describes a model that `Llama` cannot express; the message names the file, what
        was found and what is needed.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        directory = HuggingFaceDirectory(path)
        config = huggingface_config(directory, dtype)
        return _fill(config, directory, lambda name: name), Tokenizer.from_huggingface(path)
    file = GGUFFile(path)
    return _fill(gguf_config(file, dtype), file, _gguf_name), Tokenizer.from_gguf(file)


def gguf_config(file: GGUFFile, dtype: DTypeLike) -> LlamaConfig:
    """The sizes that a GGUF file's metadata state; ValueError for other families."""
    family = file["general.architecture"]
    if family not in FAMILIES:
        raise ValueError(f"{file.path}: general.architecture={family!r} must be one of {', '.join(FAMILIES)}")

    def get(key: str, default: Any = None) -> Any:
        return file[f"{family}.{key}"] if default is None else file.metadata.get(f"{family}.{key}", default)

    heads, d_model = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", d_model // heads)
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: {family}.rope.scaling.type={scaling!r} must be 'none' or 'linear'")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file.path}: {family}.rope.dimension_count must be the whole head, {head_dim}")
    divisors = None
    if scaling == "linear":
        divisors = (float(get("rope.scaling.factor")),) * (head_dim // 2)
    if "rope_freqs.weight" in file.names:
        divisors = tuple(file.read("rope_freqs.weight").tolist())
    return LlamaConfig(
        vocab_size=len(file["tokenizer.ggml.tokens"]),
        d_model=d_model,
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=get("feed_forward_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        rope_divisors=divisors,
        rope_interleaved=family in ("llama", "mistral"),
        tied_head="output.weight" not in file.names,
        qkv_bias="blk.0.attn_q.bias" in file.names,
        qk_norm="blk.0.attn_q_norm.weight" in file.names,
        sliding_window=get("attention.sliding_window", 0) or None,
        max_length=get("context_length"),
        dtype=dtype,
    )


def huggingface_config(directory: HuggingFaceDirectory, dtype: DTypeLike) -> LlamaConfig:
    """The sizes that a ``config.json`` states; ValueError for other families and unsupported variants."""
    config, file = directory.config, directory.path / "config.json"

    def refuse(key: str, need: str) -> None:
        raise ValueError(f"{file}: {key}={config.get(key)!r} must be {need}")

    family = config.get("model_type")
    if family not in FAMILIES:
        refuse("model_type", f"one of {', '.join(FAMILIES)}")
    if "quantization_config" in config:
        refuse("quantization_config", "absent: a float checkpoint is needed here")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "'silu'")
    for key in ("mlp_bias", "use_sliding_window") + (("attention_bias",) if family != "qwen2" else ()):
        if config.get(key):
            refuse(key, "false")
    if config.get("partial_rotary_factor", 1) != 1:
        refuse("partial_rotary_factor", "1")

    def get(key: str) -> Any:
        if config.get(key) is None:
            raise ValueError(f"{file}: has no {key!r}, which the model needs")
        return config[key]

    heads, d_model = get("num_attention_heads"), get("hidden_size")
    head_dim = config.get("head_dim") or d_model // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        divisors = (float(rope["factor"]),) * (head_dim // 2)
    elif kind == "llama3":
        divisors = _llama3_divisors(rope, theta, head_dim)
    elif kind == "default":
        divisors = None
    else:
        raise ValueError(f"{file}: rope type {kind!r} must be 'default', 'linear' or 'llama3'")
    return LlamaConfig(
        vocab_size=get("vocab_size"),
        d_model=d_model,
        num_layers=get("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        d_ff=get("intermediate_size"),
        norm_eps=get("rms_norm_eps"),
        rope_theta=theta,
        rope_divisors=divisors,
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=config.get("sliding_window") if family == "mistral" else None,
        max_length=config.get("max_position_embeddings", 4096),
        dtype=dtype,
    )


def _llama3_divisors(rope: dict[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1: low frequencies are divided by ``factor``, high ones are not, those between by a blend."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - keep) / factor + keep)).tolist())


def _fill(config: LlamaConfig, source: GGUFFile | HuggingFaceDirectory, rename: Callable[[str], str]) -> Llama:
    """Builds the model without weights, then reads each where it belongs."""
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    slots, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [rename(_huggingface_name(path)) for path, _ in slots]
    ignored = {"rope_freqs.weight"} | ({"lm_head.weight"} if config.tied_head else set())
    extra = {n for n in source.names if not n.endswith("rotary_emb.inv_freq")} - set(names) - ignored
    if extra:
        raise ValueError(
            f"{source.path}: has {len(extra)} tensors that a model of this family has no place for, such as "
            f"{min(extra)!r}; use a checkpoint of one of {', '.join(FAMILIES)}"
        )
    arrays = []
    for name, (path, slot) in zip(
        tqdm(names, desc="load", unit="tensor", leave=False, disable=None), slots, strict=True
    ):
        array = source.read(name)
        if path[-2].key == "kernel":
            array = array.T
        if array.shape != slot.shape:
            raise ValueError(f"{source.path}: tensor {name!r} has shape {array.shape}, must be {slot.shape}")
        arrays.append(jnp.asarray(np.ascontiguousarray(array)).astype(slot.dtype))
    return nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, arrays))


def _huggingface_name(path: tuple[Any, ...]) -> str:
    """``(layers, 0, mlp, up_proj, kernel, .value)`` is ``model.layers.0.mlp.up_proj.weight``."""
    *module, leaf = (str(key.key) for key in path[:-1])
    prefix = "" if module[0] == "lm_head" else "model."
    return prefix + ".".join(module) + (".bias" if leaf == "bias" else ".weight")


def _gguf_name(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` is ``blk.0.ffn_up.weight``."""
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{leaf}"
    return f"{_GGUF_NAMES[module]}.{leaf}"
