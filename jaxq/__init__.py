"""Quantized matrix multiplication for JAX: int4 and int8 weights with 16-bit or int8 activations, on CUDA kernels.

``QTensor`` says what a quantized weight is, ``quantize_tensor`` makes one, ``matmul`` multiplies by one and
``quantize`` does it for the layers of a whole Flax model. Where no kernel runs, the same operations run as plain JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxq._ffi import has_cuda as has_cuda
from jaxq.ops import dequantize as dequantize
from jaxq.ops import matmul as matmul
from jaxq.ops import quantize_per_token as quantize_per_token
from jaxq.ops import w4a8_matmul as w4a8_matmul
from jaxq.ops import w4a16_matmul as w4a16_matmul
from jaxq.ops import w8a8_matmul as w8a8_matmul
from jaxq.ops import w8a16_matmul as w8a16_matmul
from jaxq.primitive import EXPORT_CHECKS as EXPORT_CHECKS
from jaxq.qtensor import SCHEMES as SCHEMES
from jaxq.qtensor import QTensor as QTensor
from jaxq.quantizers import quantize_tensor as quantize_tensor

if TYPE_CHECKING:
    from jaxq import checkpoints as checkpoints
    from jaxq import linen as linen
    from jaxq import models as models
    from jaxq import nnx as nnx
    from jaxq.rules import Rule as Rule
    from jaxq.rules import quantize as quantize

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports what needs Flax when first asked for: about a second, which a program of bare matmuls need not wait."""
    if name in {"checkpoints", "linen", "models", "nnx"}:
        return importlib.import_module(f"jaxq.{name}")
    if name in {"Rule", "quantize"}:
        return getattr(importlib.import_module("jaxq.rules"), name)
    raise AttributeError(f"module 'jaxq' has no attribute {name!r}")
