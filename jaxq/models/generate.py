"""Runs a `Llama` token by token: a prompt fills the cache block by block, then one compiled step makes every token."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxq.models.blockwise import Blockwise
from jaxq.models.llama import Cache, Llama, init_cache

_PROMPT_STEP = 64  # prompts are padded to multiples of this, so that few lengths are compiled
_STOP_CHECK = 8  # steps between looks at the tokens: each look waits for the device


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is picked from the logits.

    Attributes:
      temperature: 0 takes the most likely token; otherwise logits are divided by it.
      top_k: None, or how many of the most likely tokens stay in the draw.
      top_p: None, or the probability, over 0 and up to 1, that the most likely tokens in the draw must reach together.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range."""
        if self.temperature < 0:
            raise ValueError(f"Sampling: temperature={self.temperature} must not be negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sampling: top_k={self.top_k} must be at least 1, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p={self.top_p} must be in (0, 1], or None")


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Picks one token, int32 ``(b,)``, for each row of float32 logits ``(b, vocab_size)``."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    ordered = -jnp.sort(-logits, axis=-1)
    if sampling.top_k is not None:
        last = ordered[:, min(sampling.top_k, logits.shape[-1]) - 1]
        logits = jnp.where(logits < last[:, None], -jnp.inf, logits)
        ordered = jnp.where(ordered < last[:, None], -jnp.inf, ordered)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the more likely tokens; 0 for the first
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1)
        logits = jnp.where(logits < least[:, None], -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


class Decoder:
    """A model ready to generate: its weights, and the step that is compiled once for all tokens."""

    def __init__(self, model: Llama, *, max_length: int | None = None, blockwise_steps: bool = False):
        """Takes the weights out of ``model``.

        Args:
          model: float or quantized.
          max_length: tokens that a cache holds, prompt and answer together; by default the model's own.
          blockwise_steps: compile steps block by block, as prompts are: a model of 30 layers starts about 20 times
            sooner, but each step then takes 30 launches. For a few tokens on a CPU.

        Raises:
          ValueError: ``max_length`` is more than the model was trained for (the default).
        """
        config = model.config
        max_length = config.max_length if max_length is None else max_length
        if max_length > config.max_length:
            raise ValueError(f"Decoder: {max_length=} must be at most the model's {config.max_length}")
        self._config, self.max_length = config, max_length
        graphdef, state = nnx.split(model)
        # PERF: a flat list of arrays, for flattening the nested state takes longer than dispatching a step.
        self._weights, treedef = jax.tree.flatten(state)
        self._blocks, self._blockwise_steps = Blockwise(model), blockwise_steps

        def merge(weights: list[jax.Array]) -> Llama:
            merged: Llama = nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))
            return merged

        @functools.partial(jax.jit, static_argnames=("sampling",))
        def pick(
            weights: list[jax.Array], features: jax.Array, lengths: jax.Array, key: jax.Array, *, sampling: Sampling
        ) -> tuple[jax.Array, jax.Array]:
            last = jnp.take_along_axis(features, lengths[:, None, None] - 1, axis=1)[:, 0]
            key, use = jax.random.split(key)
            return sample(merge(weights).logits(last), sampling, use), key

        @functools.partial(jax.jit, static_argnames=("sampling",), donate_argnames=("cache",))
        def step(
            weights: list[jax.Array],
            token: jax.Array,
            position: jax.Array,
            key: jax.Array,
            cache: Cache,
            *,
            sampling: Sampling,
        ) -> tuple[jax.Array, jax.Array, jax.Array, Cache | None]:
            features, new_cache = merge(weights).features(token[:, None], position[:, None], cache)
            token, key = pick(weights, features, jnp.ones_like(position), key, sampling=sampling)
            return token, position + 1, key, new_cache

        self._pick, self._step = pick, step

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = Sampling(),
        key: jax.Array | None = None,
    ) -> Iterator[jax.Array]:
        """Yields the next token of each sequence, int32 ``(b,)``, ``max_tokens`` times, without waiting for the device.

        Args:
          prompts: ``b`` lists of tokens, of any lengths.
          max_tokens: tokens to make.
          sampling: how to pick them.
          key: random key; needed unless the temperature is 0.

        Raises:
          ValueError: a prompt is empty, a prompt and its answer do not fit in the cache, or the key is missing.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        if lengths.size == 0 or lengths.min() < 1:
            raise ValueError(f"prompts: lengths {lengths.tolist()} must be at least 1, of one prompt or more")
        if lengths.max() + max_tokens > self.max_length:
            raise ValueError(
                f"prompts: {lengths.max()} tokens and {max_tokens=} must be at most max_length={self.max_length} "
                "together; shorten them, or build the Decoder with a larger max_length"
            )
        if key is None:
            if sampling.temperature > 0:
                raise ValueError(
                    f"key: is None, but temperature={sampling.temperature} draws; pass jax.random.key(seed)"
                )
            key = jax.random.key(0)  # not used
        padded = min(-(-int(lengths.max()) // _PROMPT_STEP) * _PROMPT_STEP, self.max_length)
        tokens = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        positions = jnp.broadcast_to(jnp.arange(padded), tokens.shape)
        cache: Cache | None = init_cache(self._config, len(prompts), self.max_length)
        features, cache = self._blocks.features(jnp.asarray(tokens), positions, cache)
        position = jnp.asarray(lengths)
        token, key = self._pick(self._weights, features, position, key, sampling=sampling)
        yield token
        for _ in range(max_tokens - 1):
            if self._blockwise_steps:
                features, cache = self._blocks.features(token[:, None], position[:, None], cache)
                token, key = self._pick(self._weights, features, jnp.ones_like(position), key, sampling=sampling)
                position = position + 1
            else:
                token, position, key, cache = self._step(self._weights, token, position, key, cache, sampling=sampling)
            yield token

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = Sampling(),
        key: jax.Array | None = None,
        stop_tokens: Collection[int] = (),
    ) -> list[list[int]]:
        """The answers to ``prompts``: at most ``max_tokens`` each, up to the first of ``stop_tokens`` (not included).

        For the arguments and errors see ``stream``.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        steps = []
        for i, token in enumerate(self.stream(prompts, max_tokens=max_tokens, sampling=sampling, key=key)):
            steps.append(token)
            if (i + 1) % _STOP_CHECK and i + 1 < max_tokens:
                continue
            for answer, new in zip(answers, np.stack(steps, axis=1).tolist(), strict=True):
                answer += new
            steps = []
            if all(any(t in stop_tokens for t in answer) for answer in answers):
                break
        return [list(itertools.takewhile(lambda t: t not in stop_tokens, answer)) for answer in answers]

    def lower_step(self, batch: int = 1, sampling: Sampling = Sampling()) -> jax.stages.Lowered:
        """The step for ``batch`` sequences, lowered: its compiled text shows which kernels run."""
        integers = jnp.zeros((batch,), jnp.int32)
        cache = jax.eval_shape(lambda: init_cache(self._config, batch, self.max_length))
        return self._step.lower(self._weights, integers, integers, jax.random.key(0), cache, sampling=sampling)
