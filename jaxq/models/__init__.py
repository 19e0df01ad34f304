"""Quantized language models that run: load one, quantize it with ``jaxq.quantize``, generate."""

from jaxq.models.generate import Decoder as Decoder
from jaxq.models.generate import Sampling as Sampling
from jaxq.models.llama import Llama as Llama
from jaxq.models.llama import LlamaConfig as LlamaConfig
from jaxq.models.load import load as load
from jaxq.models.perplexity import perplexity as perplexity
from jaxq.models.tokenizer import Tokenizer as Tokenizer
