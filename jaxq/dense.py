"""What a quantized dense layer does, whichever Flax API holds its variables: quantize, split over devices, multiply.

No Flax here: `nnx.py` and `linen.py` hold the variables, `rules.py` chooses the layers of a whole model.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes
from jax.typing import DTypeLike

from jaxq import ops, packing
from jaxq.qtensor import QTensor
from jaxq.quantizers import quantize_tensor

FIELDS = ("packed", "scales", "zeros", "subscales", "perm")  # the arrays of a QTensor

Axes = tuple[Any, ...]  # one entry a dimension, as in PartitionSpec: None, an axis name, or a tuple of names
GroupSize = int | str | None  # "default" is the scheme's own


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layer that could be quantized.

    Attributes:
      paths: where it stands in the model, "a.b.c"; several if it is shared.
      doubt: None, or why its kernel may be none of a dense layer: then only a rule that names it may take it.
    """

    paths: tuple[str, ...]
    doubt: str | None = None


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One quantized layer of a model, for tables.

    Attributes:
      path: where it stands, "a.b.c".
      scheme: a name of ``SCHEMES``.
      layers: kernels in the stack; 1 for a plain layer.
      shape: ``(in_features, out_features)`` of one kernel.
      group_size: rows that share a scale; None for one scale per channel.
      nbytes: bytes that the packed kernels and their scales take, padding included.
      bits_per_weight: the same in bits, per weight.
    """

    path: str
    scheme: str
    layers: int
    shape: tuple[int, int]
    group_size: int | None
    nbytes: int
    bits_per_weight: float


def summarize(path: str, weight: QTensor) -> LayerSummary:
    """The row of one layer; its weight may be abstract (``jax.eval_shape``)."""
    layers, nbytes = math.prod(weight.packed.shape[:-3]), weight.nbytes
    k, n = weight.global_shape
    bits = 8 * nbytes / (layers * k * n)
    return LayerSummary(path, weight.scheme, layers, (k, n), weight.group_size, nbytes, bits)


def refuse_ineffective(precision: Any, *dot_generals: Any) -> None:
    """ValueError for an argument of Flax's dense layers that a quantized one could only ignore."""
    if precision not in (None, jax.lax.Precision.DEFAULT, "default"):
        raise ValueError(
            f"precision={precision!r} has no effect: quantized products are exact and summed in float32 or int32; "
            "leave it None"
        )
    for dot_general in dot_generals:
        if dot_general not in (None, jax.lax.dot_general):
            raise ValueError(
                f"dot_general={dot_general!r} would not be called: a quantized layer multiplies with jaxq.matmul; "
                "leave it out, or keep this layer as it is"
            )


def quantize_kernel(kernel: Any, scheme: str, group_size: GroupSize, name: str = "kernel") -> QTensor:
    """Quantizes ``(..., in, out)`` and waits for it, so that its temporaries are gone before the next layer's.

    Args:
      kernel: float array, concrete, traced or abstract; a QTensor comes back as it is.
      scheme: a name of ``SCHEMES``.
      group_size: as of ``quantize_tensor``.
      name: what error messages call it.

    Returns:
      The weight. A traced kernel on a mesh with explicit axes gives it its sharding; a concrete one does so by
      ``place``.
    """
    if isinstance(kernel, QTensor):
        return kernel

    def quantize(w: Any) -> QTensor:
        return quantize_tensor(w, scheme, group_size=group_size, name=name)

    abstract = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    if isinstance(kernel, jax.ShapeDtypeStruct):
        return cast(QTensor, jax.eval_shape(quantize, abstract))
    # Packing reshapes in ways that explicit axes do not allow: the compiler must choose the intermediates' shardings.
    if isinstance(kernel, jax.core.Tracer):
        typed = jax.typeof(kernel).sharding
        if not typed.mesh.explicit_axes:
            return quantize(kernel)
        weight: QTensor = jax.eval_shape(quantize, abstract)
        check_split(weight, typed, name)
        specs: dict[str, Any] = {field: PartitionSpec(*axes) for field, axes in field_axes(weight, typed.spec).items()}
        out = dataclasses.replace(weight, **specs)
        return cast(QTensor, auto_axes(quantize, axes=typed.mesh.explicit_axes, out_sharding=out)(kernel))
    sharding = kernel_sharding(kernel)
    if sharding is None or not sharding.mesh.explicit_axes:
        return _wait(quantize(kernel))
    mesh = sharding.mesh
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.set_mesh(mesh):
        return _wait(quantize(jax.device_put(kernel, NamedSharding(mesh, sharding.spec))))


def _wait(weight: QTensor) -> QTensor:
    return cast(QTensor, jax.block_until_ready(weight))


def field_axes(weight: QTensor, kernel_axes: Iterable[Any]) -> dict[str, Axes]:
    """The axis names of each array of a weight, from those of its kernel.

    Args:
      weight: from a kernel ``(..., in, out)``; leading axes keep their names.
      kernel_axes: one entry a dimension of the kernel (missing ones are None).

    Returns:
      For each name of ``FIELDS`` that is not None in ``weight``: packed ``(..., out, in, None)``, scales and zeros
      ``(..., in, out)``, subscales ``(..., in, out, None)``, perm ``(..., None)``. An axis of size 1 is None, and so
      is out or in everywhere if it takes a single block.
    """
    given = tuple(kernel_axes)
    *lead, k, n = given + (None,) * (weight.packed.ndim - 1 - len(given))
    n_blocks, k_blocks, _ = weight.packed.shape[-3:]
    k, n = k if k_blocks > 1 else None, n if n_blocks > 1 else None
    order: dict[str, Axes] = {
        "packed": (n, k, None),
        "scales": (k, n),
        "zeros": (k, n),
        "subscales": (k, n, None),
        "perm": (None,),
    }
    arrays = {field: getattr(weight, field) for field in FIELDS}
    return {
        field: tuple(axis if size > 1 else None for axis, size in zip((*lead, *order[field]), a.shape, strict=True))
        for field, a in arrays.items()
        if a is not None
    }


def check_split(weight: QTensor, sharding: NamedSharding, name: str = "kernel") -> None:
    """Refuses a sharding of the kernel that would split a group or a block.

    Raises:
      ValueError: a shard along in_features would not hold whole groups and whole blocks of 64, or one along
        out_features whole blocks of 64. The message names the sharding, the group size and a legal one.
    """
    spec = (*sharding.spec, *[None] * (weight.packed.ndim - 1 - len(sharding.spec)))
    n_blocks, k_blocks, _ = weight.packed.shape[-3:]
    k, n = weight.global_shape

    parts = _num_shards(spec[-1], sharding.mesh.shape)
    if n_blocks > 1 and n_blocks % parts:
        raise ValueError(
            f"{name}: out_features={n} is split {parts} ways over {spec[-1]!r}, but its {n_blocks} blocks of "
            f"{packing.BLOCK} do not divide by {parts}; leave that axis unsharded"
        )

    parts = _num_shards(spec[-2], sharding.mesh.shape)
    if k_blocks > 1 and not _holds_whole_groups(k, parts, weight.group_size):
        sizes = [g for g in range(weight.group_size or 0, 0, -1) if _holds_whole_groups(k, parts, g)]
        sizes.sort(key=lambda g: g % 32 != 0)  # first those that need no padding
        legal = [str(g) for g in sizes[:1]] + ["None"] * _holds_whole_groups(k, parts, None)
        remedy = f"use group_size={' or '.join(legal)}, or leave" if legal else "leave"
        raise ValueError(
            f"{name}: in_features={k} is split {parts} ways over {spec[-2]!r}, so that shards would not hold whole "
            f"groups of group_size={weight.group_size} and whole blocks of {packing.BLOCK}; {remedy} it unsharded"
        )


def _num_shards(entry: Any, mesh_shape: Mapping[str, int]) -> int:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh_shape[name] for name in names)


def _holds_whole_groups(k: int, parts: int, group_size: int | None) -> bool:
    """Whether equal parts of k rows are whole groups, and in the packed order whole blocks."""
    rows = k // parts
    if parts == 1 or k % parts:
        return parts == 1
    if group_size is None:
        return rows % packing.BLOCK == 0
    return rows % group_size == 0 and rows // group_size * packing.padded_group(group_size) % packing.BLOCK == 0


def place(weight: QTensor, sharding: NamedSharding, name: str = "kernel") -> QTensor:
    """Puts a weight on the devices of its kernel, each array split as ``field_axes`` says.

    Args:
      weight: concrete or abstract.
      sharding: of the kernel ``(..., in, out)``.
      name: what error messages call it.

    Raises:
      ValueError: see ``check_split``.
    """
    check_split(weight, sharding, name)

    def put(a: Any, axes: Axes) -> Any:
        to = NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)
        if isinstance(a, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)
        return jax.device_put(a, to)

    arrays = {field: put(getattr(weight, field), axes) for field, axes in field_axes(weight, sharding.spec).items()}
    return dataclasses.replace(weight, **arrays)


def kernel_sharding(kernel: Any) -> NamedSharding | None:
    """The sharding of a concrete or abstract kernel, if it is named; None for a traced one."""
    sharding = None if isinstance(kernel, jax.core.Tracer) else getattr(kernel, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def stand_in(param_dtype: DTypeLike) -> np.ndarray[Any, Any]:
    """What ``promote_dtype`` sees in place of the kernel: a scalar of the kernel's dtype before it was quantized."""
    return np.zeros((), param_dtype)


def apply(
    inputs: Any,
    promoted: jax.Array,
    weight: QTensor,
    bias: jax.Array | None,
    *,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies as Flax's dense layers do: the result has the dtype that theirs would have.

    Activations that ``promote_dtype`` only widened are multiplied as they were given; ``jaxq.matmul`` rounds wider ones
    to bfloat16 where the scheme wants 16 bits.

    Args:
      inputs: ``(..., in)``, as the caller gave them.
      promoted: the same after ``promote_dtype``; its dtype is the result's.
      weight: ``(in, out)``.
      bias: None or ``(out,)``, promoted.
      preferred_element_type: dtype of the product, in place of the promoted one.
      implementation: as of ``jaxq.matmul``.

    Raises:
      TypeError: the promoted dtype is not floating.
      ValueError: ``inputs.shape[-1]`` differs from the weight's in, or the weight is a stack (see ``jaxq.matmul``).
    """
    if not jnp.issubdtype(promoted.dtype, jnp.floating):
        raise TypeError(f"inputs: dtype {promoted.dtype} (after promote_dtype) must be floating")
    inputs, x = jnp.asarray(inputs), promoted
    if x.dtype.itemsize > 2:
        if inputs.dtype in (jnp.bfloat16, jnp.float16):
            x = inputs
        else:
            x = x.astype(jnp.float32)

    result = promoted.dtype
    if preferred_element_type is not None:
        result = jnp.dtype(preferred_element_type)
        result = result if bias is None else jnp.promote_types(result, bias.dtype)
    narrow = jnp.dtype(jnp.float32) if result == jnp.float64 else result  # kernels have no float64
    if bias is not None and bias.dtype == jnp.float64:
        bias = bias.astype(jnp.float32)
    return ops.matmul(x, weight, bias, out_dtype=narrow, implementation=implementation).astype(result)
