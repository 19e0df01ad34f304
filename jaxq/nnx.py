"""The quantized layer for Flax NNX, and the quantization of a whole NNX model's layers.

`dense.py` says what the layer does. Integer weights live in ``QuantParam``, which ``nnx.grad`` and optimizers skip.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.nnx.nn import dtypes, linear
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxq import dense
from jaxq.qtensor import QTensor

_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class QuantParam(nnx.Variable[Any]):
    """Packed codes, scales or another array of a quantized weight; not an ``nnx.Param``, so nothing trains it."""


class QuantDense(nnx.Module):
    """``nnx.Linear`` with a quantized kernel: ``x @ dequantize(weight) + bias``.

    A drop-in for ``nnx.Linear``: the same arguments, the same initial kernel for the same rngs (quantized), a result
    of the same dtype. Schemes with 16-bit activations round float32 inputs to bfloat16 before the product; pass float16
    inputs or ``dtype=jnp.float16`` for more mantissa.

    Attributes:
      packed, scales, zeros, subscales, perm: ``QuantParam``, or None where the scheme has none; see ``jaxq.QTensor``.
      bias: ``nnx.Param`` ``(out_features,)``, or None.
      scheme, group_size: of the weight; ``group_size`` is None for one scale per channel.

    Under ``nnx.vmap`` (or from a stacked kernel) all of them carry leading axes, for ``nnx.scan`` or ``lax.scan``.

    Args:
      in_features: k, the last axis of the inputs.
      out_features: n.
      scheme: a name of ``jaxq.SCHEMES``.
      group_size: rows of the kernel that share a scale; None (or -1) for one scale per channel, "default" for the
        scheme's own.
      use_bias: whether to add a bias.
      dtype: of the computation, and of the result; by default inferred from inputs and ``param_dtype``.
      param_dtype: of the bias, and of the kernel before it is quantized.
      precision: only None or the default: it would have no effect.
      kernel_init: initializer of the float kernel, ``(in_features, out_features)``; may return a ``jaxq.QTensor``.
      bias_init: initializer of the bias.
      dot_general: only the default: it would not be called.
      promote_dtype: as of ``nnx.Linear``; in place of the kernel it is given a scalar of ``param_dtype``.
      preferred_element_type: dtype of the product, as of ``nnx.Linear``.
      rngs: for the initializers.
      kernel_metadata: of the kernel, such as ``out_sharding=('in', 'out')``; the axis names carry over to ``packed``
        (out, in, None), ``scales`` and ``zeros`` (in, out) and ``subscales`` (in, out, None).
      bias_metadata: of the bias.
      implementation: None, "cuda" or "reference", as of ``jaxq.matmul``.

    Raises:
      ValueError: ``precision`` or ``dot_general`` is given; the sharding would split a group (both are named); see also
        ``jaxq.quantize_tensor``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scheme: str = "W4A16",
        group_size: dense.GroupSize = "default",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Any] = linear.default_kernel_init,
        bias_init: Callable[..., Any] = linear.default_bias_init,
        dot_general: Callable[..., Any] = jax.lax.dot_general,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        implementation: str | None = None,
    ):
        """See the class."""
        dense.refuse_ineffective(precision, dot_general)
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        if isinstance(kernel, QTensor):
            weight = kernel
        else:
            param = nnx.Param(kernel, **kernel_metadata)
            weight, kernel_metadata = _quantize_param(param, scheme, group_size), param.get_metadata()
        for field, variable in _variables(weight, kernel_metadata).items():
            setattr(self, field, nnx.data(variable))
        self.scheme = weight.scheme
        self.group_size = weight.group_size
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if use_bias:
            self.bias = _variable(nnx.Param, bias_init(rngs.params(), (out_features,), param_dtype), bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.implementation = implementation

    @classmethod
    def from_linear(
        cls,
        linear: nnx.Linear,
        scheme: str = "W4A16",
        *,
        group_size: dense.GroupSize = "default",
        implementation: str | None = None,
        name: str = "kernel",
    ) -> "QuantDense":
        """Quantizes a layer; the given one stays as it is.

        Args:
          linear: its kernel is ``(in, out)``, or ``(..., in, out)`` if it was built under ``nnx.vmap``; concrete,
            traced or abstract.
          scheme: a name of ``jaxq.SCHEMES``.
          group_size: as of the constructor.
          implementation: as of the constructor.
          name: what error messages call the layer.

        Raises:
          ValueError: NaN or infinity in the kernel; the layer has a ``precision`` or ``dot_general`` of its own; the
            kernel's sharding would split a group.
        """
        return cls._in_place_of(linear, _quantize_linear(linear, scheme, group_size, name), implementation)

    @classmethod
    def from_weight(
        cls,
        weight: QTensor,
        bias: Any = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        implementation: str | None = None,
    ) -> "QuantDense":
        """A layer around a weight that is quantized already, such as one from a checkpoint.

        Args:
          weight: ``(in, out)``, or a stack of them.
          bias: None or ``(..., out)``.
          dtype: as of the constructor, and so are the others.
          param_dtype: the dtype that the kernel stands for where dtypes are promoted.
          promote_dtype: see above.
          preferred_element_type: see above.
          kernel_metadata: see above.
          bias_metadata: see above.
          implementation: see above.
        """
        in_features, out_features = weight.global_shape
        return cls(
            in_features,
            out_features,
            use_bias=bias is not None,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=lambda *_: weight,
            bias_init=lambda *_: bias,
            promote_dtype=promote_dtype,
            preferred_element_type=preferred_element_type,
            rngs=nnx.Rngs(0),  # drawn from, never used
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            implementation=implementation,
        )

    @property
    def weight(self) -> QTensor:
        """The quantized kernel, ``(in_features, out_features)``, with any leading axes of a stack."""
        variables = {field: getattr(self, field) for field in dense.FIELDS}
        arrays: dict[str, Any] = {field: None if v is None else v.get_value() for field, v in variables.items()}
        return QTensor(
            **arrays,
            scheme=self.scheme,
            global_shape=(self.in_features, self.out_features),
            group_size=self.group_size,
        )

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Multiplies the last axis of the inputs.

        Args:
          inputs: ``(..., in_features)``.
          out_sharding: of the result, on a mesh with explicit axes, as of ``nnx.Linear``.

        Returns:
          ``(..., out_features)``; dtype of the promoted inputs.

        Raises:
          TypeError: the inputs' dtype is not one that promotes to a floating one.
          ValueError: ``inputs.shape[-1]`` is not ``in_features``, or the layer is a stack and not under a scan.
        """
        bias = None if self.bias is None else self.bias[...]
        stand_in = dense.stand_in(self.param_dtype)
        promoted, _, bias = self.promote_dtype((inputs, stand_in, bias), dtype=self.dtype)
        out = dense.apply(
            inputs,
            promoted,
            self.weight,
            bias,
            preferred_element_type=self.preferred_element_type,
            implementation=self.implementation,
        )
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)

    @classmethod
    def _in_place_of(cls, linear: nnx.Linear, weight: QTensor, implementation: str | None) -> "QuantDense":
        return cls.from_weight(
            weight,
            None if linear.bias is None else linear.bias.get_value(),
            dtype=linear.dtype,
            param_dtype=linear.kernel.get_value().dtype,
            promote_dtype=linear.promote_dtype,
            preferred_element_type=linear.preferred_element_type,
            kernel_metadata=linear.kernel.get_metadata(),
            bias_metadata=_NO_METADATA if linear.bias is None else linear.bias.get_metadata(),
            implementation=implementation,
        )


def describe(model: nnx.Module) -> list[dense.LayerSummary]:
    """One row for each quantized layer of a model, concrete or abstract, in the order of its attributes."""
    rows: dict[int, dense.LayerSummary] = {}
    for path, module in _walk(model):
        if isinstance(module, QuantDense) and id(module) not in rows:
            rows[id(module)] = dense.summarize(path, module.weight)
    return list(rows.values())


def is_model(model: Any) -> bool:
    """Whether this is an NNX module; ``nnx.Dict`` is one, and a mapping as well."""
    return isinstance(model, nnx.Module)


def find_layers(model: nnx.Module) -> tuple[list[dense.Candidate], list[str]]:
    """The layers that ``quantize_layers`` can replace, and the paths of all other modules.

    A subclass of ``nnx.Linear`` counts if it keeps its ``__call__``: it then computes the same.
    """
    layers: dict[int, list[str]] = {}
    others = []
    for path, module in _walk(model):
        if _is_linear(module):
            layers.setdefault(id(module), []).append(path)
        else:
            others.append(path)
    return [dense.Candidate(tuple(paths)) for paths in layers.values()], others


def quantize_layers(
    model: nnx.Module, plan: Mapping[str, tuple[str, dense.GroupSize]], implementation: str | None = None
) -> nnx.Module:
    """A copy of the model with some layers quantized, one at a time; all other arrays are shared with the model's.

    Args:
      model: stays as it is.
      plan: scheme and group size for each layer to quantize, by each of its paths (``find_layers``). Layers that share
        a kernel, and the plan for it, share its quantized form.
      implementation: as of ``QuantDense``.
    """
    done: dict[int, tuple[nnx.Pytree, nnx.Pytree]] = {}  # by identity in the copy: the node, and what replaces it
    twins: dict[tuple[Any, ...], QuantDense] = {}  # by the identity of the kernel in the copy, and its plan

    def quantize(linear: nnx.Linear, path: str) -> QuantDense:
        scheme, group_size = plan[path]
        key = (id(linear.kernel), scheme, group_size)
        twin = twins.get(key)
        weight = twin.weight if twin else _quantize_linear(linear, scheme, group_size, path or "model")
        layer = QuantDense._in_place_of(linear, weight, implementation)
        layer.bias = linear.bias  # the copy's variable itself, which another layer may share
        if twin:
            for field in dense.FIELDS:
                setattr(layer, field, getattr(twin, field))
        twins[key] = layer
        return layer

    def rebuild(value: Any, path: str) -> Any:
        if id(value) in done:
            return done[id(value)][1]
        if path in plan:
            layer = quantize(value, path)
            done[id(value)] = value, layer
            return layer
        if isinstance(value, nnx.Pytree):
            done[id(value)] = value, value
        children = {name: rebuild(child, _join(path, name)) for name, child in _children(value)}
        changed = {name: children[name] for name, child in _children(value) if children[name] is not child}
        if not changed:
            return value
        if isinstance(value, nnx.Pytree):
            for name, child in changed.items():
                setattr(value, name, child)
            return value
        if isinstance(value, dict):
            return dict(zip(value, children.values(), strict=True))
        return tuple(children.values()) if isinstance(value, tuple) else list(children.values())

    return cast(nnx.Module, rebuild(nnx.clone(model), ""))


def _is_linear(node: Any) -> bool:
    return isinstance(node, nnx.Linear) and type(node).__call__ is nnx.Linear.__call__


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _children(value: Any) -> list[tuple[str, Any]]:
    """Attributes of a node, items of a plain container (held with ``nnx.data``), nothing of anything else."""
    if isinstance(value, nnx.Pytree):
        return [(name, child) for name, child in vars(value).items() if not name.startswith("_pytree__")]
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), child) for i, child in enumerate(value)]
    return []


def _walk(value: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every node by every path that leads to it (a cycle is followed once)."""
    if isinstance(value, nnx.Pytree):
        yield path, value
    above = (*above, value)
    for name, child in _children(value):
        if not any(child is node for node in above):
            yield from _walk(child, _join(path, name), above)


def _quantize_linear(linear: nnx.Linear, scheme: str, group_size: dense.GroupSize, name: str) -> QTensor:
    try:
        dense.refuse_ineffective(linear.precision, linear.dot_general)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return _quantize_param(linear.kernel, scheme, group_size, name)


def _quantize_param(
    kernel: nnx.Variable[Any], scheme: str, group_size: dense.GroupSize, name: str = "kernel"
) -> QTensor:
    """Quantizes a kernel; a concrete or abstract one's sharding is carried over, a traced one's is checked."""
    weight = dense.quantize_kernel(kernel.get_value(), scheme, group_size, name)
    if (sharding := dense.kernel_sharding(kernel.get_value())) is not None:
        return dense.place(weight, sharding, name)
    metadata = kernel.get_metadata()
    mesh = metadata.get("mesh") or meta.get_global_mesh()
    if metadata.get("out_sharding") and mesh:
        dense.check_split(weight, NamedSharding(mesh, nnx.get_partition_spec(kernel).get_value()), name)
    return weight


def _variables(weight: QTensor, metadata: Mapping[str, Any]) -> dict[str, QuantParam | None]:
    """The arrays of a weight as variables with the kernel's metadata, its axis names distributed over them."""
    names = metadata.get("out_sharding")
    axes = dense.field_axes(weight, names or ())
    # Hooks (on_get_value and such) were written for the kernel's values.
    kept = {key: value for key, value in metadata.items() if not key.startswith("on_")}
    variables: dict[str, QuantParam | None] = {}
    for field in dense.FIELDS:
        value = getattr(weight, field)
        own = {**kept, "out_sharding": axes[field]} if names and value is not None else kept
        variables[field] = None if value is None else _variable(QuantParam, value, own)
    return variables


def _variable(kind: type[nnx.Variable[Any]], value: Any, metadata: Mapping[str, Any]) -> Any:
    """A variable that Flax shards by ``out_sharding``, unless its value has a place already or there is no mesh."""
    rest = dict(metadata)
    names = rest.pop("out_sharding", None)
    traced_or_unplaced = isinstance(value, jax.Array) and dense.kernel_sharding(value) is None
    if names and traced_or_unplaced and (rest.get("mesh") or meta.get_global_mesh()):
        return kind(value, out_sharding=names, **rest)
    variable = kind(value, **rest)
    if names is not None:
        variable.set_metadata(out_sharding=names)
    return variable
