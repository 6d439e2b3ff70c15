"""Rows whose logits cannot be sampled from are told apart, greedy and random alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagetide_runtime.sampler import Sampler
from pagetide_scheduler import SamplingParams

NAN, INF = float("nan"), float("inf")
ROWS = [
    ([0.0, 3.0, 1.0], True),
    ([-INF, 3.0, -INF], True),
    ([0.0, NAN, 9.0], False),
    ([NAN, NAN, NAN], False),
    ([-INF, NAN, -INF], False),
    ([0.0, INF, 1.0], False),
    ([NAN, INF, 1.0], False),
    ([-INF, -INF, -INF], False),
    ([5.0, 5.0, 4.0], True),
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_finite_maximum_is_unsound(temperature: float) -> None:
    count = len(ROWS)
    rows = np.arange(count, dtype=np.int32)
    plan: Any = SimpleNamespace(
        new_rows=rows,
        new_params=(SamplingParams(temperature=temperature, top_k=1),) * count,
        new_keys=np.zeros(count, np.uint64),
        new_min_positions=np.zeros(count, np.int32),
        sample_rows=rows,
        sample_positions=np.full(count, 9, np.int32),
    )
    inputs: Any = SimpleNamespace(
        sample_rows=torch.from_numpy(rows), sample_positions=torch.full((count,), 9)
    )
    sampler = Sampler(count, (), torch.device("cpu"))
    sampler.initialise_rows(plan)
    tokens, is_sound = sampler.sample(torch.tensor([row for row, _ in ROWS]), plan, inputs)
    assert is_sound.tolist() == [sound for _, sound in ROWS]
    assert tokens[is_sound].tolist() == [1, 1, 0]
