"""Reads GGUF files: metadata, and tensors one by one as floats. What they mean is `models/load.py`'s business."""

import os
import pathlib
from typing import Any

import gguf
import numpy as np


class GGUFFile:
    """A memory-mapped GGUF file.

    Attributes:
      path: where it is.
      metadata: the file's keys (``llama.block_count``, ``tokenizer.ggml.tokens``, ...) as Python values.
      names: of all tensors.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Opens the file and reads its header.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not a GGUF file, is of a version that cannot be read, or is cut short.
        """
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; a GGUF model is needed")
        with self.path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{self.path}: starts with {magic!r}, not b'GGUF'; a GGUF model is needed")
        try:
            reader = gguf.GGUFReader(self.path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise ValueError(
                f"{self.path}: cannot be read as GGUF ({error}); it has {self.path.stat().st_size} bytes and is "
                "damaged, cut short or of a newer version: fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = tuple(self._tensors)

    def __getitem__(self, key: str) -> Any:
        """The metadata under ``key``; ValueError names the file and the key if there is none."""
        if key not in self.metadata:
            raise ValueError(f"{self.path}: has no metadata {key!r}, which a language model needs")
        return self.metadata[key]

    def read(self, name: str) -> np.ndarray:
        """Tensor ``name``, dequantized to float32, in the order of its shape: ``(n, k)`` for a matrix.

        Raises:
          ValueError: the file has no such tensor, or the ``gguf`` package cannot dequantize its type.
        """
        if name not in self._tensors:
            raise ValueError(f"{self.path}: has no tensor {name!r}, which the model needs")
        tensor = self._tensors[name]
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {tensor.tensor_type.name}, which cannot be dequantized; "
                "use a file of F32, F16, BF16, Q8_0, Q4_0 or Q4_1 tensors"
            ) from error
