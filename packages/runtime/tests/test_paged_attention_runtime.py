"""The engine equals the raw kernel: a layer's keys and values, attended to by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness, demo_causal_lm

from pagetide_kernels import AttentionMetadata, paged_attention
from pagetide_runtime import SamplingParams

pytestmark = pytest.mark.model


def test_what_the_engine_attended_to_is_what_the_kernel_makes_of_its_pool(
    demo_model: Path, answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = demo_causal_lm(demo_model, 4)
    harness = Harness(model, num_blocks=120)
    runner = harness.engine.runner
    seen: list[tuple[torch.Tensor, AttentionMetadata, torch.Tensor]] = []
    backend_class = type(model.backend)
    attend = backend_class.paged_attention

    def spy(self: Any, q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> None:
        attend(self, q, k, *rest, **options)
        if k.data_ptr() == runner.kv_cache.layer(17).k.data_ptr():
            seen.append((q.clone(), rest[1], options["out"].clone()))

    monkeypatch.setattr(backend_class, "paged_attention", spy)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for index, answer in enumerate(answers[:4]):
        harness.engine.add_request(str(index), answer["prompt"], params)
    checked = 0
    while harness.engine.has_unfinished:
        tables = dict(harness.manager.sequence_blocks)
        harness.engine.step()
        q, metadata, attended = seen.pop()
        tables |= dict(harness.manager.sequence_blocks)
        layer = runner.kv_cache.layer(17)
        # The same step described by hand, from the block manager's own tables.
        lengths = metadata.seq_lens.tolist()
        starts = metadata.query_start_loc.tolist()
        by_hand = AttentionMetadata.from_host(
            [end - start for start, end in itertools.pairwise(starts)],
            lengths,
            [list(tables[str(i)])[: -(-length // 4)] for i, length in enumerate(lengths)],
            block_size=4,
            num_blocks=120,
        ) if len(lengths) == 4 else None  # fmt: skip
        if by_hand is not None:
            raw = paged_attention(q, layer.k, layer.v, by_hand, scale=64**-0.5, backend="reference")
            assert (raw - attended).abs().max() < 1e-5
            checked += 1
    assert checked == 6
    harness.check_idle()
