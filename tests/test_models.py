"""The Llama family against a float64 oracle: as loaded, token by token, and quantized."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import llama_oracle as oracle
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import jaxq
from jaxq.models import Decoder, Llama, LlamaConfig, Sampling, load, perplexity
from jaxq.models.blockwise import _block
from jaxq.models.generate import sample

FAMILIES = list(oracle.FAMILIES)
TOKENS = np.random.default_rng(1).integers(0, oracle.SMALL.vocab_size, 23).tolist()
# Float32 against float64, over two layers of sums of up to 120 products and exponentials of scores up to about 30:
# each amplifies 2**-24 by less than a hundred, where a wrong formula changes logits by their own size.
RTOL = 100 * 2.0**-24 * 16


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """A family's config, its weights, and the directory they are in."""
    config = oracle.FAMILIES[request.param]
    weights = oracle.random_weights(config)
    folder = tmp_path_factory.mktemp(request.param)
    oracle.write_huggingface(folder, request.param, config, weights, shards=2 if request.param == "qwen3" else 1)
    return config, weights, folder


def small_folder(folder, **changes):
    """A directory of the plain family, with changes to its config.json."""
    config = oracle.SMALL
    oracle.write_huggingface(folder, "llama", config, oracle.random_weights(config))
    text = oracle.huggingface_json("llama", config) | changes
    (folder / "config.json").write_text(json.dumps(text))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model, _ = load(small_folder(tmp_path_factory.mktemp("small")), dtype=jnp.float32)
    return model


def test_load_gives_the_logits_of_the_oracle(checkpoint):
    config, weights, folder = checkpoint
    model, _ = load(folder, dtype=jnp.float32)
    assert dataclasses.replace(model.config, rope_divisors=None) == dataclasses.replace(config, rope_divisors=None)
    found, want = model(jnp.array([TOKENS]))[0], oracle.logits(config, weights, TOKENS)
    np.testing.assert_allclose(found, want, rtol=0, atol=RTOL * np.abs(want).max())


def test_the_variants_of_the_families_matter():
    """Each family's own feature changes logits by far more than the tolerance: the test above can fail."""
    for family in FAMILIES[1:]:
        config = oracle.FAMILIES[family]
        weights = oracle.random_weights(config)
        plain = dataclasses.replace(config, rope_divisors=None, sliding_window=None, qk_norm=False)
        plain_weights = {name: w for name, w in weights.items() if not name.endswith("bias")}
        want, without = (oracle.logits(c, w, TOKENS) for c, w in ((config, weights), (plain, plain_weights)))
        assert np.abs(want - without).max() > 100 * RTOL * np.abs(want).max(), family


def test_decoding_with_a_cache_is_the_same_as_reading_all_again(checkpoint):
    model, _ = load(checkpoint[2], dtype=jnp.float32)
    prompts = [TOKENS[:3], TOKENS[:17], TOKENS[5:6]]  # of different lengths, one of a single token
    answers = Decoder(model, max_length=40).generate(prompts, max_tokens=10)
    texts = [
        prompt + answer + [0] * (27 - len(prompt + answer)) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for prompt, answer, scores in zip(prompts, answers, np.asarray(model(jnp.array(texts))), strict=True):
        # Another order of float32 sums may turn a tie: the token chosen is the best, up to rounding.
        chosen = scores[np.arange(len(prompt) - 1, len(prompt) + 9), answer]
        best = scores[len(prompt) - 1 : len(prompt) + 9].max(axis=-1)
        np.testing.assert_allclose(chosen, best, rtol=0, atol=RTOL * np.abs(scores).max())


def test_a_step_is_compiled_once(small):
    decoder = Decoder(small, max_length=64)
    for prompt in (TOKENS[:2], TOKENS[:9]):
        decoder.generate([prompt], max_tokens=20)
    assert decoder._step._cache_size() == 1


def test_blocks_share_a_program(small):
    before = _block._cache_size()
    decoder = Decoder(small, max_length=63)
    for prompt in (TOKENS[:2], TOKENS[:9]):  # both are padded to one length
        decoder.generate([prompt], max_tokens=1)
    assert _block._cache_size() == before + 1


def test_steps_by_block_give_the_same_tokens(small):
    prompts = [TOKENS[:3], TOKENS[3:12]]
    warm = dict(max_tokens=12, sampling=Sampling(temperature=0.5), key=jax.random.key(3))
    whole, blockwise = (
        Decoder(small, max_length=64, blockwise_steps=b).generate(prompts, **warm) for b in (False, True)
    )
    assert whole == blockwise


def test_the_cache_is_updated_in_place(small):
    text = Decoder(small, max_length=64).lower_step().as_text()
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2 * small.config.num_layers


def test_generate_ends_before_a_stop_token(small):
    decoder = Decoder(small, max_length=64)
    (answer,) = decoder.generate([TOKENS[:4]], max_tokens=20)
    assert len(answer) == 20
    stop = answer[9]
    assert decoder.generate([TOKENS[:4]], max_tokens=20, stop_tokens={stop}) == [answer[: answer.index(stop)]]


def test_generate_refuses_what_does_not_fit(small):
    decoder = Decoder(small, max_length=16)
    with pytest.raises(ValueError, match="10 tokens and max_tokens=7 must be at most max_length=16"):
        decoder.generate([TOKENS[:10]], max_tokens=7)
    assert len(decoder.generate([TOKENS[:10]], max_tokens=6)[0]) == 6
    with pytest.raises(ValueError, match=r"lengths \[3, 0\] must be at least 1"):
        decoder.generate([TOKENS[:3], []], max_tokens=1)
    with pytest.raises(ValueError, match="key: is None"):
        decoder.generate([TOKENS[:3]], max_tokens=1, sampling=Sampling(temperature=1.0))
    with pytest.raises(ValueError, match="max_length=5000 must be at most the model's 4096"):
        Decoder(small, max_length=5000)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(temperature=0.5), [0.25, 0.09, 0.0225, 0.0025]),
        (Sampling(temperature=1.0, top_k=2), [0.5, 0.3, 0, 0]),
        (Sampling(temperature=1.0, top_k=9), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(temperature=1.0, top_p=0.7), [0.5, 0.3, 0, 0]),  # 0.5 is not enough, 0.8 is
        (Sampling(temperature=1.0, top_p=0.4), [1, 0, 0, 0]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.8), [0.5, 0.3, 0, 0]),  # of 0.95: 0.53, 0.84
        (Sampling(), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_sample_draws_from_the_right_distribution(sampling, allowed):
    order, draws = [2, 0, 3, 1], 8192
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))[jnp.argsort(jnp.array(order))]  # token order[i] has the i-th
    found = sample(jnp.broadcast_to(logits, (draws, 4)), sampling, jax.random.key(0))
    share = np.bincount(np.asarray(found), minlength=4)[order] / draws
    want = np.array(allowed) / sum(allowed)
    assert (share[want == 0] == 0).all()
    np.testing.assert_array_less(np.abs(share - want), 5 * np.sqrt(want * (1 - want) / draws) + 1e-9)  # five sigma


def test_sampling_repeats_with_the_same_key(small):
    decoder = Decoder(small, max_length=64)

    def draw(seed):
        warm = Sampling(temperature=2.0, top_k=50)
        return decoder.generate([TOKENS[:4]] * 2, max_tokens=12, sampling=warm, key=jax.random.key(seed))

    first = draw(0)
    assert first == draw(0) != draw(1)
    assert first[0] != first[1]  # rows draw by themselves


@pytest.mark.parametrize("bad", [dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)], ids=str)
def test_sampling_refuses_values_out_of_range(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}={next(iter(bad.values()))} must"):
        Sampling(**bad)


def test_a_large_model_can_be_built_without_its_memory():
    llama3_8b = LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336, rope_theta=5e5, max_length=8192)
    model = nnx.eval_shape(lambda: Llama(llama3_8b, rngs=nnx.Rngs(0)))
    assert sum(a.size for a in jax.tree.leaves(nnx.split(model)[1])) == 8_030_261_248  # as published
    quantized = jaxq.quantize(model, "W4A16", ignore=["lm_head"])
    logits = nnx.eval_shape(lambda m: m(jnp.zeros((1, 5), jnp.int32)), quantized)
    assert (logits.shape, logits.dtype) == ((1, 5, 128256), jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_kv_heads=4), "num_heads=6 must be a multiple"),
        (dict(head_dim=11), "head_dim=11 must be even"),
        (dict(rope_divisors=(1.0,)), "1 rope_divisors must be head_dim / 2 = 6"),
        (dict(dtype=jnp.float16), "dtype=float16 must be bfloat16 or float32"),
    ],
    ids=str,
)
def test_config_refuses_sizes_that_contradict(sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(oracle.SMALL, **sizes)


# Quantized


@pytest.mark.parametrize(
    ("scheme", "group_size"),
    [("W8A16", None), ("W8A8", None), ("W4A16", 32), ("W4A16_ASYM", 48), ("W4A8", None), ("W4A8", 64)],
)
def test_quantized_model_against_the_oracle_on_the_same_codes(small, scheme, group_size):
    model = jaxq.quantize(small, scheme, group_size=group_size, ignore=["lm_head"])
    weights = oracle.random_weights(small.config)
    for i, block in enumerate(model.layers):
        for part in ("self_attn", "mlp"):
            for name, layer in nnx.iter_children(getattr(block, part)):
                weights[f"model.layers.{i}.{part}.{name}.weight"] = layer.weight
    assert sum(not isinstance(w, np.ndarray) for w in weights.values()) == 7 * small.config.num_layers
    want = oracle.perplexity(small.config, weights, TOKENS)
    assert perplexity(model, TOKENS) == pytest.approx(want, rel=0.005)
    decoder = Decoder(model, max_length=32)
    (answer,) = decoder.generate([TOKENS[:5]], max_tokens=4)
    scores = oracle.logits(small.config, weights, TOKENS[:5] + answer)
    # Roundings to bfloat16 or int8 fall differently where float32 differs from float64: 1 % of the logits' spread.
    gap = scores[4:-1].max(axis=-1) - scores[np.arange(4, 8), answer]
    assert gap.max() < 0.01 * np.ptp(scores)


def test_perplexity_does_not_depend_on_how_windows_are_batched(small):
    tokens = np.random.default_rng(2).integers(0, small.config.vocab_size, 61).tolist()
    weights = oracle.random_weights(small.config)
    windows = [tokens[i : i + 16] for i in range(0, 61, 16)]  # the last has 13
    losses = [np.log(oracle.perplexity(small.config, weights, w)) * (len(w) - 1) for w in windows]
    want = np.exp(sum(losses) / (61 - 4))
    for batch in (1, 3, 4, 8):
        assert perplexity(small, tokens, window=16, batch=batch) == pytest.approx(want, rel=1e-4)
    with pytest.raises(ValueError, match="1 tokens must be at least 2"):
        perplexity(small, [1])


# Refusals of the loader


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="gemma"), "model_type='gemma' must be one of llama, mistral, qwen2, qwen3"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config=.*gptq.* must be absent"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' must be 'silu'"),
        (dict(attention_bias=True), "attention_bias=True must be false"),
        (dict(rope_scaling={"type": "yarn", "factor": 2}), "rope type 'yarn' must be"),
        (dict(rms_norm_eps=None), "has no 'rms_norm_eps'"),
        (dict(intermediate_size=89), r"tensor 'model.layers.0.mlp.down_proj.weight' has shape \(88, 72\), must be"),
        (dict(num_hidden_layers=3), "has no tensor 'model.layers.2"),
        (
            dict(num_hidden_layers=1),
            "has 9 tensors that a model of this family has no place for, such as 'model.layers.1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_load_refuses_other_models(tmp_path, changes, message):
    folder = small_folder(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


def test_load_refuses_pickles(tmp_path):
    small_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"weights are pickles \(pytorch_model.bin\), which can run code"):
        load(tmp_path)


def test_load_refuses_damaged_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
        load(tmp_path)
    small_folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read as safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config.json: is not JSON"):
        load(tmp_path)


def test_load_refuses_incomplete_shards(tmp_path):
    config = oracle.SMALL
    oracle.write_huggingface(tmp_path, "llama", config, oracle.random_weights(config), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": places | {"model.other": next(iter(places.values()))}}))
    with pytest.raises(ValueError, match=r"names 1 tensors that no shard has, such as 'model.other'"):
        load(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"model-00002-of-00002.safetensors: is named in model.safetensors.index"
    ):
        load(tmp_path)


def test_load_reads_half_precision(tmp_path):
    """bfloat16 and float16 tensors arrive unchanged; a tied model may still store its head."""
    config = oracle.FAMILIES["qwen2"]
    weights = {name: w.astype(jnp.bfloat16) for name, w in oracle.random_weights(config).items()}
    oracle.write_huggingface(tmp_path, "qwen2", config, weights)
    name, head = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    stored = weights | {name: weights[name].astype(np.float16), "lm_head.weight": weights[head]}
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    model, _ = load(tmp_path)
    kernel = model.layers[1].mlp.up_proj.kernel[...]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, weights[name].T)
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], weights[head])


def test_tokenizer_of_a_directory(tmp_path):
    small_folder(tmp_path)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    settings = {"chat_template": template, "eos_token": {"content": "~"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    _, tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Grüße, 12\n")) == "Grüße, 12\n"
    assert tokenizer.decode(tokenizer.encode_chat("hi")) == "[user]hi~[assistant]"
    assert tokenizer.stop_tokens == set(tokenizer.encode("~"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert load(tmp_path)[1].encode_chat("hi") == tokenizer.encode("hi")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: no such file"):
        load(tmp_path)


def test_stream_yields_what_generate_collects(small):
    decoder = Decoder(small, max_length=64)
    stream = decoder.stream([TOKENS[:4], TOKENS[4:9]], max_tokens=50)
    streamed = np.stack(list(itertools.islice(stream, 11)), axis=1)
    assert streamed.tolist() == decoder.generate([TOKENS[:4], TOKENS[4:9]], max_tokens=11)
