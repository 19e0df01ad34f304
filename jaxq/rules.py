"""Quantization of a whole model: which layer gets which scheme. `nnx.py` and `linen.py` then do it."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxq import linen, nnx
from jaxq.dense import Candidate, GroupSize
from jaxq.qtensor import find_scheme

_NAME = re.compile(r"\w+(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the layers that match a pattern become.

    Attributes:
      pattern: a plain name (letters, digits, underscores, dots), such as "lm_head" or "layers.0", matches wherever it
        stands as whole components of a layer's path "a.b.c"; anything else is a regular expression that must match
        the whole path.
      scheme: a name of ``jaxq.SCHEMES``, or None to leave the layers as they are.
      group_size: rows that share a scale, None for one scale per channel, "default" for the scheme's own.

    Raises:
      ValueError: the pattern is no regular expression, or the scheme is unknown.
    """

    pattern: str
    scheme: str | None
    group_size: GroupSize = "default"

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.scheme is not None:
            find_scheme(self.scheme)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}") from None

    def matches(self, path: str) -> bool:
        """Whether a layer with that path is meant."""
        if _NAME.fullmatch(self.pattern):
            return f".{self.pattern}." in f".{path}."
        return re.fullmatch(self.pattern, path) is not None


def quantize(
    model: Any,
    scheme: str | None = None,
    *,
    group_size: GroupSize = "default",
    ignore: str | Iterable[str] = (),
    rules: Sequence[Rule] | None = None,
    implementation: str | None = None,
) -> Any:
    """Quantizes the dense layers of a whole model, one at a time: model in, new model out.

    The first match wins: ``ignore``, then ``rules`` in their order, then ``scheme`` for all that is left. The input
    stays as it is; arrays that are not quantized are shared with it. Beyond the input it takes the memory of the
    quantized model and of the temporaries of one layer.

    * An NNX model: each ``nnx.Linear`` (and each subclass that keeps its ``__call__``) becomes a
      ``jaxq.nnx.QuantDense``; ``nnx.LinearGeneral``, ``nnx.Einsum``, ``nnx.Embed`` and all else stay. A layer that is
      used twice is quantized once and stays one object; layers that share a kernel share its quantized form. A
      stacked kernel ``(layers, in, out)`` is quantized layer by layer. Concrete, traced and abstract models will do.
    * Linen variables: each ``kernel`` of ``params`` (alone or with a ``bias``) moves to the collection "quant", for the
      model whose ``nn.Dense`` are ``jaxq.linen.QuantDense`` of the same names. Kernels of convolutions and of
      ``nn.DenseGeneral`` stay. Variables do not tell a stack of dense kernels without bias from another layer's 3-D
      kernel: say which by a rule or ``ignore``.

    Args:
      model: an ``nnx.Module``, or Linen variables ``{"params": ..., ...}``.
      scheme: a name of ``jaxq.SCHEMES`` for all layers that no rule matches; None leaves those as they are.
      group_size: goes with ``scheme``: rows that share a scale, None for one scale per channel, "default" for the
        scheme's own (or the layer's in_features where those are fewer).
      ignore: patterns, as of ``Rule``, of layers to leave as they are.
      rules: see ``Rule``.
      implementation: of the new layers, as of ``jaxq.matmul``; NNX only.

    Raises:
      TypeError: the model is neither; a kernel's dtype is not float32, bfloat16 or float16.
      ValueError: nothing to quantize; a pattern matches nothing; NaN or infinity in a kernel; a layer that cannot be
        quantized faithfully. The layer is named.
    """
    if scheme is None and not rules:
        raise ValueError("quantize: give a scheme for all layers, such as scheme='W4A16', or rules")
    if scheme is None and group_size != "default":
        raise ValueError(f"quantize: group_size={group_size!r} goes with scheme=; give each Rule its own")
    named = [Rule(pattern, None) for pattern in ([ignore] if isinstance(ignore, str) else ignore)] + list(rules or ())
    rest = None if scheme is None else Rule(".*", scheme, group_size)

    if nnx.is_model(model):
        layers, others = nnx.find_layers(model)
    elif isinstance(model, Mapping):
        if implementation is not None:
            raise ValueError(
                f"quantize: implementation={implementation!r} belongs to the layers of a Linen model, not to its "
                "variables; set QuantDense.implementation"
            )
        layers, others = linen.find_layers(model)
    else:
        raise TypeError(
            f"model: {type(model).__name__} must be an nnx.Module, or the variables of a Linen model "
            "(a mapping with a 'params' collection)"
        )
    if not layers:
        raise ValueError("quantize: the model has no dense layer (nnx.Linear, or a Linen 'kernel') left to quantize")
    for rule in named:
        _check_matches(rule, layers, others)

    plan: dict[str, tuple[str, GroupSize]] = {}
    for layer in layers:
        first = next((rule for rule in named if any(map(rule.matches, layer.paths))), rest)
        if first is None or first.scheme is None:
            continue
        if layer.doubt and first is rest:
            raise ValueError(f"{layer.paths[0]}: {layer.doubt}; quantize it by a Rule that names it, or ignore it")
        plan |= dict.fromkeys(layer.paths, (first.scheme, first.group_size))
    if nnx.is_model(model):
        return nnx.quantize_layers(model, plan, implementation)
    return linen.quantize_layers(model, plan)


def _check_matches(rule: Rule, layers: Sequence[Candidate], others: Sequence[str]) -> None:
    """ValueError if a pattern names nothing that it could be meant for; leaving a norm as it is needs no layer."""
    paths = [path for layer in layers for path in layer.paths]
    wrong = [path for path in others if rule.matches(path)]
    if any(map(rule.matches, paths)) or (wrong and rule.scheme is None):
        return
    if wrong:
        raise ValueError(
            f"pattern={rule.pattern!r} matches no dense layer, only what cannot be quantized: {_some(wrong)}; "
            f"dense layers: {_some(paths)}"
        )
    components = {component: path for path in reversed(paths) for component in (path, *path.split("."))}
    near = dict.fromkeys(components[name] for name in difflib.get_close_matches(rule.pattern, components))
    hint = f"near it: {_some(list(near))}" if near else f"the layers are: {_some(paths)}"
    raise ValueError(
        f"pattern={rule.pattern!r} matches no layer (a regular expression must match the whole path); {hint}"
    )


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return ", ".join(map(repr, paths[:8])) + more
