"""Token ids as the bytes that a prefix key is made of."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["TOKEN_BYTES", "token_bytes"]

TOKEN_BYTES = 4  # an int32 a token, in native order: keys never leave the process


def token_bytes(tokens: Sequence[int], start: int, stop: int) -> bytes:
    """The tokens `start .. stop - 1` as int32 bytes, the same whatever container they come in.

    Raises:
        ValueError: a token id does not fit in int32.
        TypeError: a token is not an integer.
    """
    part = tokens[start:stop]
    if isinstance(part, array) and part.typecode == "i":
        return part.tobytes()
    try:
        # iter(), because array() would take a bytes object for ready-made items.
        return array("i", iter(part)).tobytes()
    except OverflowError:
        raise ValueError(
            f"tokens[{start}:{stop}] holds an id outside int32; ids must be in -2**31..2**31-1"
        ) from None
