"""Engines over one loaded SmolLM2, and what must hold whenever one is idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pagetide_kvcache import BlockManager
from pagetide_models import CausalLM, load_model
from pagetide_runtime import Engine, EngineConfig, RequestOutput, SamplingParams
from pagetide_runtime.build import build_engine, make_block_manager
from pagetide_scheduler import StepPlan, StepResult


@cache
def demo_causal_lm(path: Path, block_size: int, kv_dtype: str = "auto") -> CausalLM:
    """SmolLM2 in fp32, loaded once a block size."""
    return load_model(path, device="cpu", block_size=block_size, kv_dtype=kv_dtype)


class Harness:
    """An engine with its pool, and `run`, which drives requests to their end."""

    def __init__(self, model: CausalLM, **options: Any) -> None:
        config = EngineConfig(device="cpu", **options)
        self.manager: BlockManager = make_block_manager(model, config)
        self.engine: Engine = build_engine(model, config, self.manager)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        each_step: Callable[[int], None] = lambda step: None,
    ) -> list[RequestOutput]:
        """Outputs in the prompts' order; `each_step` is called before every step."""
        ended: dict[str, RequestOutput] = {}
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), prompt, params)
        step = 0
        while self.engine.has_unfinished:
            each_step(step)
            for output in self.engine.step().finished:
                ended[output.request_id] = output
            step += 1
            assert step < 20_000, "the engine makes no progress"
        self.check_idle()
        return [ended[str(i)] for i in range(len(prompts)) if str(i) in ended]

    def check_idle(self) -> None:
        """Every block is back and every book agrees."""
        assert not self.engine.has_unfinished
        assert self.manager.num_available_blocks == self.manager.total_blocks
        assert len(self.manager.sequence_blocks) == 0
        self.manager.verify()
        self.engine.scheduler.verify()


class FailingRunner:
    """Passes plans on to a real runner, and raises when a plan meets a condition."""

    def __init__(self, inner: Any, fails: Callable[[StepPlan], bool]) -> None:
        self._inner = inner
        self._fails = fails
        self.num_failures = 0

    def submit(self, plan: StepPlan) -> Any:
        if self._fails(plan):
            self.num_failures += 1
            # The damage that a real failure may do: the step's work is half done.
            self._inner.kv_cache.data[:, :, plan.table_blocks.astype("int64")] = float("nan")
            raise RuntimeError("injected")
        return self._inner.submit(plan)

    def is_usable(self) -> bool:
        return True


class LateFailure:
    """A handle whose step turns out to have failed only when its result is read."""

    def result(self) -> StepResult:
        raise RuntimeError("injected late")
