"""Records, replay and the answer to "why is my request waiting?"."""

from __future__ import annotations

import io
import json

import pytest
from fuzzing import run_once
from harness import Engine

from pagetide_scheduler import SamplingParams
from pagetide_scheduler.journal import ReplayMismatchError, replay


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)


def test_every_step_leaves_a_record() -> None:
    engine = Engine(num_blocks=8, block_size=4, admission="lookahead", num_records=50)
    engine.add("holder", [1] * 20, params(5))
    engine.step()
    engine.add("big", [2] * 20, params(2))
    engine.add("small", [3] * 3, params(4))
    engine.step()
    engine.scheduler.preempt("small")
    engine.run()
    records = list(engine.scheduler.records)
    assert [record.step_id for record in records] == list(range(1, engine.num_steps + 1))
    first, second, third = records[:3]
    assert (first.admitted, first.num_tokens, first.num_samples) == (("holder",), 20, 1)
    assert (second.admitted, second.passed) == (("small",), ("big",))
    assert (second.num_waiting, second.num_available_blocks) == (1, 1)
    assert (third.preempted, third.admitted) == (("small",), ("small",))


def test_only_the_last_records_are_kept() -> None:
    engine = Engine(num_blocks=8, block_size=4, num_records=3)
    engine.add("r", [1], params(10))
    engine.run()
    assert [record.step_id for record in engine.scheduler.records] == [8, 9, 10]


def test_why() -> None:
    engine = Engine(num_blocks=10, block_size=4, admission="reserve", max_overlap=0)
    why = engine.scheduler.why
    assert why("nobody") == "unknown, or it has ended"
    engine.add("holder", [1] * 16, params(4))
    engine.step()
    engine.add("giant", [2] * 26, params(2))
    engine.add("other", [3] * 26, params(2))
    engine.schedule()
    assert why("giant") == (
        "waiting: needs 7 blocks, 5 free, 7 reserved for it until step 4; 0 wait before it; "
        "passed over 0 of 8 times"
    )
    assert why("other") == (
        "waiting: needs 7 blocks, 5 free, 7 reserved for giant until step 4; 1 wait before it; "
        "passed over 0 of 8 times"
    )
    assert why("holder") == (
        "running: decoding; 17 of at most 20 tokens known, 1 in flight; 5 blocks"
    )
    engine.run()
    assert why("giant") == "unknown, or it has ended"


def test_why_in_other_states() -> None:
    engine = Engine(
        num_blocks=30, block_size=4, max_num_batched_tokens=4, max_num_seqs=3, num_host_blocks=9
    )
    why = engine.scheduler.why
    engine.add("older", [9], params(30))
    engine.add_samples(("a", "b"), [1] * 7, [params(5), params(5)])
    engine.add("late", [2], params(2))
    engine.schedule()
    assert "4 tokens left to compute" in why("a")
    assert why("b") == "waiting: a computes the prompt for it too (3 of 7 tokens so far)"
    assert "needs 1 rows, 0 free" in why("late")
    engine.scheduler.preempt("a")
    assert "step 1, which names it, is not read yet" in why("a") or "swapped out" in why("a")
    assert "gave up its blocks 1 times" in why("a")
    assert "1 wait before it" in why("late")
    engine.run()
    failing = Engine(num_blocks=30, block_size=4, fails=lambda plan: plan.step_id == 2)
    failing.add("x", [1], params(5))
    failing.step()
    failing.step()
    assert "its step failed" in failing.scheduler.why("x")
    failing.run()
    failing.check_outputs()


@pytest.mark.parametrize("seed", range(30))
def test_recordings_replay_bit_for_bit_without_a_model(seed: int) -> None:
    journal = io.StringIO()
    engine = run_once(seed, journal=journal)
    lines = journal.getvalue().splitlines()
    scheduler = replay(lines)
    assert list(scheduler.records) == list(engine.scheduler.records)
    assert not scheduler.has_unfinished


def test_a_replay_that_differs_is_noticed() -> None:
    journal = io.StringIO()
    run_once(3, journal=journal)
    entries = [json.loads(line) for line in journal.getvalue().splitlines()]
    entries[0]["total_blocks"] -= 1
    with pytest.raises(ReplayMismatchError, match="line"):
        replay(json.dumps(entry) for entry in entries)
    with pytest.raises(ValueError, match="begins with its start"):
        replay(json.dumps(entry) for entry in entries[1:])
    with pytest.raises(ValueError, match="empty"):
        replay([])
