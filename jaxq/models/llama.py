"""A decoder of the Llama family in Flax NNX: Llama, Mistral, Qwen2 and Qwen3 differ only in `LlamaConfig`.

Modules are named as in Hugging Face checkpoints (``layers.0.self_attn.q_proj``), so that one pattern picks a layer here
and there. Every matmul of a block is an ``nnx.Linear``, which is what ``jaxq.quantize`` replaces. `load.py` fills a
model from a file, `generate.py` runs it token by token.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and variants of a model.

    Attributes:
      vocab_size: rows of the embedding, ``(vocab_size, d_model)``.
      d_model: width of the residual stream.
      num_layers: blocks.
      num_heads: query heads; ``q_proj`` is ``(d_model, num_heads * head_dim)``.
      num_kv_heads: key and value heads, a divisor of num_heads; ``k_proj`` is ``(d_model, num_kv_heads * head_dim)``.
      head_dim: width of a head, even; not necessarily ``d_model / num_heads``.
      d_ff: width of the MLP; ``gate_proj`` and ``up_proj`` are ``(d_model, d_ff)``, ``down_proj`` is the transpose.
      norm_eps: added to the mean square in RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_divisors: None, or ``head_dim / 2`` numbers that divide the rotary frequencies (Llama 3.1, linear scaling).
      rope_interleaved: rotates pairs ``(2 i, 2 i + 1)``, as in GGUF files of Llama; else ``(i, i + head_dim / 2)``.
      tied_head: the head is the transposed embedding; else a layer ``lm_head`` of its own.
      qkv_bias: q, k and v have biases (Qwen2).
      qk_norm: an RMSNorm on each head of q and k (Qwen3).
      sliding_window: None, or how many positions, its own included, a token sees (Mistral).
      max_length: positions that the model was trained for.
      dtype: of weights and activations, bfloat16 or float32; norms, softmax and logits are float32.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] | None = None
    rope_interleaved: bool = False
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    max_length: int = 4096
    dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self) -> None:
        """Raises ValueError where sizes contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"LlamaConfig: num_heads={self.num_heads} must be a multiple of {self.num_kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim={self.head_dim} must be even, rotary embeddings turn pairs")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ValueError(
                f"LlamaConfig: {len(self.rope_divisors)} rope_divisors must be head_dim / 2 = {self.head_dim // 2}"
            )
        if jnp.dtype(self.dtype) not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"LlamaConfig: dtype={jnp.dtype(self.dtype).name} must be bfloat16 or float32")


class LayerCache(NamedTuple):
    """Keys (already rotated) and values of one layer, each ``(b, num_kv_heads, length, head_dim)``."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]  # one a layer


class Context(NamedTuple):
    """What all blocks know of the tokens.

    Attributes:
      positions: int32 ``(b, s)``.
      cos, sin: of the rotary angles there, float32 ``(b, s, 1, head_dim / 2)``.
      mask: bool ``(b, s, keys)``, True where a token sees a key.
    """

    positions: jax.Array
    cos: jax.Array
    sin: jax.Array
    mask: jax.Array


class Llama(nnx.Module):
    """The decoder. ``Llama(config, rngs=nnx.Rngs(0))`` has random weights; under ``nnx.eval_shape``, shapes only."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Draws all weights from N(0, 0.02)."""
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=config.dtype,
            param_dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tied_head:
            self.lm_head = _linear(config, config.d_model, config.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits, float32 ``(b, s, vocab_size)``, for the token after each of ``tokens``, int32 ``(b, s)``."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.features(tokens, positions)[0])

    def features(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Runs the blocks and the last norm.

        Args:
          tokens: int32 ``(b, s)``.
          positions: int32 ``(b, s)``, where each token stands in its sequence.
          cache: None, or keys and values to add those of ``tokens`` to. With it, several tokens must be the beginning
            of their sequences (they see each other only), while a single one sees everything up to its position.

        Returns:
          Features ``(b, s, d_model)`` in the model's dtype, and the cache as it is now.
        """
        x, context = self.enter(tokens, positions, cache)
        caches: list[LayerCache] = []
        for i, block in enumerate(self.layers):
            x, layer_cache = block(x, context, None if cache is None else cache[i])
            caches += [] if layer_cache is None else [layer_cache]
        return self.norm(x), None if cache is None else tuple(caches)

    def enter(self, tokens: jax.Array, positions: jax.Array, cache: Cache | None) -> tuple[jax.Array, "Context"]:
        """What the first block is given; arguments as of ``features``."""
        config = self.config
        one_step = cache is not None and tokens.shape[1] == 1
        keys = jnp.arange(cache[0].k.shape[2])[None] if one_step and cache is not None else positions
        distance = positions[:, :, None] - keys[:, None, :]
        mask = distance >= 0
        if config.sliding_window is not None:
            mask &= distance < config.sliding_window
        return self.embed_tokens(tokens), Context(positions, *rope_rotation(config, positions), mask)

    def logits(self, features: jax.Array) -> jax.Array:
        """Logits, float32 ``(..., vocab_size)``, of features ``(..., d_model)``."""
        if not self.config.tied_head:
            return self.lm_head(features).astype(jnp.float32)
        return jnp.dot(features, self.embed_tokens.embedding[...].T, preferred_element_type=jnp.float32)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Builds the four parts."""
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, context: Context, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        """``x`` is ``(b, s, d_model)``; returns the new x and cache."""
        attended, cache = self.self_attn(self.input_layernorm(x), context, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Attention(nnx.Module):
    """Causal attention with grouped queries: ``num_heads / num_kv_heads`` query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Builds the four projections, and the two norms where the config has them."""
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = _linear(config, config.d_model, width, use_bias=config.qkv_bias, rngs=rngs)
        self.k_proj = _linear(config, config.d_model, kv_width, use_bias=config.qkv_bias, rngs=rngs)
        self.v_proj = _linear(config, config.d_model, kv_width, use_bias=config.qkv_bias, rngs=rngs)
        self.o_proj = _linear(config, width, config.d_model, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def __call__(self, x: jax.Array, context: Context, cache: LayerCache | None) -> tuple[jax.Array, LayerCache | None]:
        """See ``Block``."""
        config = self.config
        b, s, _ = x.shape
        q = self.q_proj(x).reshape(b, s, config.num_heads, config.head_dim)
        k = self.k_proj(x).reshape(b, s, config.num_kv_heads, config.head_dim)
        v = self.v_proj(x).reshape(b, s, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(a, context.cos, context.sin, interleaved=config.rope_interleaved) for a in (q, k))
        if cache is not None:
            rows, at = jnp.arange(b)[:, None], context.positions
            cache = LayerCache(cache.k.at[rows, :, at].set(k), cache.v.at[rows, :, at].set(v))
        if cache is not None and s == 1:
            keys, values = cache
        else:
            keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return self.o_proj(attend(q, keys, values, context.mask)), cache


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        """Builds the three projections."""
        self.gate_proj = _linear(config, config.d_model, config.d_ff, rngs=rngs)
        self.up_proj = _linear(config, config.d_model, config.d_ff, rngs=rngs)
        self.down_proj = _linear(config, config.d_ff, config.d_model, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``(..., d_model)`` to the same."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square and multiplies by a float32 weight, in float32; result as the input."""

    def __init__(self, features: int, eps: float):
        """Starts from weights of one."""
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``(..., features)`` to the same."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * jnp.expand_dims(self.scale[...], range(x.ndim - 1))).astype(x.dtype)


def init_cache(config: LlamaConfig, batch: int, length: int) -> Cache:
    """An empty cache for ``batch`` sequences of at most ``length`` tokens."""
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    return tuple(
        LayerCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers)
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention of queries ``(b, s, num_heads, head_dim)`` over ``t`` keys ``(b, num_kv_heads, t, head_dim)``.

    Args:
      q: queries.
      k: keys.
      v: values, of the keys' shape.
      mask: bool ``(b, s, t)``, True where a query sees a key.

    Returns:
      ``(b, s, num_heads * head_dim)``.
    """
    b, s, heads, head_dim = q.shape
    q = q.reshape(b, s, k.shape[1], heads // k.shape[1], head_dim)
    scores = jnp.einsum("bskgd,bktd->bkgst", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)  # a token sees itself at least
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgst,bktd->bskgd", weights, v).reshape(b, s, heads * head_dim)


def rope_rotation(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles at ``positions``; see ``Context``."""
    frequencies = config.rope_theta ** -(jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if config.rope_divisors is not None:
        frequencies = frequencies / jnp.asarray(config.rope_divisors, jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Turns the pairs of each head of ``x`` ``(b, s, heads, head_dim)``; see ``LlamaConfig.rope_interleaved``."""
    wide = x.astype(jnp.float32)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1 if interleaved else -2)
    return turned.reshape(x.shape).astype(x.dtype)


def _linear(config: LlamaConfig, k: int, n: int, *, use_bias: bool = False, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(0.02)
    return nnx.Linear(
        k, n, use_bias=use_bias, dtype=config.dtype, param_dtype=config.dtype, kernel_init=init, rngs=rngs
    )
