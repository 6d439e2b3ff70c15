"""Paged KV-cache bookkeeping: reference-counted blocks, prefix sharing, copy-on-write.

`BlockManager` decides which block holds which tokens, `KVCacheSpec` says what a block looks like.
Neither needs anything but Python. `KVCache` and `LayerKVCache` hold the blocks' content in torch
tensors and import torch when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagetide_kvcache.__about__ import __version__
from pagetide_kvcache.block_manager import BlockManager
from pagetide_kvcache.copies import BlockCopy, CopyDirection
from pagetide_kvcache.errors import (
    BlockRangeError,
    InvariantError,
    KVCacheError,
    OutOfBlocksError,
    SequenceExistsError,
    UnknownSequenceError,
)
from pagetide_kvcache.prefix_index import PrefixPath
from pagetide_kvcache.sequence import Admission
from pagetide_kvcache.spec import KVCacheSpec, KVDType

if TYPE_CHECKING:
    from pagetide_kvcache.storage import KVCache as KVCache
    from pagetide_kvcache.storage import LayerKVCache as LayerKVCache

# KVCache and LayerKVCache are left out: `import *` must work without torch.
__all__ = [
    "Admission",
    "BlockCopy",
    "BlockManager",
    "BlockRangeError",
    "CopyDirection",
    "InvariantError",
    "KVCacheError",
    "KVCacheSpec",
    "KVDType",
    "OutOfBlocksError",
    "PrefixPath",
    "SequenceExistsError",
    "UnknownSequenceError",
    "__version__",
]

_NEEDS_TORCH = {"KVCache": "storage", "LayerKVCache": "storage"}


def __getattr__(name: str) -> object:
    module = _NEEDS_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NEEDS_TORCH])
