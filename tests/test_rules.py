"""Which layer gets which scheme, and what a pattern that means nothing is told."""

import pytest
from flax import nnx

import jaxq.nnx
from jaxq.rules import Rule, quantize


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.Linear(64, 64, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs))
        self.norm = nnx.LayerNorm(64, rngs=rngs)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(64, 64, rngs=rngs)
        self.head_again = self.lm_head


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def schemes(model: nnx.Module) -> dict[str, tuple[str, int | None]]:
    return {row.path: (row.scheme, row.group_size) for row in jaxq.nnx.describe(model)}


@pytest.mark.parametrize(
    "pattern, path, matches",
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "decoder.lm_head", True),
        ("mlp", "layers.0.mlp.up", True),
        ("mlp", "layers.0.mlp2.up", False),
        ("layers.1", "layers.1.q", True),
        ("layers.1", "layers.10.q", False),
        ("layers.1", "layers_1", False),  # a plain name's dot is a dot
        (r".*\.mlp\..*", "layers.0.mlp.up", True),
        (r"mlp\..*", "layers.0.mlp.up", False),  # a regular expression must match the whole path
        ("lm_head|.*norm.*", "lm_head", True),
        ("lm_head|.*norm.*", "decoder.lm_head", False),
        (".*", "", True),
    ],
)
def test_what_a_pattern_matches(pattern, path, matches):
    assert Rule(pattern, None).matches(path) is matches


def test_the_first_match_wins(model):
    quantized = quantize(
        model,
        "W4A16",
        group_size=32,
        ignore=["layers.1.q"],
        rules=[Rule(r"layers\.\d+\.mlp\.layers\.0", "W8A8"), Rule("mlp", "W4A8", group_size=None), Rule("q", "W8A16")],
    )
    assert schemes(quantized) == {
        "head_again": ("W4A16", 32),
        "layers.0.q": ("W8A16", None),
        "layers.0.mlp.layers.0": ("W8A8", None),
        "layers.0.mlp.layers.1": ("W4A8", None),
        "layers.1.mlp.layers.0": ("W8A8", None),
        "layers.1.mlp.layers.1": ("W4A8", None),
    }


def test_without_a_scheme_the_rest_stays(model):
    quantized = quantize(model, rules=[Rule("layers.0", None), Rule("q", "W8A16")])
    assert schemes(quantized) == {"layers.1.q": ("W8A16", None)}


@pytest.mark.parametrize("name", ["lm_head", "head_again"])
def test_a_shared_layer_answers_to_each_of_its_paths(model, name):
    quantized = quantize(model, "W8A16", ignore=name)
    assert type(quantized.lm_head) is nnx.Linear
    assert quantized.head_again is quantized.lm_head


def test_patterns_that_match_nothing(model):
    with pytest.raises(ValueError, match=r"pattern='lm_haed' matches no layer.*near it: 'lm_head'"):
        quantize(model, "W4A16", ignore=["lm_haed"])
    with pytest.raises(ValueError, match=r"pattern='attn' .*the layers are: 'layers.0.q', .* and \d more|'lm_head'"):
        quantize(model, rules=[Rule("attn", "W4A16")])
    with pytest.raises(ValueError, match=r"'.*norm' matches no dense layer, only .*'layers\.0\.norm'"):
        quantize(model, rules=[Rule(".*norm", "W4A16")])
    assert len(schemes(quantize(model, "W8A16", ignore="norm"))) == 7  # leaving a norm alone is no mistake


def test_bad_rules_and_calls(model):
    with pytest.raises(ValueError, match="'W5A16' is unknown"):
        Rule(".*", "W5A16")
    with pytest.raises(ValueError, match=r"pattern='\(' is not a regular expression"):
        Rule("(", "W4A16")
    with pytest.raises(ValueError, match="give a scheme"):
        quantize(model)
    with pytest.raises(ValueError, match="group_size=64 goes with scheme="):
        quantize(model, rules=[Rule(".*", "W4A16")], group_size=64)
    with pytest.raises(TypeError, match=r"^model: list must be an nnx.Module"):
        quantize([model], "W4A16")
    with pytest.raises(ValueError, match="no dense layer"):
        quantize(model.layers[0].norm, "W4A16")
    with pytest.raises(ValueError, match=r"group_size=128 must be 1 to k=64"):
        quantize(model, "W4A16", group_size=128)
