"""The table that a run ends with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from pagetide_runtime.completion import Completion, TextChunk
from pagetide_runtime.llm import LLM

__all__ = ["Statistics"]


class Statistics:
    """Watches one engine's pool while its answers stream by."""

    def __init__(self, llm: LLM) -> None:
        self._manager = llm.block_manager
        self._scheduler = llm.engine.scheduler
        self._started = time.perf_counter()
        self._first_text: float | None = None
        self._peak_blocks = 0
        self._peak_shared = 0

    def watch(self, chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
        """Passes the chunks on and looks at the pool between them."""
        self._started = time.perf_counter()
        for chunk in chunks:
            if self._first_text is None:
                self._first_text = time.perf_counter()
            # The steps' own records: a request that ended in this step has given its blocks back.
            available = min(r.num_available_blocks for r in self._scheduler.records)
            self._peak_blocks = max(self._peak_blocks, self._manager.total_blocks - available)
            self._peak_shared = max(self._peak_shared, self._num_shared())
            yield chunk

    def _num_shared(self) -> int:
        holders: dict[int, int] = {}
        for blocks in self._manager.sequence_blocks.values():
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        return sum(1 for count in holders.values() if count > 1)

    def rows(
        self, completions: Sequence[Completion], *, import_seconds: float, load_seconds: float
    ) -> list[tuple[str, str]]:
        """The table's rows: name and value."""
        seconds = time.perf_counter() - self._started
        first = (self._first_text or time.perf_counter()) - self._started
        generated = sum(completion.num_generated_tokens for completion in completions)
        prompt = sum(completion.num_prompt_tokens for completion in completions)
        cached = sum(completion.num_cached_tokens for completion in completions)
        return [
            ("prompts", f"{len(completions)}"),
            ("tokens", f"{prompt} in, {generated} out"),
            ("tokens/s", f"{generated / seconds:.1f}"),
            ("blocks", f"{self._peak_blocks} used, {self._peak_shared} shared"),
            ("prefix hits", f"{cached} of {prompt} prompt tokens"),
            ("seconds", f"{import_seconds:.1f} start, {load_seconds:.1f} load, "
                        f"{first:.2f} first text, {seconds:.1f} answers"),
        ]  # fmt: skip
