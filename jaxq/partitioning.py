"""The operands of a custom call by name, and how they are split over devices.

=========  ====  ==================================================================================================
x          mk    bfloat16 or float16; with 8-bit activations also float32, or int8. k is padded as in the weight
x_scale    m.    float32 ``(m, 1)``, with an int8 x
packed     nk.   uint8 ``(n_blocks, k_blocks, block_bytes)``
scales     kn    floating ``(groups or 1, n_padded)``
zeros      kn    optional, uint8 or floating
subscales  kn.   optional, uint8 ``(groups, n_padded, 2)``
bias       n     optional, floating ``(n_padded,)``
out_scale  .     optional, float32 ``(1,)``
=========  ====  ==================================================================================================

The letters name the axes: "k" any blocking of k (elements, blocks, groups, one), "n" of n, "." a private one that is
never split. Weights decide how n and k are split, activations how m is: x is cheap to slice, a weight dear to gather.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxq import reference
from jaxq.packing import BLOCK

DIMS = {
    "x": "mk",
    "x_scale": "m.",
    "packed": "nk.",
    "scales": "kn",
    "zeros": "kn",
    "subscales": "kn.",
    "bias": "n",
    "out_scale": ".",
}
_EPILOGUE = ("bias", "out_scale")  # operands that come after the sum over k
_OWNER = {"m": "x", "n": "packed", "k": "packed"}  # whose sharding decides

Axes = dict[str, Any]  # letter -> mesh axis, tuple of them, or None


class Partitioning:
    """How one kind of custom call is split.

    Args:
      results: the letters of each result's axes.
      splits: the letters that may be split. A k that no result has is summed over the devices.
      kernel: one device's call, ``(operands by name, **static parameters) -> results``.
    """

    def __init__(self, results: tuple[str, ...], splits: str, kernel: Callable[..., Any]):
        self.results, self.splits, self.kernel = results, splits, kernel
        self.sums_over_k = "k" in splits and not any("k" in dims for dims in results)

    def axes(self, arrays: Mapping[str, Any], params: Mapping[str, Any], order: str = "mnk") -> Axes:
        """The mesh axes that each letter is split over: those of its owner that no earlier letter has taken."""
        axes: Axes = dict.fromkeys("mnk.")
        taken: set[str] = set()
        for letter in filter(self.splits.__contains__, order):
            owner = _OWNER[letter]
            dim = DIMS[owner].index(letter)
            spec = (*arrays[owner].sharding.spec, *[None] * arrays[owner].ndim)
            names = mesh_axes(spec[dim])
            shards = math.prod(arrays[owner].sharding.mesh.shape[name] for name in names)
            if names and not taken & set(names) and _parts(letter, arrays, params) % shards == 0:
                axes[letter] = spec[dim]
                taken |= set(names)
        return axes

    def sharding_rule(self, params: Any, mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
        """The same for Shardy: a letter is a factor of as many parts as it may be split into, others stay whole."""
        static = dict(params)
        arrays = dict(zip(static["operands"], operands, strict=True))
        parts = {letter: _parts(letter, arrays, static) for letter in self.splits}
        factors: dict[str, Any] = {}

        def factor(name: str, size: int) -> str:
            factors[name] = size
            return name

        def mapping(dims: str, shape: tuple[int, ...]) -> ArrayMapping:
            entries: list[Any] = []
            for letter, size in zip(dims, shape, strict=True):
                common = parts.get(letter, 1)
                if common == 1 or size % common:  # also the one scale of all groups
                    entries.append(factor(f"{letter.replace('.', 'private')}_whole{size}", size))
                elif size == common:
                    entries.append(factor(letter, size))
                else:
                    inner = size // common
                    entries.append(CompoundFactor(factor(letter, common), factor(f"{letter}_inner{inner}", inner)))
            return ArrayMapping(*entries)

        ins = tuple(mapping(DIMS[name], tuple(a.shape)) for name, a in arrays.items())
        outs = tuple(mapping(dims, tuple(a.shape)) for dims, a in zip(self.results, results, strict=True))
        inferred = {entry for array in (*ins, *outs) for entry in array if isinstance(entry, str)}
        return SdyShardingRule(
            ins,
            outs,
            reduction_factors=("k",) if self.sums_over_k and "k" in factors else (),
            need_replication_factors=tuple(name for name in factors if name not in parts),
            **{name: size for name, size in factors.items() if name not in inferred},
        )

    def partition(self, params: Any, mesh: Any, args: Any, results: Any) -> Any:
        """The callback of ``custom_partitioning``: one device's function, and the shardings that it is made for."""
        static = dict(params)
        arrays = dict(zip(static["operands"], args, strict=True))
        axes = self.axes(arrays, static, self._order(arrays, static, results))
        summed = axes["k"] if self.sums_over_k else None
        outs = [[axes[d] for d in dims] for dims in self.results]
        scatter = None
        if summed is not None:  # all-reduce, or reduce-scatter to where the result is wanted
            scatter = _scattered_dim(results[0], outs[0], summed, mesh, whole_n=static["n"] % BLOCK == 0)
            if scatter is not None:
                outs[0][scatter] = summed
        n_of_epilogue = outs[0][1] if summed is not None else axes["n"]

        def spec(name: str, shape: tuple[int, ...]) -> PartitionSpec:
            if name == "bias":
                return PartitionSpec(n_of_epilogue)
            return PartitionSpec(*(None if s == 1 else axes[d] for d, s in zip(DIMS[name], shape, strict=True)))

        # NOTE: under explicit meshes a psum in here would get a sharding constraint that makes XLA abort; so say that
        # every axis is manual.
        manual = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Manual,) * len(mesh.axis_names))

        def local(*args: jax.Array) -> tuple[jax.Array, ...]:
            with jax.sharding.use_abstract_mesh(manual):
                if summed is None:
                    return by_name(self.kernel, *args, **_local_static(static, args))
                return self._sum_shards(args, _local_static(static, args), mesh_axes(summed), scatter)

        ins = tuple(NamedSharding(mesh, spec(name, a.shape)) for name, a in arrays.items())
        return mesh, local, tuple(NamedSharding(mesh, PartitionSpec(*out)) for out in outs), ins

    def _order(self, arrays: Mapping[str, Any], static: Mapping[str, Any], results: Any) -> str:
        """Whether m or n comes first to a mesh axis that both could have: n if the result is wanted that way."""
        n_axis = self.axes(arrays, static, "nmk")["n"]
        wanted = (*results[0].sharding.spec, None, None)
        return "nmk" if n_axis is not None and n_axis == wanted[1] else "mnk"

    def _sum_shards(
        self, args: tuple[jax.Array, ...], static: dict[str, Any], names: tuple[str, ...], scatter: int | None
    ) -> tuple[jax.Array]:
        """Multiplies a shard of k and sums over the others, in float32 (raw sums in int32), before the epilogue."""
        arrays = dict(zip(static["operands"], args, strict=True))
        out_dtype, relu = static["out_dtype"], static["relu"]
        factors = {name: a for name, a in arrays.items() if name not in _EPILOGUE}
        partial = "int32" if out_dtype == "int32" else "float32"
        static |= dict(operands=tuple(factors), out_dtype=partial, relu=False)
        (y,) = by_name(self.kernel, *factors.values(), **static)
        if scatter is None:
            y = jax.lax.psum(y, names)
        else:
            y = jax.lax.psum_scatter(y, names, scatter_dimension=scatter, tiled=True)
        return (reference.epilogue(y, arrays, out_dtype=out_dtype, relu=relu),)


def by_name(function: Any, *args: Any, operands: tuple[str, ...], force_reference: bool, **params: Any) -> Any:
    """Calls a reference or a kernel with a primitive's operands and static parameters."""
    return function(dict(zip(operands, args, strict=True)), **params)


def _parts(letter: str, arrays: Mapping[str, Any], params: Mapping[str, Any]) -> int:
    """The number of parts that a letter divides into, such that a part is a whole slice of every array that has it."""
    if letter == "m":
        return int(arrays["x"].shape[0])
    blocks = int(arrays["packed"].shape[DIMS["packed"].index(letter)])
    if letter == "n":
        return blocks if params["n"] == blocks * BLOCK else 1
    groups = max((arrays[name].shape[0] for name in ("scales", "zeros", "subscales") if name in arrays), default=1)
    if groups == 1:
        return blocks
    return math.gcd(blocks, groups) if groups * params["group"] == blocks * BLOCK else 1


def _local_static(static: Mapping[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Static parameters of a shard: its own n, if n is split."""
    local = dict(static)
    if "n" in local:
        blocks = args[local["operands"].index("packed")].shape[0]
        if blocks != -(-local["n"] // BLOCK):
            local["n"] = blocks * BLOCK
    return local


def _scattered_dim(result: Any, out: list[Any], summed: Any, mesh: Any, whole_n: bool) -> int | None:
    """The axis of the result (m, n) that is wanted split as k is, and may be."""
    shards = math.prod(mesh.shape[name] for name in mesh_axes(summed))
    want = (*result.sharding.spec, None, None)
    for dim in (0, 1):
        if out[dim] is None and want[dim] == summed and result.shape[dim] % shards == 0 and (dim == 0 or whole_n):
            return dim
    return None


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
