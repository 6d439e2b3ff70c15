"""Philox4x32-10, a counter-based random generator: the same numbers on every device, in any order.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw is a
pure function of a key (the request) and a counter (position, draw), so no state is kept, copied or
advanced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetide_kernels.validation import require_tensor

__all__ = ["philox4x32", "philox_uniform"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox over 32-bit words held in int64 tensors of one shape.

    Args:
        counter: four words, each from 0 to 2^32 - 1.
        key: two words.

    Returns:
        Four random words, each from 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product wraps into the sign; the shift spreads it, and the mask removes it.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _WORD, product0 & _WORD
        high1, low1 = (product1 >> 32) & _WORD, product1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def philox_uniform(
    keys: Tensor, positions: Tensor, draw: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A uniform number in the open interval (0, 1) for each request and position.

    The counter is (position low, position high, draw low, draw high) and the key (key low, key
    high). The number is the middle of one of 2^23 equal intervals (float32, from the top of word
    0), or of 2^52 (float64, word 0 above word 1): exact in its dtype, and never 0 or 1.

    Args:
        keys: int64 [S], the 64 bits of each request's key.
        positions: int64 [S].
        draw: which of a position's numbers, from 0.
        dtype: float32 or float64.

    Returns:
        ``dtype`` [S].

    Raises:
        ValueError: a wrong shape or dtype, or a ``draw`` outside 0 to 2^63 - 1.
    """
    require_tensor("keys", keys, (None,), torch.int64, keys.device)
    require_tensor("positions", positions, keys.shape, torch.int64, keys.device)
    if not 0 <= draw < 1 << 63:
        raise ValueError(f"draw={draw} must lie between 0 and 2^63 - 1")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype} must be torch.float32 or torch.float64")
    zero = torch.zeros_like(keys)
    counter = (
        positions & _WORD,
        (positions >> 32) & _WORD,
        zero + (draw & _WORD),
        zero + (draw >> 32),
    )
    high, low, _, _ = philox4x32(counter, (keys & _WORD, (keys >> 32) & _WORD))
    if dtype == torch.float32:
        return ((high >> 9).float() + 0.5) * 2.0**-23
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52
