"""GPT-2, Llama and Qwen2 language models over a paged KV cache."""

from pagetide_models.__about__ import __version__

__all__ = ["__version__"]
