"""GGUF files: values, tokenizer and refusals on small files written here; the real model if it is in the cache."""

import dataclasses

import gguf
import jax.numpy as jnp
import llama_oracle as oracle
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from jaxq.checkpoints.gguf import GGUFFile
from jaxq.models import Decoder, load, perplexity, smollm2

SIZES = dict(d_model=64, d_ff=96, norm_eps=2.0**-17)  # whole blocks of 32; an epsilon that float32 has
CONFIG = dataclasses.replace(oracle.SMALL, num_heads=4, head_dim=16, rope_interleaved=True, **SIZES)
TOKENS = np.random.default_rng(1).integers(0, 256, 19).tolist()
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def gguf_name(name):
    module, leaf = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{leaf}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{leaf}"


def huggingface_name(name):
    module, leaf = name.rsplit(".", 1)
    parts = {short: part for part, short in NAMES.items()}
    if not module.startswith("blk."):
        return f"{parts[module]}.{leaf}"
    _, layer, part = module.split(".")
    return f"model.layers.{layer}.{parts[part]}.{leaf}"


def write(path, weights, config=CONFIG, family="llama", kind=lambda name: Type.F32, **metadata):
    """A GGUF file: matrices as ``kind`` says for their name, a byte-level tokenizer with one merge and two controls."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = [*sorted(oracle.pre_tokenizers.ByteLevel.alphabet()), "11", "he", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["1 1", "h e"])
    writer.add_eos_token_id(259)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, w in weights.items():
        dtype = kind(name) if w.ndim == 2 else Type.F32
        if dtype in (Type.F32, Type.F16):
            writer.add_tensor(gguf_name(name), w.astype(np.float32 if dtype == Type.F32 else np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(w, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", oracle.random_weights(CONFIG))


def check_logits(model, config, weights):
    want = oracle.logits(config, weights, TOKENS)
    found = model(jnp.array([TOKENS]))[0]
    np.testing.assert_allclose(found, want, rtol=0, atol=1600 * 2.0**-24 * np.abs(want).max())  # see test_models.py


def test_load_gives_the_logits_of_the_oracle(small):
    model, _ = load(small, dtype=jnp.float32)
    assert dataclasses.replace(model.config, max_length=4096) == CONFIG
    check_logits(model, CONFIG, oracle.random_weights(CONFIG))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_turn_halves(tmp_path, family):
    config = dataclasses.replace(oracle.FAMILIES[family], **SIZES)
    weights = oracle.random_weights(config)
    model, _ = load(write(tmp_path / "m.gguf", weights, config, family), dtype=jnp.float32)
    assert dataclasses.replace(model.config, max_length=4096) == config
    check_logits(model, config, weights)


def test_converted_llama_equals_the_directory_it_came_from(tmp_path):
    """Converters reorder the rows of q and k, so that pairs stand side by side: the two rotations then agree."""
    config = dataclasses.replace(CONFIG, rope_interleaved=False)
    weights = oracle.random_weights(config)
    oracle.write_huggingface(tmp_path, "llama", config, weights)
    want = load(tmp_path, dtype=jnp.float32)[0](jnp.array([TOKENS]))
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            rows = weights[name].reshape(-1, 2, config.head_dim // 2, config.d_model)
            weights[name] = rows.swapaxes(1, 2).reshape(-1, config.d_model)
    found = load(write(tmp_path / "m.gguf", weights), dtype=jnp.float32)[0](jnp.array([TOKENS]))
    np.testing.assert_allclose(found, want, rtol=0, atol=1600 * 2.0**-24 * np.abs(want).max())


def test_rope_factors_and_sliding_window(tmp_path):
    config = dataclasses.replace(CONFIG, rope_divisors=(4.0,) * 8, sliding_window=6)
    weights = oracle.random_weights(config)
    extra = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    path = write(tmp_path / "m.gguf", weights, llama__attention__sliding_window=6, **extra)
    model, _ = load(path, dtype=jnp.float32)
    assert dataclasses.replace(model.config, max_length=4096) == config
    check_logits(model, config, weights)


def block_values(kind, data):
    """Blocks of 32 values, decoded from their bytes as the format says."""
    raw = np.frombuffer(data.tobytes(), np.uint8).reshape(-1, {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q8_0: 34}[kind])
    scale = np.float64(np.ascontiguousarray(raw[:, :2]).view(np.float16))
    if kind == Type.Q8_0:
        return scale * np.ascontiguousarray(raw[:, 2:]).view(np.int8)
    nibbles = raw[:, -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    if kind == Type.Q4_0:
        return scale * (codes - 8.0)
    return scale * codes + np.float64(np.ascontiguousarray(raw[:, 2:4]).view(np.float16))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_block_tensors_are_decoded_exactly(tmp_path, kind):
    weights = oracle.random_weights(CONFIG)
    path = write(tmp_path / "m.gguf", weights, kind=lambda name: kind)
    file, name = GGUFFile(path), "model.layers.1.mlp.down_proj.weight"
    found = file.read("blk.1.ffn_down.weight")
    want = block_values(kind, gguf.quants.quantize(weights[name], kind)).reshape(weights[name].shape)
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, want, rtol=2.0**-23, atol=0 if kind != Type.Q4_1 else np.abs(want).max() * 2.0**-23
    )
    model, _ = load(path, dtype=jnp.float32)
    np.testing.assert_array_equal(model.layers[1].mlp.down_proj.kernel[...], found.T)


def test_half_tensors_are_read_exactly(tmp_path):
    weights = oracle.random_weights(CONFIG)
    path = write(tmp_path / "m.gguf", weights, kind=lambda name: Type.BF16 if "mlp" in name else Type.F16)
    file = GGUFFile(path)
    up, q = weights["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(file.read("blk.0.ffn_up.weight"), np.float32(up.astype(jnp.bfloat16)))
    np.testing.assert_array_equal(file.read("blk.0.attn_q.weight"), np.float32(q.astype(np.float16)))


def test_tokenizer(small):
    _, tokenizer = load(small)
    start, end = 258, 259
    assert tokenizer.stop_tokens == {end}
    for text in ("The rain, 1 2\n\n  Größe!", "<|im_start|>x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_start|>", "")
    (he,) = tokenizer.encode("he")
    assert he == 257
    assert len(tokenizer.encode("11")) == 2  # digits stand alone, whatever the merges say
    assert tokenizer.encode_chat("he") == [start, he, end]


@pytest.mark.parametrize("keep", [3, 20, 300, 4000, 20000, -1])
def test_truncated_files_are_refused(small, tmp_path, keep):
    data = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf: (starts with|cannot be read as GGUF)"):
        load(cut)


def test_foreign_files_are_refused(small, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf: no such file"):
        load(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ValueError, match=r"other\.gguf: starts with b'PK\\x03\\x04', not b'GGUF'"):
        load(other)
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"other\.gguf: starts with b'', not b'GGUF'"):
        load(other)
    data = bytearray(small.read_bytes())
    data[4:8] = (99).to_bytes(4, "little")
    other.write_bytes(data)
    with pytest.raises(ValueError, match=r"other\.gguf: cannot be read as GGUF \(.*version 99"):
        load(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(family="gemma"), "general.architecture='gemma' must be one of llama, mistral, qwen2, qwen3"),
        (dict(llama__rope__scaling__type="yarn"), "llama.rope.scaling.type='yarn' must be 'none' or 'linear'"),
        (dict(llama__rope__dimension_count=8), "rope.dimension_count must be the whole head, 16"),
    ],
    ids=str,
)
def test_other_models_are_refused(tmp_path, change, message):
    path = write(tmp_path / "m.gguf", oracle.random_weights(CONFIG), **change)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        load(path)


def test_missing_tensors_and_types_that_cannot_be_read_are_refused(tmp_path):
    weights = oracle.random_weights(CONFIG)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"m\.gguf: has no tensor 'blk\.1\.ffn_up\.weight', which the model needs"):
        load(write(tmp_path / "m.gguf", weights))
    writer = gguf.GGUFWriter(tmp_path / "i8.gguf", "llama")
    writer.add_tensor("a", np.ones((2, 32), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"i8\.gguf: tensor 'a' has type I8, which cannot be dequantized; use"):
        GGUFFile(tmp_path / "i8.gguf").read("a")
    with pytest.raises(ValueError, match=r"i8\.gguf: has no metadata 'llama\.attention\.head_count'"):
        load(tmp_path / "i8.gguf")


@pytest.mark.skipif(
    not smollm2.cached_path().is_file(), reason="SmolLM2 is not in the cache; python -m jaxq demo fetches it"
)
def test_real_model():
    model, tokenizer = load(smollm2.cached_path(), dtype=jnp.float32)
    prompt = tokenizer.encode_chat("What is the capital of France?")
    decoder = Decoder(model, max_length=len(prompt) + 12)
    (answer,) = decoder.generate([prompt], max_tokens=12, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    text = tokenizer.encode(
        "The capital of Italy is Rome. The capital of Spain is Madrid. The capital of Germany is Berlin."
    )
    file = GGUFFile(smollm2.cached_path())
    weights = {huggingface_name(name): file.read(name) for name in file.names}
    want = oracle.perplexity(model.config, weights, text)
    assert perplexity(model, text, window=64) == pytest.approx(want, rel=1e-3)
    other = dataclasses.replace(model.config, rope_interleaved=False)
    assert oracle.perplexity(other, weights, text) > 2 * want  # the convention matters
