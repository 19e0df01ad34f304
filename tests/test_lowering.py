"""What is lowered where: the custom call's text for CUDA, seen from any machine, and plain StableHLO elsewhere."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxq import _ffi, ops, primitive

pytestmark = pytest.mark.skipif(
    _ffi.runs_on_cuda() and not _ffi.has_cuda(), reason="on CUDA without the kernels everything is the reference"
)


def lowered(platform: str, f: Any, *args: Any) -> str:
    return str(jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text())


def custom_calls(text: str) -> list[str]:
    return re.findall(r"custom_call @(jaxq_\w+)", text)


def attributes(text: str) -> dict[str, str]:
    """Of the only custom call; an integer with its type, a string with its quotes."""
    (config,) = re.findall(r"mhlo\.backend_config = \{(.*?)\}", text)
    return dict(re.findall(r'(\w+) = (".*?"|-?\d+ : \w+)', config))


def types(text: str) -> tuple[list[str], list[str]]:
    """Operands and results of the only custom call."""
    (line,) = [line for line in text.splitlines() if "custom_call @jaxq" in line]
    ins, outs = line.rsplit(" : ", 1)[1].split(" -> ")
    return re.findall(r"tensor<(.*?)>", ins), re.findall(r"tensor<(.*?)>", outs)


KINDS = {
    "w4a16": "x packed scales bias",
    "w4a16-zeros": "x packed scales zeros bias",
    "w8a16": "x packed scales bias",
    "w8a8": "x packed scales bias",
    "w4a8-two-level": "x packed scales subscales bias",
}


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_gets_one_custom_call(rng, kind):
    w = oracle.random_weight(rng, kind, k=200, n=100, group_size=40)  # groups are padded to 64: k becomes 5 * 64
    x, bias = jnp.ones((2, 3, 200), jnp.bfloat16), jnp.ones(100)
    text = lowered("cuda", ops.matmul, x, w, bias)
    assert custom_calls(text) == [f"jaxq_{kind.split('-')[0]}"]
    expected = {"operands": f'"{KINDS[kind]}"', "group": "64 : i64", "relu": "0 : i64", "config": "-1 : i64"}
    assert attributes(text) == expected
    ins, outs = types(text)
    assert ins[0] == "6x320xbf16" and ins[1] == f"2x5x{64 * 64 * w.bits // 8}xui8" and ins[-1] == "128xf32"
    assert outs[0] == "6x100xbf16"
    assert outs[2:] == (["6x320xi8", "6x1xf32"] if "a8" in kind else [])
    assert not re.search(r"dense<\[0, 1\]>", text)  # every layout is row-major


def test_int8_activations_and_every_optional_operand(rng):
    w = oracle.random_weight(rng, "w8a8", k=64, n=64)
    x, x_scale, bias = jnp.ones((3, 64), jnp.int8), jnp.ones(3), jnp.ones(64)
    call = functools.partial(ops.w8a8_matmul, out_dtype=jnp.int8, relu=True)
    text = lowered("cuda", lambda *args: call(*args[:3], x_scale=args[3], out_scale=args[4]), x, w, bias, x_scale, 0.5)
    assert attributes(text)["operands"] == '"x x_scale packed scales bias out_scale"'
    assert attributes(text)["relu"] == "1 : i64" and attributes(text)["group"] == "0 : i64"
    ins, outs = types(text)
    assert ins[:2] == ["3x64xi8", "3x1xf32"] and ins[-1] == "1xf32" and outs[0] == "3x64xi8" and len(outs) == 2


@pytest.mark.parametrize(
    "m, k, bytes_", [(1, 64, 1), (3, 1024, 2 * 3 * 128 * 4), (3, 8192, 8 * 3 * 128 * 4), (65536, 512, 1)]
)
def test_workspace_holds_the_partial_sums_of_a_split_k(rng, m, k, bytes_):
    w = oracle.random_weight(rng, "w4a16", k, n=100)
    assert bytes_ == 1 or m * 100 <= 2**22
    _, outs = types(lowered("cuda", ops.matmul, jax.ShapeDtypeStruct((m, k), jnp.bfloat16), w))
    assert outs[1] == f"{bytes_}xui8"


def test_quantize_and_dequantize(rng):
    text = lowered("cuda", ops.quantize_per_token, jnp.ones((2, 3, 100)))
    assert types(text) == (["6x100xf32"], ["6x100xi8", "6x1xf32"])
    text = lowered("cuda", ops.dequantize, oracle.random_weight(rng, "w4a8", k=100, n=70))
    assert custom_calls(text) == ["jaxq_dequantize"]
    expected = {"group": "0 : i64", "bits": "4 : i64", "act_bits": "8 : i64", "signed_nibbles": "1 : i64"}
    assert attributes(text) == {"operands": '"packed scales"'} | expected
    assert types(text)[1] == ["128x70xbf16"]


def test_reference_is_forced_on_cuda_too(rng):
    w, x = oracle.random_weight(rng, "w4a16", k=64, n=64), jnp.ones((3, 64), jnp.bfloat16)
    assert "jaxq" not in lowered("cuda", lambda x, w: ops.matmul(x, w, implementation="reference"), x, w)
    assert "jaxq" not in lowered("cuda", lambda w: ops.dequantize(w, implementation="reference"), w)
    assert "jaxq" not in lowered("cuda", lambda x: ops.quantize_per_token(x, implementation="reference"), x)


def test_on_cuda_without_the_kernels_the_reference_is_lowered(rng, monkeypatch):
    monkeypatch.setattr(_ffi, "falls_back", lambda: True)
    text = lowered("cuda", ops.matmul, jnp.ones((3, 64), jnp.bfloat16), oracle.random_weight(rng, "w4a16", k=64, n=64))
    assert "jaxq" not in text and "dot_general" in text


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_get_the_reference(rng, platform):
    w = oracle.random_weight(rng, "w8a8", k=64, n=64)
    text = lowered(platform, ops.matmul, jnp.ones((3, 64), jnp.bfloat16), w)
    assert "custom_call @jaxq" not in text and "dot_general" in text


def test_vmap_does_not_copy_the_weight(rng):
    w = oracle.random_weight(rng, "w4a16", k=128, n=64)
    text = lowered("cuda", jax.vmap(ops.matmul, (0, None)), jnp.ones((5, 3, 128), jnp.bfloat16), w)
    assert types(text)[0][:2] == ["15x128xbf16", "1x2x2048xui8"]
    assert "5x1x2x2048" not in text


def test_scan_calls_the_kernel_in_its_body(rng):
    w = oracle.random_weight(rng, "w4a16", k=64, n=64)
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 3), w)

    def layers(x: jax.Array, ws: Any) -> Any:
        return jax.lax.scan(lambda x, w: (ops.matmul(x, w), None), x, ws)

    text = lowered("cuda", layers, jnp.ones((2, 64)), stacked)
    assert custom_calls(text) == ["jaxq_w4a16"] and "stablehlo.while" in text


def test_the_backward_pass_of_activations_holds_no_gradient_of_scales(rng):
    w = oracle.random_weight(rng, "w4a16", k=128, n=64)
    x = jnp.ones((3, 128), jnp.bfloat16)
    compiled = jax.jit(jax.grad(lambda x, w: ops.matmul(x, w).astype(jnp.float32).sum())).lower(x, w).compile()
    assert compiled.as_text().count(" dot(") <= 1  # dy @ w.T alone


def test_shard_map_calls_the_kernel_on_each_device(rng):
    mesh = jax.make_mesh((4,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    w = oracle.random_weight(rng, "w4a16", k=256, n=64)
    specs = jax.tree.map(lambda a: P(None, "t") if a.ndim == 3 else P(), w)
    f = jax.shard_map(
        lambda x, w: jax.lax.psum(ops.matmul(x, w), "t"), mesh=mesh, in_specs=(P(None, "t"), specs), out_specs=P()
    )
    text = lowered("cuda", f, jnp.ones((3, 256), jnp.bfloat16), w)
    assert types(text)[0][:2] == ["3x64xbf16", "1x1x2048xui8"]


# Export


def test_export_for_cuda_from_here(rng):
    w, x = oracle.random_weight(rng, "w4a16", k=64, n=64), jnp.ones((3, 64), jnp.bfloat16)
    f = jax.jit(ops.matmul)
    with pytest.raises(ValueError, match="jaxq_w4a16"):
        export.export(f, platforms=["cuda"])(x, w)
    exported = export.export(f, platforms=["cuda"], disabled_checks=primitive.EXPORT_CHECKS)(x, w)
    assert custom_calls(exported.mlir_module()) == ["jaxq_w4a16"]


def test_export_with_an_unknown_number_of_rows(rng):
    w = oracle.random_weight(rng, "w8a8", k=64, n=64)
    (m,) = export.symbolic_shape("m")

    def f(x: jax.Array) -> jax.Array:
        return ops.matmul(x, w)

    x = jax.ShapeDtypeStruct((m, 64), jnp.float32)
    for_cuda = export.export(jax.jit(f), platforms=["cuda"], disabled_checks=primitive.EXPORT_CHECKS)(x)
    assert custom_calls(for_cuda.mlir_module()) == ["jaxq_w8a8"]
    here = export.export(jax.jit(f), platforms=["cpu"])(x)
    rows = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32)
    np.testing.assert_array_equal(here.call(rows), f(rows))


def test_export_checks_name_every_custom_call():
    names = {"jaxq_w4a16", "jaxq_w8a16", "jaxq_w8a8", "jaxq_w4a8", "jaxq_dequantize", "jaxq_quantize_per_token"}
    assert {check.is_custom_call() for check in primitive.EXPORT_CHECKS} == names
