"""What JAX must know about a custom call: its type, its lowering and its batching; ``partitioning.py`` has the rest.

An ``Op`` turns "a custom call plus its meaning in plain jnp" into a JAX primitive. Operands go by name; static
parameters are hashable: dtypes are strings.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from jaxq import _ffi, reference
from jaxq.packing import BLOCK
from jaxq.partitioning import DIMS, Partitioning, by_name
from jaxq.quantizers import per_token

Arrays = Mapping[str, jax.Array]


class Op:
    """A primitive of one custom call.

    Args:
      name: of the primitive.
      results: axes and dtype of each result; no dtype means the static parameter ``out_dtype``.
      reference: the meaning, ``(operands by name, **static) -> results``; the lowering off CUDA.
      kernel: the same for one device's arrays, as a custom call.
      splits: the letters that may be split over devices; see ``Partitioning``.
      platforms: where ``kernel`` is the lowering.
    """

    def __init__(
        self,
        name: str,
        results: tuple[tuple[str, str | None], ...],
        reference: Callable[..., tuple[jax.Array, ...]],
        kernel: Callable[..., tuple[jax.Array, ...]],
        *,
        splits: str,
        platforms: tuple[str, ...] = ("cuda",),
    ):
        self.results, self.reference, self.kernel = results, reference, kernel
        self.partitioning = Partitioning(tuple(dims for dims, _ in results), splits, kernel)
        p = self.primitive = Primitive(name)
        p.multiple_results = True
        p.def_impl(functools.partial(xla.apply_primitive, p))
        p.def_abstract_eval(self._type)
        batching.primitive_batchers[p] = self._batch
        mlir.register_lowering(p, self._lower_reference)
        for platform in platforms:
            mlir.register_lowering(p, self._lower_kernel, platform=platform)
        dispatch.prim_requires_devices_during_lowering.add(p)
        self._spmd = custom_partitioning(
            lambda params, *args: by_name(kernel, *args, **dict(params)), static_argnums=(0,)
        )
        self._spmd.def_partition(self.partitioning.partition, sharding_rule=self.partitioning.sharding_rule)

    def __call__(self, arrays: Arrays, *, force_reference: bool, **params: Any) -> tuple[jax.Array, ...]:
        """Binds the operands; ``force_reference`` lowers the reference on CUDA too."""
        operands = tuple(name for name in DIMS if name in arrays)
        values = same_varying(*(arrays[name] for name in operands))
        return tuple(self.primitive.bind(*values, operands=operands, force_reference=force_reference, **params))

    # Type

    def _type(self, *avals: Any, operands: tuple[str, ...], **params: Any) -> list[Any]:
        arrays = dict(zip(operands, avals, strict=True))
        size, axes = _sizes(arrays, params), self.partitioning.axes(arrays, params)
        like = avals[0]  # carries the axes that it varies over inside shard_map
        mesh = next((a.sharding.mesh for a in avals if not a.sharding.mesh.empty), like.sharding.mesh)
        return [
            like.update(
                shape=tuple(size[d] for d in dims),
                dtype=np.dtype(dtype or params["out_dtype"]),
                weak_type=False,
                sharding=NamedSharding(mesh, PartitionSpec(*(axes[d] for d in dims))),
            )
            for dims, dtype in self.results
        ]

    # Lowering

    def _lower_reference(self, ctx: Any, *args: Any, **params: Any) -> Any:
        params.pop("config", None)
        shardings = tuple(aval.sharding for aval in ctx.avals_out)
        call = without_explicit_axes(functools.partial(by_name, self.reference, **params), shardings)
        return mlir.lower_fun(call, multiple_results=True)(ctx, *args)

    def _lower_kernel(self, ctx: Any, *args: Any, **params: Any) -> Any:
        if params["force_reference"] or _ffi.falls_back():
            return self._lower_reference(ctx, *args, **params)
        if isinstance(ctx.module_context.axis_context, mlir.SPMDAxisContext):  # in shard_map: one device's arrays
            call = functools.partial(by_name, self.kernel, **params)
        else:
            call = functools.partial(self._spmd, tuple(sorted(params.items())))
        return mlir.lower_fun(call, multiple_results=True)(ctx, *args)

    # Batching

    def _batch(self, args: Any, axes: Any, *, operands: tuple[str, ...], **params: Any) -> Any:
        batched = {
            name: jnp.moveaxis(a, i, 0) for name, a, i in zip(operands, args, axes, strict=True) if i is not None
        }
        alone = {name: a for name, a, i in zip(operands, args, axes, strict=True) if i is None}

        def call(arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
            return self(arrays | alone, **params)

        if any("m" not in DIMS[name] for name in batched):
            ys = jax.lax.map(call, batched)
        else:  # activations only: more rows for the same weight
            size = next(iter(batched.values())).shape[0]
            for name in [name for name in alone if "m" in DIMS[name]]:
                a = alone.pop(name)
                batched[name] = jnp.broadcast_to(a, (size, *a.shape))
            ys = call({name: a.reshape(size * a.shape[1], *a.shape[2:]) for name, a in batched.items()})
            ys = tuple(y.reshape(size, y.shape[0] // size, *y.shape[1:]) for y in ys)
        return ys, (0,) * len(ys)


def _sizes(arrays: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Elements of each letter in a result."""
    size: dict[str, Any] = {".": 1}
    if "packed" in arrays:
        size |= dict(k=arrays["packed"].shape[1] * BLOCK, n=params["n"])
    if "x" in arrays:
        size |= dict(zip("mk", arrays["x"].shape, strict=True))
    return size


def same_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Inside shard_map, makes operands agree on the mesh axes that they vary over."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(union - v), to="varying") if union - v else a
        for a, v in zip(arrays, varying, strict=True)
    ]


def without_explicit_axes(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """On an explicit mesh, lets the compiler choose the shardings inside a function; its results get those given."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    if AxisType.Explicit not in mesh.axis_types:
        return function
    wrapped: Callable[..., Any] = auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)
    return wrapped


# The custom calls


def _results(like: jax.Array, *types: tuple[tuple[Any, ...], Any]) -> list[Any]:
    """Types of a custom call's results, which vary over the axes that an operand varies over."""
    aval: Any = jax.typeof(like)
    return [
        aval.update(
            shape=shape,
            dtype=np.dtype(dtype),
            weak_type=False,
            sharding=aval.sharding.update(spec=PartitionSpec(*[None] * len(shape))),
        )
        for shape, dtype in types
    ]


def _workspace_bytes(m: Any, n_padded: int, k: int) -> int:
    """Room for the partial sums of a split k, which only small problems need; never empty."""
    if not isinstance(m, int) or m * n_padded > 2**22:  # m is symbolic in an export with unknown sizes
        return 1
    return max(1, min(8, k // 512) * m * n_padded * 4)


def _gemm(name: str, bits: int, act_bits: int) -> Op:
    def kernel(arrays: Arrays, *, n: int, group: int, out_dtype: str, relu: bool, config: int) -> tuple[jax.Array]:
        x = arrays["x"]
        m, k = x.shape
        types: list[tuple[tuple[Any, ...], Any]] = [
            ((m, n), out_dtype),
            ((_workspace_bytes(m, arrays["packed"].shape[0] * BLOCK, k),), "uint8"),
        ]
        if act_bits == 8 and x.dtype != jnp.int8:
            types += [((m, k), "int8"), ((m, 1), "float32")]  # x as quantized by the call
        out, *_ = jax.ffi.ffi_call(name, _results(x, *types))(
            *arrays.values(),
            operands=" ".join(arrays),
            group=np.int64(group),
            relu=np.int64(relu),
            config=np.int64(config),
        )
        return (out,)

    def meaning(arrays: Arrays, **params: Any) -> tuple[jax.Array]:
        return (reference.gemm(arrays, bits=bits, act_bits=act_bits, **params),)

    return Op(name, (("mn", None),), meaning, kernel, splits="mnk")


def _dequantize_kernel(
    arrays: Arrays, *, bits: int, act_bits: int, n: int, group: int, out_dtype: str
) -> tuple[jax.Array]:
    packed = arrays["packed"]
    signed_nibbles = (bits, act_bits, group) == (4, 8, 0) and "zeros" not in arrays
    (out,) = jax.ffi.ffi_call("jaxq_dequantize", _results(packed, ((packed.shape[1] * BLOCK, n), out_dtype)))(
        *arrays.values(),
        operands=" ".join(arrays),
        group=np.int64(group),
        bits=np.int64(bits),
        act_bits=np.int64(act_bits),
        signed_nibbles=np.int64(signed_nibbles),
    )
    return (out,)


def _quantize_kernel(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    x = arrays["x"]
    types = (x.shape, "int8"), ((x.shape[0], 1), "float32")
    q, scale = jax.ffi.ffi_call("jaxq_quantize_per_token", _results(x, *types))(x)
    return q, scale


GEMMS = {
    (bits, act_bits): _gemm(f"jaxq_w{bits}a{act_bits}", bits, act_bits)
    for bits, act_bits in [(4, 16), (8, 16), (8, 8), (4, 8)]
}
DEQUANTIZE = Op(
    "jaxq_dequantize",
    (("kn", None),),
    lambda arrays, **params: (reference.dequantize(arrays, **params),),
    _dequantize_kernel,
    splits="nk",
)
QUANTIZE_PER_TOKEN = Op(
    "jaxq_quantize_per_token",
    (("mk", "int8"), ("m.", "float32")),
    lambda arrays: per_token(arrays["x"]),
    _quantize_kernel,
    splits="m",
)
EXPORT_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(op.primitive.name)
    for op in (*GEMMS.values(), DEQUANTIZE, QUANTIZE_PER_TOKEN)
]
