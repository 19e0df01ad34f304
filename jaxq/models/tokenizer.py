"""Text to tokens and back, and a chat's messages to the prompt that its model was trained on."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxq.checkpoints.gguf import GGUFFile

# The text of each kind is split by this pattern before byte-level BPE (`tokenizer.ggml.pre` in a GGUF file).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[Any]] = {
    "default": [],
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated")],
    "qwen2": [pre_tokenizers.Split(tokenizers.Regex(_LLAMA3.replace("{1,3}", "")), "isolated")],
}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched in text before BPE


class Tokenizer:
    """A byte-level BPE tokenizer and its chat template.

    Attributes:
      stop_tokens: tokens that end an answer.
    """

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        bos: str | None = None,
        eos: str | None = None,
        add_bos: bool = False,
    ):
        """Wraps ``bpe``; ``bos`` and ``eos`` are the special tokens' texts."""
        self._bpe = bpe
        self._template = chat_template
        self._special = {"bos_token": bos or "", "eos_token": eos or ""}
        first = bpe.token_to_id(bos) if add_bos and bos else None
        self._bos = [] if first is None else [first]
        ends = (eos, "<|im_end|>", "<|eot_id|>", "<|endoftext|>")
        self.stop_tokens = frozenset(i for i in (bpe.token_to_id(e) for e in ends if e) if i is not None)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata; ValueError if it is not byte-level BPE of a known kind."""
        kind = file["tokenizer.ggml.model"]
        if kind != "gpt2":
            raise ValueError(f"{file.path}: tokenizer.ggml.model={kind!r} must be 'gpt2' (byte-level BPE)")
        pre = file.metadata.get("tokenizer.ggml.pre", "default")
        if pre not in _SPLITS:
            raise ValueError(f"{file.path}: tokenizer.ggml.pre={pre!r} must be one of {', '.join(_SPLITS)}")
        tokens: list[str] = file["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in file["tokenizer.ggml.merges"]]
        bpe = tokenizers.Tokenizer(
            models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=False)
        )
        use_regex = pre in ("default", "gpt-2", "smollm")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([*_SPLITS[pre], byte_level])
        bpe.decoder = decoders.ByteLevel()
        types = file["tokenizer.ggml.token_type"]
        bpe.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL])
        bpe.add_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])

        def special(name: str) -> str | None:
            index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            return None if index is None else tokens[index]

        return cls(
            bpe,
            chat_template=file.metadata.get("tokenizer.chat_template"),
            bos=special("bos"),
            eos=special("eos"),
            add_bos=file.metadata.get("tokenizer.ggml.add_bos_token", False),
        )

    @classmethod
    def from_huggingface(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The ``tokenizer.json`` of a directory, with the chat template and special tokens stored beside it."""
        path = pathlib.Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file; the model's tokenizer is needed in this form")
        config: dict[str, Any] = {}
        if (path / "tokenizer_config.json").is_file():
            config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = config.get("chat_template")
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text(encoding="utf-8")
        elif isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")

        def special(name: str) -> str | None:  # a text, or an object that holds one
            token = config.get(name)
            return token["content"] if isinstance(token, dict) else token

        try:
            bpe = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # what `tokenizers` raises is a bare Exception
            raise ValueError(f"{file}: cannot be read ({error}); fetch it again") from error
        bos = special("bos_token")
        # `tokenizer.json` adds the first token itself where the model wants one; see whether it does.
        adds_bos = bos is not None and bpe.encode("").ids == [bpe.token_to_id(bos)]
        return cls(bpe, chat_template=template, bos=bos, eos=special("eos_token"), add_bos=adds_bos)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, after the model's first token if it wants one; special tokens in it count as such."""
        return self._bos + list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without special ones."""
        return self._bpe.decode(list(tokens), skip_special_tokens=True)

    def encode_chat(self, prompt: str) -> list[int]:
        """Tokens of a user's message, up to where the answer begins; of the bare text for models that do not chat."""
        if self._template is None:
            return self.encode(prompt)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = environment.from_string(self._template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, **self._special
        )
        return self._bpe.encode(text, add_special_tokens=False).ids
