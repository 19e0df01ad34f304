"""The quantized layer for Flax Linen, and the quantization of a whole model's variables.

`dense.py` says what the layer does. The collection "quant" holds each kernel as one ``QTensor``, so that gradients of
"params" do not see it, and so that the variables, not the module, decide what a layer's scheme is.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict, freeze, meta
from flax.linen import dtypes, linear
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import NamedSharding

from jaxq import dense
from jaxq.qtensor import QTensor

COLLECTION = "quant"


class QuantDense(nn.Module):
    """``nn.Dense`` with a quantized kernel: ``x @ dequantize(weight) + bias``.

    A drop-in for ``nn.Dense``: the same arguments, the same initial kernel for the same key (quantized), a result of
    the same dtype. Schemes with 16-bit activations round float32 inputs to bfloat16 before the product; pass float16
    inputs or ``dtype=jnp.float16`` for more mantissa.

    Variables: ``quant/kernel``, a ``jaxq.QTensor`` ``(in, features)``, and ``params/bias`` ``(features,)``. A kernel
    initializer with axis names (``nn.with_partitioning``) gives the arrays of the QTensor theirs.

    Attributes:
      features: n, the last axis of the result.
      use_bias: whether to add a bias.
      dtype: of the computation, and of the result; by default inferred from inputs and ``param_dtype``.
      param_dtype: of the bias, and of the kernel before it is quantized.
      precision: only None or the default: it would have no effect.
      kernel_init: initializer of the float kernel.
      bias_init: initializer of the bias.
      promote_dtype: as of ``nn.Dense``; in place of the kernel it is given a scalar of ``param_dtype``.
      dot_general: only the default: it would not be called.
      dot_general_cls: only None.
      scheme: a name of ``jaxq.SCHEMES``, for ``init``; ``apply`` takes that of the variables.
      group_size: for ``init`` also: rows of the kernel that share a scale; None (or -1) for one scale per channel,
        "default" for the scheme's own.
      implementation: None, "cuda" or "reference", as of ``jaxq.matmul``.

    Raises:
      TypeError: the inputs' dtype is not one that promotes to a floating one.
      ValueError: a refused argument; no quantized kernel in the variables, or one of another shape; see also
        ``jaxq.quantize_tensor``.
    """

    features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
    dot_general: Any = None
    dot_general_cls: Any = None
    scheme: str = "W4A16"
    group_size: dense.GroupSize = "default"
    implementation: str | None = None

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """Multiplies the last axis of the inputs.

        Args:
          inputs: ``(..., in)``.

        Returns:
          ``(..., features)``; dtype of the promoted inputs.
        """
        dense.refuse_ineffective(self.precision, self.dot_general, self.dot_general_cls)
        in_features = jnp.shape(inputs)[-1]
        where = "QuantDense " + "/".join(self.path)
        if not self.has_variable(COLLECTION, "kernel") and not self.is_mutable_collection(COLLECTION):
            raise ValueError(
                f"{where}: no kernel in the collection {COLLECTION!r} of the variables; make them with init, or with "
                "jaxq.quantize(variables, ...), where a rule must not leave this layer out"
            )

        def init_kernel() -> Any:
            kernel = self.kernel_init(self.make_rng("params"), (in_features, self.features), self.param_dtype)
            return _quantize_boxed(kernel, self.scheme, self.group_size, where)

        weight = self.variable(COLLECTION, "kernel", init_kernel).value
        if weight.packed.ndim == 3 and weight.shape != (in_features, self.features):
            raise ValueError(
                f"{where}: the kernel's shape {weight.shape} must be (inputs.shape[-1], features) = "
                f"{(in_features, self.features)}"
            )
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        promoted, _, bias = self.promote_dtype(inputs, dense.stand_in(self.param_dtype), bias, dtype=self.dtype)
        return dense.apply(inputs, promoted, weight, bias, implementation=self.implementation)

    @classmethod
    def from_dense(
        cls,
        layer: nn.Dense,
        variables: Mapping[str, Any],
        scheme: str = "W4A16",
        *,
        group_size: dense.GroupSize = "default",
        implementation: str | None = None,
    ) -> tuple["QuantDense", dict[str, Any]]:
        """Quantizes a layer and its variables; the given ones stay as they are.

        Args:
          layer: the float layer.
          variables: ``{"params": {"kernel": ..., "bias": ...}}``; the kernel ``(in, out)``, or a stack of them.
          scheme: a name of ``jaxq.SCHEMES``.
          group_size: as of the class.
          implementation: as of the class.

        Returns:
          The quantized layer and its variables ``{"params": {"bias": ...}, "quant": {"kernel": ...}}``.

        Raises:
          ValueError: NaN or infinity in the kernel; the layer has a ``precision`` or ``dot_general`` of its own; the
            kernel's sharding would split a group.
        """
        dense.refuse_ineffective(layer.precision, layer.dot_general, layer.dot_general_cls)
        same = {
            field.name: getattr(layer, field.name) for field in dataclasses.fields(nn.Dense) if field.name != "parent"
        }
        quantized = cls(**same, scheme=scheme, group_size=group_size, implementation=implementation)
        return quantized, dict(quantize_layers(variables, {"": (scheme, group_size)}))


def describe(variables: Mapping[str, Any]) -> list[dense.LayerSummary]:
    """One row for each quantized layer of a Linen model's variables, concrete or abstract."""
    return [
        dense.summarize(path, _without_boxes(holder["kernel"]))
        for path, holder in _walk(variables.get(COLLECTION, {}))
        if "kernel" in holder
    ]


def find_layers(variables: Mapping[str, Any]) -> tuple[list[dense.Candidate], list[str]]:
    """The layers that ``quantize_layers`` can move to "quant", and all other paths of "params".

    Raises:
      ValueError: there is no collection "params".
    """
    if "params" not in variables:
        raise ValueError(
            f"variables: no collection 'params' among {sorted(variables)}; pass a model's variables, {{'params': ...}}"
        )
    layers, others = [], []
    for path, holder in _walk(variables["params"]):
        if _is_dense(holder):
            shape = _without_boxes(holder["kernel"]).shape
            doubt = f"a kernel {shape} without bias may be {shape[0]} dense kernels or another layer's"
            layers.append(dense.Candidate((path,), doubt if len(shape) > 2 and "bias" not in holder else None))
        else:
            others.append(path)
    return layers, others


def quantize_layers(variables: Mapping[str, Any], plan: Mapping[str, tuple[str, dense.GroupSize]]) -> Mapping[str, Any]:
    """New variables in which the kernels of some layers are quantized, one at a time, and stand in "quant".

    Args:
      variables: stay as they are.
      plan: scheme and group size for each layer to quantize, by its path (``find_layers``).
    """

    def split(holder: Mapping[str, Any], path: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What stays of a subtree of "params", and what its layers add to "quant"; neither keeps emptied layers."""
        if path in plan:
            scheme, group_size = plan[path]
            weight = _quantize_boxed(holder["kernel"], scheme, group_size, path or "kernel")
            return {name: value for name, value in holder.items() if name != "kernel"}, {"kernel": weight}
        params, quant = {}, {}
        for name, value in holder.items():
            params[name] = value
            if isinstance(value, Mapping):
                params[name], quant[name] = split(value, _join(path, name))
                if quant[name] and not params[name]:
                    del params[name]
                if not quant[name]:
                    del quant[name]
        return params, quant

    params, quant = split(variables["params"], "")
    rest = {name: value for name, value in variables.items() if name != "params"}
    new = {**rest, "params": params, COLLECTION: _merge(rest.get(COLLECTION, {}), quant)}
    if not params:
        del new["params"]
    return freeze(new) if isinstance(variables, FrozenDict) else new


def _is_dense(holder: Mapping[str, Any]) -> bool:
    """Whether a layer's variables look like ``nn.Dense``'s, or a stack of them; 4-D alone is a convolution."""
    if "kernel" not in holder or not holder.keys() <= {"kernel", "bias"}:
        return False
    kernel, bias = _without_boxes(holder["kernel"]), _without_boxes(holder.get("bias"))
    if not hasattr(kernel, "ndim"):
        return False
    if bias is None:
        return kernel.ndim in (2, 3)
    return bool(kernel.ndim >= 2 and bias.shape == (*kernel.shape[:-2], kernel.shape[-1]))


def _quantize_boxed(kernel: Any, scheme: str, group_size: dense.GroupSize, name: str) -> QTensor:
    """Quantizes a kernel; boxes with axis names (``nn.Partitioned``) go around each array of the result.

    A concrete or abstract kernel's sharding is carried over, a traced one's is checked.
    """
    value = _without_boxes(kernel)
    weight = dense.quantize_kernel(value, scheme, group_size, name)
    if (sharding := dense.kernel_sharding(value)) is not None:
        weight = dense.place(weight, sharding, name)
    if not meta.is_axis_metadata(kernel):
        return weight
    if sharding is None and (mesh := kernel.mesh or meta.get_global_mesh()):
        spec = kernel.get_partition_spec()
        if isinstance(kernel, nn.LogicallyPartitioned):
            spec = logical_to_mesh_axes(kernel.names, kernel.rules)
        dense.check_split(weight, NamedSharding(mesh, spec), name)
    axes = dense.field_axes(weight, kernel.names)
    boxed = {field: kernel.replace(value=getattr(weight, field), names=axes[field]) for field in axes}
    return dataclasses.replace(weight, **boxed)


def _without_boxes(tree: Any) -> Any:
    """``meta.unbox`` without its sharding constraints."""
    is_box = meta.is_axis_metadata
    return jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, tree, is_leaf=is_box)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _walk(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every mapping of a tree of variables with its path."""
    yield path, tree
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, _join(path, name))


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees in one; they have no leaf in common."""
    both = dict(old)
    for name, value in new.items():
        both[name] = _merge(old[name], value) if isinstance(old.get(name), Mapping) else value
    return both
