"""Runs a `Llama` block by block: all blocks share one compiled program.

For calls that are few and long, such as prompts: it compiles in a small fraction of the whole model's time. The step
that makes a token is compiled whole, in `generate.py`, for there every launch counts.
"""

import functools
from typing import Any

import jax
from flax import nnx

from jaxq.models.llama import Cache, Context, LayerCache, Llama


class Blockwise:
    """A model's blocks, taken apart once."""

    def __init__(self, model: Llama):
        """Shares the model's arrays."""
        self._model = model
        self._blocks = [nnx.split(block) for block in model.layers]

    def features(
        self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """``Llama.features``, called outside of ``jax.jit``; the cache is donated."""
        x, context = self._model.enter(tokens, positions, cache)
        caches: list[LayerCache] = []
        for i, (graphdef, state) in enumerate(self._blocks):
            x, layer_cache = _block(graphdef, state, x, context, cache=None if cache is None else cache[i])
            caches += [] if layer_cache is None else [layer_cache]
        return self._model.norm(x), None if cache is None else tuple(caches)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("cache",))
def _block(
    graphdef: Any, state: Any, x: jax.Array, context: Context, *, cache: LayerCache | None
) -> tuple[jax.Array, LayerCache | None]:
    out: tuple[jax.Array, LayerCache | None] = nnx.merge(graphdef, state)(x, context, cache)
    return out
