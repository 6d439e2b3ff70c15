"""The axes along which the attention contract is tested, and cases that cover every pair of values.

Faults hide in combinations, and nearly always in combinations of two: the pairwise set is about
1/1000 of the product. ``PAGETIDE_CONTRACT_CASES=5000`` adds random combinations up to that number.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass

import torch

from pagetide_kernels.metadata import SUPPORTED_PAIRS

# Triton's interpreter takes milliseconds where a card takes nanoseconds: the same axes, with few
# heads of each ratio and short sequences.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = tuple((query, kv) for query, kvs in SUPPORTED_PAIRS.items() for kv in kvs)

AXES: dict[str, tuple] = {
    "dtypes": DTYPES,
    "heads": ((14, 2), (9, 3), (12, 12), (32, 8), (28, 4), (7, 1), (48, 2), (8, 1)),
    "head_dim": (64, 32, 40, 72, 80, 96, 112, 128, 160, 192, 256),
    "block_size": (16, 8, 32, 64, 128),
    "lengths": (
        "decode", "prefill", "chunked", "mixed", "ragged", "empty", "drafts", "padded", "alone",
        "long",
    ),
    "window": (None, 1, 4, 50),
    "soft_cap": (None, 3.0, 30.0),
    "layout": ("kvcache", "slots_first", "heads_first"),
    "poison": ("nan", "inf", "-inf", "7f"),
}  # fmt: skip
if IS_INTERPRETED:
    AXES["heads"] = ((14, 2), (6, 2), (3, 3), (7, 1), (24, 1), (8, 1))
    AXES["block_size"] = (16, 8, 32, 64)


@dataclass(frozen=True)
class Case:
    """One combination; the seed follows from it, so a case is the same wherever it runs."""

    dtypes: tuple[torch.dtype, str]
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    lengths: str
    window: int | None
    soft_cap: float | None
    layout: str
    poison: str

    def __str__(self) -> str:
        query, kv = self.dtypes
        return (
            f"{str(query)[6:]}x{kv}-{self.heads[0]}/{self.heads[1]}x{self.head_dim}"
            f"-b{self.block_size}-{self.lengths}-w{self.window}-c{self.soft_cap}"
            f"-{self.layout}-{self.poison}"
        )

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(query_len, seq_len) of each sequence."""
        b = self.block_size
        if IS_INTERPRETED:
            return {
                "decode": [(1, n) for n in (1, b, b + 1, 2 * b - 1)],
                "prefill": [(1, 1), (17, 17), (20, 20)],
                "chunked": [(18, b + 18), (2, 2 * b + 1)],
                "mixed": [(1, 2 * b), (19, 19), (1, 1), (5, 40)],
                "ragged": [(1, 300), (1, 3), (1, 17)],
                "empty": [(0, b + 3), (1, 5), (0, 0), (3, 9), (0, 1)],
                "drafts": [(4, 4), (4, 2 * b), (2, 3), (4, b + 2)],
                "padded": [(1, b + 1), (9, 20)],
                "alone": [(1, 4 * b + 1)],
                "long": [(33, 70)],
            }[self.lengths]
        return {
            "decode": [(1, n) for n in (1, b - 1, b, b + 1, 3 * b + 1)],
            "prefill": [(1, 1), (b, b), (b + 3, b + 3), (40, 40)],
            "chunked": [(5, 5 + b), (20, b + 30), (2, 2 * b + 1)],
            "mixed": [(1, 2 * b), (33, 33), (1, 1), (7, 40), (1, b + 5), (18, 19)],
            "ragged": [(1, 300), (1, 3), (1, 17), (1, 90)],
            "empty": [(0, b + 3), (1, 5), (0, 0), (3, 9), (0, 1)],
            "drafts": [(4, 4), (4, 2 * b), (4, 50), (2, 3), (4, b + 2)],
            "padded": [(1, b + 1), (9, 20), (1, 2 * b)],
            "alone": [(1, 4 * b + 1)],
            "long": [(260, 290)],
        }[self.lengths]


def pairwise_cases() -> list[Case]:
    """Few cases in which every value of every axis meets every value of every other."""
    names = list(AXES)
    uncovered = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in AXES[a]
        for y in AXES[b]
    }
    rng = random.Random(0)
    order = sorted(uncovered, key=repr)
    rng.shuffle(order)
    cases = []
    for seed_pair in order:
        if seed_pair not in uncovered:
            continue
        values = dict(seed_pair)
        for name in rng.sample(names, len(names)):
            if name not in values:
                scores = {
                    value: sum(
                        _pair(name, value, other, values[other]) in uncovered for other in values
                    )
                    for value in AXES[name]
                }
                best = max(scores.values())
                values[name] = rng.choice([value for value in AXES[name] if scores[value] == best])
        uncovered -= {
            _pair(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)
        }
        cases.append(Case(**values))
    return cases


def contract_cases(count: int | None = None) -> list[Case]:
    """The pairwise cases, and random ones up to ``count``; a smaller ``count`` cuts the list."""
    cases = pairwise_cases()
    if count is None:
        return cases
    rng = random.Random(1)
    while len(cases) < count:
        cases.append(Case(**{name: rng.choice(values) for name, values in AXES.items()}))
    return cases[:count]


def _pair(a: str, x: object, b: str, y: object) -> tuple:
    names = list(AXES)
    return ((a, x), (b, y)) if names.index(a) < names.index(b) else ((b, y), (a, x))
