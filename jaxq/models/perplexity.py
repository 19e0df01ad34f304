"""How well a model predicts a text: the number by which quantized models are compared."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxq.models.blockwise import Blockwise
from jaxq.models.llama import Llama


def perplexity(model: Llama, tokens: Sequence[int], *, window: int = 512, batch: int = 8) -> float:
    """``exp`` of the mean cross entropy of ``tokens``, cut into windows that know nothing of each other.

    Args:
      model: float or quantized.
      tokens: of the text; each window's first token is not predicted.
      window: tokens in a window; the last one may be shorter.
      batch: windows in one call, of which there is one compilation; logits are made for one window at a time.

    Raises:
      ValueError: there are fewer than two tokens.
    """
    if len(tokens) < 2:
        raise ValueError(f"perplexity: {len(tokens)} tokens must be at least 2")
    count = -(-len(tokens) // window)
    batch = min(batch, count)
    text = np.zeros((-(-count // batch) * batch, window), np.int32)
    text.reshape(-1)[: len(tokens)] = tokens
    known = (np.arange(text.size) < len(tokens)).reshape(text.shape)
    graphdef, state = nnx.split(model)
    blocks = Blockwise(model)

    @jax.jit
    def loss(state: Any, features: jax.Array, tokens: jax.Array, known: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)

        def of_window(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            features, tokens, known = row
            scores = jax.nn.log_softmax(model.logits(features[:-1]), axis=-1)
            return -jnp.sum(jnp.take_along_axis(scores, tokens[1:, None], axis=1)[:, 0], where=known[1:])

        return jnp.sum(jax.lax.map(of_window, (features, tokens, known)))

    positions = jnp.broadcast_to(jnp.arange(window), (batch, window))
    total = 0.0
    for i in range(0, len(text), batch):
        tokens_now, known_now = jnp.asarray(text[i : i + batch]), jnp.asarray(known[i : i + batch])
        features, _ = blocks.features(tokens_now, positions)
        total += float(loss(state, features, tokens_now, known_now))
    return float(np.exp(total / known[:, 1:].sum()))
