"""QuantDense for Linen, and the quantization of a Linen model's variables."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.core import freeze
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxq.linen
from jaxq.qtensor import SCHEMES, QTensor
from jaxq.quantizers import quantize_tensor
from jaxq.rules import Rule, quantize

IN, OUT = 100, 70  # neither a whole number of blocks nor of groups

needs_4_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")


def inputs(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(7), shape)


def assert_same_tree(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class Mlp(nn.Module):
    dense: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(self.dense(3 * x.shape[-1], name="up")(nn.LayerNorm(name="norm")(x)))
        x = self.dense(IN, use_bias=False, name="down")(x)
        return nn.DenseGeneral((2, 5), name="general")(x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_initializes_as_dense_then_quantizes(scheme):
    x = inputs(2, IN)
    variables = jaxq.linen.QuantDense(OUT, scheme=scheme).init(jax.random.key(0), x)
    float_variables = nn.Dense(OUT).init(jax.random.key(0), x)
    weight = variables["quant"]["kernel"]
    assert_same_tree(weight, quantize_tensor(float_variables["params"]["kernel"], scheme))
    assert_same_tree(variables, quantize(float_variables, scheme))
    layer, converted = jaxq.linen.QuantDense.from_dense(nn.Dense(OUT), float_variables, scheme)
    assert_same_tree(variables, converted)
    assert (layer.features, layer.scheme) == (OUT, scheme)
    # Rows of the weight by one-hot inputs; int8 activations add the roundings of 127 * w * (1 / 127).
    out, want = layer.apply(converted, jnp.eye(IN)), weight.dequantize()
    assert (jnp.abs(out - want) <= 4 * 2.0**-24 * jnp.abs(want)).all()


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kwargs", [{}, dict(dtype=jnp.float16), dict(param_dtype=jnp.bfloat16)])
def test_result_dtype_is_that_of_dense(x_dtype, kwargs):
    x = inputs(3, IN).astype(x_dtype)
    with jax.numpy_dtype_promotion("standard"):
        want, variables = nn.Dense(OUT, **kwargs).init_with_output(jax.random.key(0), x)
        out = jaxq.linen.QuantDense(OUT, **kwargs).apply(quantize(variables, "W8A16"), x)
    assert out.dtype == want.dtype
    error = jnp.linalg.norm((out - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < 0.05


@pytest.mark.parametrize(
    "kwargs", [dict(precision="highest"), dict(dot_general=lambda *args: None), dict(dot_general_cls=object)]
)
def test_refuses_arguments_that_would_have_no_effect(kwargs):
    with pytest.raises(ValueError, match=r"no effect|would not be called"):
        jaxq.linen.QuantDense(OUT, **kwargs).init(jax.random.key(0), inputs(1, IN))
    variables = nn.Dense(OUT).init(jax.random.key(0), inputs(1, IN))
    with pytest.raises(ValueError, match=r"no effect|would not be called"):
        jaxq.linen.QuantDense.from_dense(nn.Dense(OUT, **kwargs), variables)


def test_model_variables():
    x = inputs(2, IN)
    float_model, model = Mlp(nn.Dense), Mlp(jaxq.linen.QuantDense)
    variables = float_model.init(jax.random.key(0), x)
    before = jax.tree.map(lambda a: a.copy(), variables)
    quantized = quantize(variables, rules=[Rule("up", "W8A8"), Rule("down", "W4A8", group_size=64)])
    assert_same_tree(variables, before)
    assert jax.tree.structure(quantized) == jax.tree.structure(
        dict(params=dict(up=dict(bias=0), norm=variables["params"]["norm"], general=variables["params"]["general"]),
             quant={name: dict(kernel=quantized["quant"][name]["kernel"]) for name in ("up", "down")})
    )  # fmt: skip
    rows = {row.path: (row.scheme, row.shape, row.group_size) for row in jaxq.linen.describe(quantized)}
    assert rows == {"up": ("W8A8", (IN, 3 * IN), None), "down": ("W4A8", (3 * IN, IN), 64)}
    want, out = float_model.apply(variables, x), model.apply(quantized, x)
    assert jnp.linalg.norm(out - want) < 0.2 * jnp.linalg.norm(want)  # the variables' schemes, not the modules' default
    np.testing.assert_allclose(jax.jit(model.apply)(quantized, x), out, rtol=1e-4, atol=1e-5)  # LayerNorm and GELU fuse
    frozen = quantize(freeze(variables), "W8A8", ignore="down")
    assert type(frozen) is type(freeze({}))
    twice = quantize(frozen, "W8A8")
    assert set(twice["quant"]) == {"up", "down"}


def test_a_layer_that_was_left_out_is_named():
    x = inputs(2, IN)
    quantized = quantize(Mlp(nn.Dense).init(jax.random.key(0), x), "W4A16", ignore="down")
    with pytest.raises(ValueError, match="QuantDense down: no kernel in the collection 'quant'"):
        Mlp(jaxq.linen.QuantDense).apply(quantized, x)


def test_a_kernel_of_another_shape_is_named():
    variables = jaxq.linen.QuantDense(OUT).init(jax.random.key(0), inputs(1, IN))
    with pytest.raises(ValueError, match=r"\(100, 70\) must be .* \(100, 71\)"):
        jaxq.linen.QuantDense(OUT + 1, use_bias=False).apply(variables, inputs(1, IN))


def test_gradients_see_the_bias_alone():
    x = inputs(4, IN)
    model = Mlp(jaxq.linen.QuantDense)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    @functools.partial(jax.jit, static_argnums=1)
    @jax.grad
    def gradients(params, model):
        return model.apply({**variables, "params": params}, x).sum()

    grads = gradients(variables["params"], model)
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
    assert float(jnp.abs(grads["up"]["bias"]).max()) > 0
    remat = gradients(variables["params"], nn.remat(Mlp)(jaxq.linen.QuantDense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), remat, grads)


class Stack(nn.Module):
    dense: nn.Module
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0, "quant": 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(self.dense, x, None)[0]


@pytest.mark.parametrize("use_bias", [True, False])
def test_stacks_are_quantized_by_layer_and_run_under_scan(use_bias):
    x = inputs(2, IN)
    variables = Stack(nn.Dense(IN, use_bias)).init(jax.random.key(0), x)
    if not use_bias:
        with pytest.raises(ValueError, match=r"^dense: a kernel \(3, 100, 100\) without bias may be 3 dense kernels"):
            quantize(variables, "W4A8")
    quantized = quantize(variables, rules=[Rule("dense", "W4A8", group_size=32)])
    single, want = jaxq.linen.QuantDense(IN, use_bias), x
    for i in range(3):
        one = quantize(
            jax.tree.map(lambda a, i=i: a[i], {"params": variables["params"]["dense"]}), "W4A8", group_size=32
        )
        assert_same_tree(jax.tree.map(lambda a, i=i: a[i], quantized["quant"]["dense"]), one["quant"])
        want = single.apply(one, want)
    model = Stack(jaxq.linen.QuantDense(IN, use_bias, scheme="W4A8", group_size=32))
    np.testing.assert_array_equal(model.apply(quantized, x), want)
    assert_same_tree(model.init(jax.random.key(0), x), quantized)
    (row,) = jaxq.linen.describe(quantized)
    assert (row.layers, row.shape) == (3, (IN, IN))


def test_kernels_of_other_layers_stay():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):  # (1, 8, 8, 4)
            x = nn.Conv(4, (3, 3), use_bias=False, name="conv2d")(x)
            x = nn.Conv(4, (3,), name="conv1d")(x[0])
            x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
            return nn.Dense(3, name="head")(x)

    variables = jax.eval_shape(Net().init, jax.random.key(0), inputs(1, 8, 8, 4))
    quantized = quantize(variables, "W8A16")
    assert list(quantized["quant"]) == ["head"]
    with pytest.raises(ValueError, match="'conv2d' matches no dense layer, only what cannot be quantized"):
        quantize(variables, rules=[Rule("conv2d", "W8A16")])


def test_bad_weights_and_bad_variables():
    variables = Mlp(nn.Dense).init(jax.random.key(0), inputs(2, IN))
    with pytest.raises(ValueError, match=r"^variables: no collection 'params' among"):
        quantize(variables["params"], "W4A16")
    with pytest.raises(ValueError, match="implementation='cuda' belongs to the layers"):
        quantize(variables, "W4A16", implementation="cuda")
    variables["params"]["down"]["kernel"] = variables["params"]["down"]["kernel"].at[3, 4].set(jnp.nan)
    with pytest.raises(ValueError, match=r"^down: "):
        quantize(variables, "W4A16")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_checkpoints_restore_into_abstract_variables(scheme, tmp_path):
    x = inputs(2, IN)
    model = Mlp(jaxq.linen.QuantDense)
    variables = quantize(Mlp(nn.Dense).init(jax.random.key(0), x), scheme)
    abstract = jax.eval_shape(lambda key: quantize(Mlp(nn.Dense).init(key, x), scheme), jax.random.key(1))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables", abstract)
    assert isinstance(restored["quant"]["up"]["kernel"], QTensor)
    assert_same_tree(restored, variables)
    np.testing.assert_array_equal(model.apply(restored, x), model.apply(variables, x))


def test_axis_names_carry_over():
    named = nn.with_partitioning(nn.initializers.normal(), ("in", "out"))
    x = inputs(2, 128)
    variables = nn.Dense(128, kernel_init=named).init(jax.random.key(0), x)
    model = jaxq.linen.QuantDense(128, kernel_init=named, scheme="W4A16_ASYM", group_size=32)
    quantized = quantize(variables, "W4A16_ASYM", group_size=32)
    assert_same_tree(model.init(jax.random.key(0), x), quantized)
    spec = nn.get_partition_spec(quantized)["quant"]["kernel"]
    assert (spec.packed, spec.scales, spec.zeros) == (P("out", "in", None), P("in", "out"), P("in", "out"))
    np.testing.assert_array_equal(model.apply(quantized, x), model.apply(nn.unbox(quantized), x))
    assert jaxq.linen.describe(quantized) == jaxq.linen.describe(nn.unbox(quantized))

    stack = Stack(jaxq.linen.QuantDense(128, kernel_init=named, scheme="W4A8")).init(jax.random.key(0), x)
    spec = nn.get_partition_spec(stack)["quant"]["dense"]["kernel"]
    assert (spec.packed, spec.scales) == (P("layers", "out", "in", None), P("layers", None, "out"))
    assert spec.subscales == P("layers", "in", "out", None)


@needs_4_devices
def test_a_sharded_kernel_gives_sharded_arrays():
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    variables = nn.Dense(128).init(jax.random.key(0), inputs(1, 256))
    sharded = jax.device_put(variables, dict(params=dict(kernel=NamedSharding(mesh, P("t", "d")), bias=None)))
    weight = quantize(sharded, "W4A16")["quant"]["kernel"]
    assert weight.packed.sharding == NamedSharding(mesh, P("d", "t", None))
    assert weight.scales.sharding == NamedSharding(mesh, P("t", "d"))
    assert_same_tree(*(jax.tree.map(np.asarray, w) for w in (weight, quantize(variables, "W4A16")["quant"]["kernel"])))
    with pytest.raises(ValueError, match=r"^kernel: in_features=256 is split 2 ways over 't'.*group_size=256"):
        quantize(sharded, "W4A16", group_size=256)


@needs_4_devices
@pytest.mark.parametrize("logical", [False, True])
def test_a_traced_sharding_that_would_split_a_group_is_refused(logical):
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    init = nn.initializers.normal()
    if logical:
        init = nn.with_logical_partitioning(init, ("in", "out"), rules=(("in", "t"), ("out", None)))
    else:
        init = nn.with_partitioning(init, ("t", None))
    model = jaxq.linen.QuantDense(64, kernel_init=init, scheme="W8A16", group_size=128)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="in_features=384 is split 4 ways over 't'"):
        jax.eval_shape(model.init, jax.random.key(0), inputs(1, 384))
