"""Reads what others publish: GGUF files and Hugging Face directories."""

from jaxq.checkpoints.gguf import GGUFFile as GGUFFile
from jaxq.checkpoints.huggingface import HuggingFaceDirectory as HuggingFaceDirectory
