"""QuantDense for NNX, and the quantization of NNX models: what stays, what is refused, what is carried over."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxq.nnx
from jaxq import dense
from jaxq.qtensor import SCHEMES
from jaxq.quantizers import quantize_tensor
from jaxq.rules import Rule, quantize

IN, OUT = 100, 70  # neither a whole number of blocks nor of groups

needs_4_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def linear(in_features: int = IN, out_features: int = OUT, **kwargs) -> nnx.Linear:
    return nnx.Linear(in_features, out_features, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(3), **kwargs)


def inputs(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(7), shape).astype(dtype)


def assert_same_tree(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class Mlp(nnx.Module):
    """Every kind of holder: attribute, nnx.List, nnx.data; a layer used twice, a module that is no Linear."""

    def __init__(self, rngs: nnx.Rngs, d: int = 64):
        self.embed = nnx.Embed(11, d, rngs=rngs)
        self.up = nnx.Linear(d, 3 * d, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(3 * d, d, use_bias=False, rngs=rngs), nnx.Linear(d, d, rngs=rngs)])
        self.again = self.blocks[1]
        self.pair = nnx.data((nnx.Linear(d, d, rngs=rngs), jax.nn.gelu))
        self.general = nnx.LinearGeneral(d, d, rngs=rngs)
        self.einsum = nnx.Einsum("ab,bc->ac", (d, d), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.blocks[0](jax.nn.gelu(self.up(self.embed(tokens))))
        x = self.pair[1](self.pair[0](self.again(self.blocks[1](x))))
        return self.einsum(self.general(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_initializes_as_linear_then_quantizes(scheme):
    layer = jaxq.nnx.QuantDense(IN, OUT, scheme=scheme, rngs=nnx.Rngs(3))
    float_layer = nnx.Linear(IN, OUT, rngs=nnx.Rngs(3))
    assert_same_tree(layer.weight, quantize_tensor(float_layer.kernel[...], scheme))
    assert_same_tree(layer.bias[...], float_layer.bias[...])
    assert_same_tree(
        nnx.state(jaxq.nnx.QuantDense.from_linear(float_layer, scheme)),
        nnx.state(layer),
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_hot_inputs_give_rows_of_the_weight(scheme):
    layer = jaxq.nnx.QuantDense.from_linear(linear(), scheme)
    out = layer(jnp.eye(IN).reshape(4, 25, IN))
    bias = layer.bias[...].reshape(1, 1, OUT)
    want = layer.weight.dequantize().reshape(4, 25, OUT) + bias
    # Both round w and w + bias; int8 activations also 127 * w * (1 / 127), twice.
    assert (jnp.abs(out - want) <= 4 * 2.0**-24 * (jnp.abs(want) + jnp.abs(bias))).all()


@pytest.mark.parametrize(
    "x_dtype, kwargs",
    [
        (jnp.float32, {}),
        (jnp.bfloat16, {}),
        (jnp.float16, {}),
        (jnp.int32, {}),
        (jnp.bfloat16, dict(param_dtype=jnp.bfloat16)),
        (jnp.float32, dict(param_dtype=jnp.bfloat16)),
        (jnp.float16, dict(param_dtype=jnp.bfloat16)),
        (jnp.float32, dict(dtype=jnp.float16)),
        (jnp.bfloat16, dict(preferred_element_type=jnp.float32)),
        (jnp.bfloat16, dict(param_dtype=jnp.bfloat16, preferred_element_type=jnp.float32)),
        (jnp.float32, dict(preferred_element_type=jnp.bfloat16, use_bias=False)),
    ],
)
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_result_dtype_is_that_of_linear(scheme, x_dtype, kwargs):
    float_layer = linear(**kwargs)
    layer = jaxq.nnx.QuantDense.from_linear(float_layer, scheme)
    x = (4 * inputs(3, IN)).astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        want, out = float_layer(x), layer(x)
    assert out.dtype == want.dtype
    error = jnp.linalg.norm((out - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < 0.25  # 4-bit codes are off by up to half a step: a gross check that nothing was dropped


def test_16_bit_activations_are_not_narrowed_further():
    layer = jaxq.nnx.QuantDense.from_linear(linear(use_bias=False), "W8A16")
    x = inputs(5, IN)
    np.testing.assert_array_equal(layer(x), layer(x.astype(jnp.bfloat16).astype(jnp.float32)))
    with jax.numpy_dtype_promotion("standard"):  # float16 inputs with float32 parameters: multiplied as float16
        wide = layer(x.astype(jnp.float16))
    exact = x.astype(jnp.float16).astype(jnp.float32) @ layer.weight.dequantize()
    assert jnp.abs(wide - exact).max() < 2.0**-10 * jnp.abs(exact).max()  # bfloat16 would be off by 2**-9 an element


def test_float64_inputs():
    with jax.enable_x64(True):
        layer = jaxq.nnx.QuantDense.from_linear(linear(), "W8A8")
        x = inputs(2, IN)
        with jax.numpy_dtype_promotion("standard"):
            out = layer(x.astype(jnp.float64))
        assert out.dtype == jnp.float64
        np.testing.assert_array_equal(out, layer(x).astype(jnp.float64))


@pytest.mark.parametrize("kwargs", [dict(precision="highest"), dict(dot_general=lambda *args, **kwargs: None)])
def test_refuses_arguments_that_would_have_no_effect(kwargs):
    name = next(iter(kwargs))
    with pytest.raises(ValueError, match=f"^{name}="):
        jaxq.nnx.QuantDense(IN, OUT, rngs=nnx.Rngs(0), **kwargs)
    with pytest.raises(ValueError, match=f"^head: {name}="):
        jaxq.nnx.QuantDense.from_linear(linear(**kwargs), name="head")


def test_refuses_complex_inputs_and_wrong_features():
    layer = jaxq.nnx.QuantDense.from_linear(linear())
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="complex64"):
        layer(jnp.ones((1, IN), jnp.complex64))
    with pytest.raises(ValueError, match="99"):
        layer(jnp.ones((1, 99)))


def test_a_stack_is_not_multiplied_at_once():
    stack = nnx.vmap(lambda rngs: nnx.Linear(IN, OUT, rngs=rngs))(nnx.Rngs(0).split(2))
    with pytest.raises(ValueError, match=r"leading axes \(2,\)"):
        jaxq.nnx.QuantDense.from_linear(stack)(inputs(1, IN))


def test_transformations_agree_with_the_plain_call():
    layer = jaxq.nnx.QuantDense.from_linear(linear(), "W4A8")
    x = inputs(6, IN)
    want = layer(x)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, x), want)
    graph, state = nnx.split(layer)
    np.testing.assert_array_equal(jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x), want)
    np.testing.assert_array_equal(nnx.remat(lambda m, x: m(x))(layer, x), want)
    np.testing.assert_array_equal(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, x), want)


def test_gradients_and_optimizers_see_the_bias_alone():
    layer = jaxq.nnx.QuantDense.from_linear(linear(), "W8A16")
    before = layer.weight
    x = inputs(4, IN)
    grads = nnx.grad(lambda m: m(x).sum())(layer)
    assert list(grads) == ["bias"]
    np.testing.assert_array_equal(grads["bias"][...], jnp.full((OUT,), 4.0))
    optimizer = nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)
    bias = layer.bias[...]
    optimizer.update(layer, grads)
    np.testing.assert_array_equal(layer.bias[...], bias - 4)
    assert_same_tree(layer.weight, before)
    remat = nnx.grad(lambda m: nnx.remat(lambda m, x: m(x))(m, x).sum())(layer)
    assert_same_tree(remat, grads)


def test_lora_trains_and_leaves_the_base():
    base = jaxq.nnx.QuantDense.from_linear(linear(use_bias=False), "W4A16")
    before = base.weight
    model = nnx.LoRA(IN, 4, OUT, base_module=base, rngs=nnx.Rngs(1))
    x = inputs(32, IN)
    y = base(x) + x @ inputs(IN, 2) @ inputs(2, OUT) / IN  # an update of rank 2 is to be learnt
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        lora = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean(), argnums=lora)(model)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        losses = [float(step(model, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.7 * losses[0]
    assert_same_tree(model.base_module.weight, before)


def scanned(stack: nnx.Module, x: jax.Array) -> jax.Array:
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)


def test_stacks_are_quantized_by_layer_and_run_under_scan():
    stack = nnx.vmap(lambda rngs: nnx.Linear(IN, IN, rngs=rngs))(nnx.Rngs(0).split(3))
    quantized = jaxq.nnx.QuantDense.from_linear(stack, "W4A8", group_size=32)
    singles = []
    for i in range(3):
        single = nnx.Linear(IN, IN, rngs=nnx.Rngs(0))
        single.kernel[...], single.bias[...] = stack.kernel[i], stack.bias[i]
        singles.append(jaxq.nnx.QuantDense.from_linear(single, "W4A8", group_size=32))
    want = inputs(2, IN)
    for i, single in enumerate(singles):
        assert_same_tree(jax.tree.map(lambda a, i=i: a[i], quantized.weight), single.weight)
        want = single(want)
    np.testing.assert_array_equal(scanned(quantized, inputs(2, IN)), want)
    built = nnx.vmap(lambda rngs: jaxq.nnx.QuantDense(IN, IN, scheme="W4A8", group_size=32, rngs=rngs))(
        nnx.Rngs(0).split(3)
    )
    assert_same_tree(nnx.state(built), nnx.state(quantized))
    assert jaxq.nnx.describe(quantized)[0].layers == 3


def test_model_in_model_out():
    model = Mlp(nnx.Rngs(0))
    before = jax.tree.map(lambda a: a.copy(), nnx.state(model))
    quantized = quantize(model, "W8A16")
    assert [row.path for row in jaxq.nnx.describe(quantized)] == ["again", "blocks.0", "pair.0", "up"]
    assert quantized.again is quantized.blocks[1]
    for kept, kind in dict(embed=nnx.Embed, general=nnx.LinearGeneral, einsum=nnx.Einsum).items():
        assert type(getattr(quantized, kept)) is kind
    assert type(model.up) is nnx.Linear
    assert_same_tree(nnx.state(model), before)
    assert quantized.embed.embedding is not model.embed.embedding  # variables of its own
    assert quantized.embed.embedding.get_value() is model.embed.embedding.get_value()  # around the same arrays
    tokens = jnp.arange(7)
    want, out = model(tokens), quantized(tokens)
    assert jnp.linalg.norm(out - want) < 0.05 * jnp.linalg.norm(want)


def test_describe_counts_bytes():
    (row,) = jaxq.nnx.describe(quantize(linear(128, 64), "W4A16", group_size=64))
    nbytes = 128 * 64 // 2 + 2 * 64 * 2  # nibbles, bfloat16 scales
    assert row == dense.LayerSummary("", "W4A16", 1, (128, 64), 64, nbytes, 8 * nbytes / (128 * 64))


def test_shared_kernels_stay_shared():
    model = nnx.Dict(a=linear(64, 64), b=linear(64, 64, use_bias=False), c=linear(64, 64))
    model.b.kernel = model.a.kernel
    model.c.bias = model.a.bias
    quantized = quantize(model, "W8A8")
    assert quantized.a.packed is quantized.b.packed
    assert quantized.a.scales is quantized.b.scales
    assert quantized.a.packed is not quantized.c.packed
    assert quantized.a.bias is quantized.c.bias
    assert quantized.b.bias is None


def test_a_model_with_a_cycle():
    model = nnx.Dict(layer=linear())
    model.back = model
    quantized = quantize(model, "W4A16")
    assert quantized.back is quantized
    assert type(quantized.layer) is jaxq.nnx.QuantDense


def test_subclasses_of_linear():
    class Renamed(nnx.Linear):
        pass

    model = nnx.Dict(
        plain=Renamed(64, 64, rngs=nnx.Rngs(0)), lora=nnx.LoRALinear(64, 64, lora_rank=2, rngs=nnx.Rngs(0))
    )
    quantized = quantize(model, "W4A16")
    assert type(quantized.plain) is jaxq.nnx.QuantDense
    assert type(quantized.lora) is nnx.LoRALinear


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_weights_name_the_layer(bad):
    model = Mlp(nnx.Rngs(0))
    model.blocks[0].kernel[5, 6] = bad
    with pytest.raises(ValueError, match=r"^blocks\.0: "):
        quantize(model, "W4A16")


def test_custom_dot_general_in_a_model_names_the_layer():
    model = nnx.Dict(a=linear(), b=linear(precision="highest"))
    with pytest.raises(ValueError, match=r"^b: precision='highest'"):
        quantize(model, "W4A16")
    assert type(quantize(model, "W4A16", ignore="b").b) is nnx.Linear


def test_implementation_reaches_the_layers():
    assert quantize(linear(), "W4A16", implementation="reference").implementation == "reference"


def test_memory_beyond_the_input(monkeypatch):
    """At any moment: the packed model so far and at most two float copies of a layer."""
    model = nnx.List([nnx.Linear(256, 256, rngs=nnx.Rngs(i)) for i in range(4)])
    largest = 256 * 256 * 4
    seen = []

    def live() -> int:
        gc.collect()
        return sum(a.nbytes for a in jax.live_arrays())

    def watched(w, *args, **kwargs):
        seen.append(live())
        weight = quantize_tensor(w, *args, **kwargs)
        seen.append(live())
        return weight

    monkeypatch.setattr(dense, "quantize_tensor", watched)
    before = live()
    quantized = quantize(model, "W8A16")
    packed = sum(row.nbytes for row in jaxq.nnx.describe(quantized))
    assert len(seen) == 8
    assert max(seen) - before <= packed + 2 * largest
    assert live() - before <= packed + 16 * 8  # a few scalars


def test_abstract_models():
    concrete = nnx.state(quantize(Mlp(nnx.Rngs(0)), "W4A8"))
    inside = nnx.state(nnx.eval_shape(lambda: quantize(Mlp(nnx.Rngs(0)), "W4A8")))
    outside = nnx.state(quantize(nnx.eval_shape(lambda: Mlp(nnx.Rngs(0))), "W4A8"))
    for abstract in (inside, outside):
        jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), abstract, concrete)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_restore_into_an_abstract_model(scheme, tmp_path):
    rules = [Rule("again", scheme), Rule("up", "W4A16", group_size=32)]
    model = quantize(Mlp(nnx.Rngs(0)), rules=rules)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        abstract = nnx.eval_shape(lambda: quantize(Mlp(nnx.Rngs(9)), rules=rules))
        restored = checkpointer.restore(tmp_path / "model", nnx.state(abstract))
    nnx.update(abstract, restored)
    assert_same_tree(nnx.state(abstract), nnx.state(model))
    np.testing.assert_array_equal(abstract(jnp.arange(7)), model(jnp.arange(7)))


def axes(layer: jaxq.nnx.QuantDense) -> dict[str, tuple]:
    variables = {field: getattr(layer, field) for field in dense.FIELDS}
    return {field: v.get_metadata("out_sharding") for field, v in variables.items() if v is not None}


def test_axis_names_carry_over():
    names = dict(out_sharding=("in", "out"), sharding_rules=(("in", None), ("out", None)))
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        float_layer = linear(
            128,
            128,
            kernel_metadata=names,
            bias_metadata=dict(out_sharding=("out",), **{"sharding_rules": names["sharding_rules"]}),
        )
        built = jaxq.nnx.QuantDense(128, 128, scheme="W4A8", kernel_metadata=names, rngs=nnx.Rngs(0))
    want = dict(packed=("out", "in", None), scales=(None, "out"), subscales=("in", "out", None))
    assert axes(built) == want
    layer = jaxq.nnx.QuantDense.from_linear(float_layer, "W4A8")  # no mesh at hand any more
    assert axes(layer) == want
    assert layer.bias.get_metadata("out_sharding") == ("out",)
    assert layer.packed.get_metadata("sharding_rules") == names["sharding_rules"]
    asymmetric = jaxq.nnx.QuantDense.from_linear(float_layer, "W4A16_ASYM", group_size=32)
    assert axes(asymmetric) == dict(packed=("out", "in", None), scales=("in", "out"), zeros=("in", "out"))


def test_axes_of_size_one_are_not_sharded():
    weight = quantize_tensor(jnp.ones((64, 128)), "W4A16", group_size=32)
    assert dense.field_axes(weight, ("in", "out")) == dict(packed=("out", None, None), scales=(None, "out"))
    stack = quantize_tensor(jnp.ones((3, 128, 64)), "W8A8")
    assert dense.field_axes(stack, ("layers", "in", "out")) == dict(
        packed=("layers", None, "in", None), scales=("layers", None, None)
    )


def test_vmap_adds_the_layers_axis():
    names = dict(out_sharding=("in", "out"), sharding_rules=(("in", None), ("out", None), ("layers", None)))

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def build(rngs):
        return jaxq.nnx.QuantDense(128, 128, kernel_metadata=names, group_size=64, rngs=rngs)

    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))):
        layer = build(nnx.Rngs(0).split(2))
    assert axes(layer) == dict(packed=("layers", "out", "in", None), scales=("layers", "in", "out"))


@needs_4_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_kernel_gives_sharded_arrays(kind):
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind), devices=jax.devices()[:4])
    metadata = dict(kernel_metadata=dict(out_sharding=("t", "d")), bias_metadata=dict(out_sharding=("d",)))
    want = linear(256, 128)
    with jax.set_mesh(mesh):
        sharded = linear(256, 128, **metadata)
    for layer in (
        jaxq.nnx.QuantDense.from_linear(sharded, "W4A16"),
        quantize(sharded, "W4A16"),
    ):
        assert layer.packed[...].sharding == NamedSharding(mesh, P("d", "t", None))
        assert layer.scales[...].sharding == NamedSharding(mesh, P("t", "d"))
        assert_same_tree(
            jax.tree.map(np.asarray, layer.weight), jax.tree.map(np.asarray, quantize_tensor(want.kernel[...], "W4A16"))
        )
    with jax.set_mesh(mesh):
        built = jaxq.nnx.QuantDense(256, 128, rngs=nnx.Rngs(3), **metadata)
        assert built.packed[...].sharding.spec == P("d", "t", None)
        np.testing.assert_array_equal(built.packed[...], layer.packed[...])


@needs_4_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_sharded_model_computes_the_same(kind):
    def build(column=(), row=()):
        first = nnx.Linear(128, 256, use_bias=False, kernel_metadata=dict(column), rngs=nnx.Rngs(0))
        second = nnx.Linear(256, 128, use_bias=False, kernel_metadata=dict(row), rngs=nnx.Rngs(1))
        return quantize(nnx.Sequential(first, jax.nn.relu, second), "W8A16")

    x = inputs(4, 128)
    want = build()(x)
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        model = build(dict(out_sharding=(None, "t")), dict(out_sharding=("t", None)))
        assert model.layers[0].packed[...].sharding == NamedSharding(mesh, P("t", None, None))
        assert model.layers[2].packed[...].sharding == NamedSharding(mesh, P(None, "t", None))
        out = nnx.jit(lambda model, x: model(x))(model, x)
    # bfloat16 activations may round one way or the other between the layers
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=2.0**-8 * float(jnp.abs(want).max()))


@needs_4_devices
def test_out_sharding():
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        layer = jaxq.nnx.QuantDense(128, 128, rngs=nnx.Rngs(0))
        out = layer(inputs(4, 128), out_sharding=P("d", "t"))
        assert jax.typeof(out).sharding.spec == P("d", "t")
        np.testing.assert_array_equal(out, layer(inputs(4, 128)))


@needs_4_devices
def test_a_sharding_that_would_split_a_group_is_refused():
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = dict(out_sharding=("t", None))
    with jax.set_mesh(mesh):
        model = nnx.Dict(down=nnx.Linear(27392, 64, kernel_metadata=split, rngs=nnx.Rngs(0)))
    message = r"^down: in_features=27392 is split 4 ways over 't'.*group_size=128.*use group_size=64 or None"
    with pytest.raises(ValueError, match=message):
        quantize(model, "W4A16")
    assert quantize(model, "W4A16", group_size=64).down.scales[...].sharding.spec == P("t", None)

    def build():
        return jaxq.nnx.QuantDense(27392, 64, kernel_metadata=split, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh), pytest.raises(ValueError, match="in_features=27392 is split 4 ways"):
        nnx.eval_shape(build)


@pytest.mark.parametrize(
    "k, parts, group_size, legal",
    [(512, 4, 128, True), (512, 4, None, True), (512, 8, 128, False), (512, 3, None, False), (256, 4, 64, True),
     (200, 2, 50, True), (200, 2, 100, True), (508, 4, 127, True), (512, 2, 512, False), (100, 1, 7, True)],
)  # fmt: skip
def test_which_splits_of_k_are_legal(k, parts, group_size, legal):
    weight = jax.eval_shape(
        lambda w: quantize_tensor(w, "W8A16", group_size=group_size), jax.ShapeDtypeStruct((k, 128), jnp.float32)
    )
    mesh = jax.sharding.AbstractMesh((parts,), ("t",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("t", None))
    if legal:
        dense.check_split(weight, sharding)
    else:
        with pytest.raises(ValueError, match=f"in_features={k} is split {parts} ways"):
            dense.check_split(weight, sharding)
    with pytest.raises(ValueError, match="out_features=128 is split 3 ways"):
        dense.check_split(weight, NamedSharding(jax.sharding.AbstractMesh((3,), ("t",)), P(None, "t")))
