"""`Engine` over a toy runner: interrupts, and an engine that died, leave nobody waiting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagetide_kvcache import BlockManager
from pagetide_runtime import Engine, EngineDeadError, FinishReason, SamplingParams
from pagetide_scheduler import Scheduler, SchedulerConfig, StepPlan, StepResult

PARAMS = SamplingParams(temperature=0, max_tokens=6)


class CountingHandle:
    """Every sample's token is its own position."""

    def __init__(self, plan: StepPlan, interrupt: Callable[[], None]) -> None:
        self._plan, self._interrupt = plan, interrupt

    def result(self) -> StepResult:
        self._interrupt()
        return StepResult.of(self._plan.sample_positions.astype(np.int64))


class CountingRunner:
    """Computes nothing; `interrupts` names (step, where) at which Ctrl-C comes, once each."""

    def __init__(self, *interrupts: tuple[int, str]) -> None:
        self._interrupts = set(interrupts)
        self.is_broken = False

    def _come(self, step: int, where: str) -> None:
        if (step, where) in self._interrupts:
            self._interrupts.remove((step, where))
            raise KeyboardInterrupt

    def submit(self, plan: StepPlan) -> CountingHandle:
        if self.is_broken:
            raise RuntimeError("a sticky error")
        self._come(plan.step_id, "submit")
        return CountingHandle(plan, lambda: self._come(plan.step_id, "result"))

    def is_usable(self) -> bool:
        return not self.is_broken


def make_engine(runner: CountingRunner, overlap: int = 0) -> Engine:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_overlap=overlap
    )
    return Engine(Scheduler(config, BlockManager(16, 4)), runner, max_plans_in_flight=overlap)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("where", ["submit", "result"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_ctrl_c_in_a_step_costs_that_step_alone(overlap: int, where: str, step: int) -> None:
    engine = make_engine(CountingRunner((step, where)), overlap)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], PARAMS)
    ended, num_interrupts = {}, 0
    for _ in range(100):
        if not engine.has_unfinished:
            break
        try:
            ended.update({output.request_id: output for output in engine.step().finished})
        except KeyboardInterrupt:
            num_interrupts += 1
        engine.scheduler.verify()
    assert num_interrupts == 1
    assert [ended[name].token_ids for name in "ab"] == [(3, 4, 5, 6, 7, 8)] * 2
    assert not engine.has_unfinished and engine.scheduler.num_plans_in_flight == 0


def test_ctrl_c_while_the_scheduler_writes_ends_the_engine_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(CountingRunner())
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.step()

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for use in (engine.step, lambda: engine.add_request("b", [1], PARAMS)):
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            use()
    assert engine.finish("a", FinishReason.ABORT) is None
    assert not engine.has_unfinished


def test_an_engine_that_died_says_so_at_every_step() -> None:
    runner = CountingRunner()
    engine = make_engine(runner)
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.step()
    runner.is_broken = True
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="sticky"):
            engine.step()
    assert not engine.has_unfinished
