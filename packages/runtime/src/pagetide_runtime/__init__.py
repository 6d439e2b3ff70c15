"""The Pagetide inference engine: LLM, Engine and the pagetide command."""

from pagetide_runtime.__about__ import __version__

__all__ = ["__version__"]
