"""Reads Hugging Face model directories: ``config.json`` and safetensors, in one file or in shards with an index.

Tensors are memory mapped and read one by one. Pickles are refused: loading one runs whatever code it contains.
"""

import json
import os
import pathlib
from typing import Any

import numpy as np
import safetensors

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class HuggingFaceDirectory:
    """A model directory.

    Attributes:
      path: where it is.
      config: ``config.json``.
      names: of all tensors.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the config and the headers of all shards.

        Raises:
          FileNotFoundError: the config, the weights or a shard is not there.
          ValueError: the weights are pickles only, a file is damaged, or the index names a tensor that no shard has.
        """
        self.path = pathlib.Path(path)
        self.config: dict[str, Any] = _read_json(self.path / "config.json")
        self._files: dict[str, Any] = {}
        for file in self._shards():
            try:
                opened: Any = safetensors.safe_open(file, framework="numpy")
            except safetensors.SafetensorError as error:
                raise ValueError(f"{file}: cannot be read as safetensors ({error}); fetch it again") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.names = tuple(self._files)
        index = self.path / "model.safetensors.index.json"
        if index.is_file() and (missing := set(_read_json(index)["weight_map"]) - set(self.names)):
            raise ValueError(f"{index}: names {len(missing)} tensors that no shard has, such as {min(missing)!r}")

    def read(self, name: str) -> np.ndarray:
        """Tensor ``name`` as it is stored (float32, float16, bfloat16, ...); ValueError if there is none."""
        if name not in self._files:
            raise ValueError(f"{self.path}: has no tensor {name!r}, which the model needs")
        tensor: np.ndarray = self._files[name].get_tensor(name)
        return tensor

    def _shards(self) -> list[pathlib.Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            shards = [self.path / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
        else:
            shards = sorted(self.path.glob("*.safetensors"))
        for shard in shards:
            if not shard.is_file():
                raise FileNotFoundError(f"{shard}: is named in {index.name} but not there; fetch it")
        if not shards:
            pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in _PICKLES)
            if pickles:
                raise ValueError(
                    f"{self.path}: weights are pickles ({', '.join(pickles[:3])}), which can run code when loaded and "
                    "are not read; use the model's safetensors, or convert it with safetensors.torch.save_file"
                )
            raise FileNotFoundError(f"{self.path}: has no *.safetensors; the model's weights are needed")
        return shards


def _read_json(file: pathlib.Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a Hugging Face model directory has one")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: is not JSON ({error}); fetch it again") from error
