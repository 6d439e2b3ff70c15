"""Breaks the sources on purpose, one line at a time, and checks that the tests notice.

    python packages/scheduler/tests/mutants.py [--jobs 2] [--only WORD] [--json FILE]

Each mutant is a copy of the package with one replacement; the tests of the file that is about it
run on it and must fail; all files do, for a mutant that names none. A survivor means that a line
could be wrong without anybody noticing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import mutation
from mutation import Mutant

TESTS = Path(__file__).resolve().parent
# The quick and sharp ones first; most mutants die in the first seconds.
ORDER = (
    "test_steps",
    "test_params",
    "test_pitfalls",
    "test_samples",
    "test_prompt_logprobs",
    "test_swap",
    "test_admission",
    "test_reservation",
    "test_recovery",
    "test_fuzz",
    "test_state_machine",
    "test_records",
)

MUTANTS = (
    Mutant(
        "tokens lost on preemption", "columns", "        self.flush(request)\n", "", "test_steps"
    ),
    Mutant(
        "stale results read",
        "columns",
        "return self.admitted_steps[rows] <= step_id",
        "return self.admitted_steps[rows] <= NEVER",
        "test_steps",
    ),
    Mutant(
        "cached tokens computed again in shared blocks",
        "columns",
        "self.num_computed_tokens[row] = num_computed",
        "self.num_computed_tokens[row] = 0",
        "test_samples",
    ),
    Mutant(
        "open token in the wrong slot",
        "columns",
        "self._open_slots[rows * size + known % size] = token_ids",
        "self._open_slots[rows * size + (known + 1) % size] = token_ids",
        "test_steps",
    ),
    Mutant(
        "last token not kept",
        "columns",
        "self.last_tokens[rows] = token_ids",
        "self.last_tokens[rows] = 1",
        "test_steps",
    ),
    Mutant(
        "a sampled token not counted as in flight",
        "columns",
        "self.num_total_tokens[rows] = ends + 1",
        "self.num_total_tokens[rows] = ends",
        "test_steps",
    ),
    Mutant(
        "rows taken for held that have changed hands",
        "columns",
        "if step_id > self._left_step:",
        "if step_id >= 0:",
        "test_steps",
    ),
    Mutant(
        "blocks committed for a request that has left",
        "results",
        "        is_full &= are_held\n",
        "        pass\n",
        "test_steps",
    ),
    Mutant(
        "hits on tokens not computed yet",
        "results",
        "commit(request.request_id, request.tokens, end)",
        "commit(request.request_id, request.tokens, len(request.tokens))",
        "test_reservation",
    ),
    Mutant(
        "a block that is full in part committed without its beginning",
        "results",
        "request.tokens[end - columns.block_size :].tobytes() + content[start:]",
        "content[:start] + content[start:]",
        "test_pitfalls",
    ),
    Mutant(
        "full block overwritten before it is listed",
        "results",
        "                request.tokens.frombytes(content)\n",
        "                pass\n",
        "test_steps",
    ),
    Mutant(
        "planned beyond the limit",
        "budget",
        "    left[to_sample <= 0] = 0\n",
        "",
        "test_steps",
    ),
    Mutant(
        "thought to decode beyond the limit",
        "budget",
        "int(to_sample[to_sample.argmin()]) - 1",
        "int(to_sample[to_sample.argmin()])",
        "test_steps",
    ),
    Mutant(
        "wrong chunk offset",
        "assembly",
        "return cls(request, request.num_computed_tokens, num_tokens)",
        "return cls(request, request.num_computed_tokens - 1, num_tokens)",
        "test_steps",
    ),
    Mutant(
        "budget not counted down by decode",
        "budget",
        "    budget -= len(decode)\n",
        "",
        "test_samples",
    ),
    Mutant(
        "sampled before the prompt is complete",
        "assembly",
        "is_last = end == len(request.tokens)",
        "is_last = end >= len(request.tokens) - 1",
        "test_steps",
    ),
    Mutant(
        "token in flight taken from the host",
        "assembly",
        "inflight_tokens = is_inflight.nonzero()[0]",
        "inflight_tokens = is_inflight.nonzero()[0][:0]",
        "test_steps",
    ),
    Mutant(
        "new row without its table",
        "entrance",
        "    draft.change_tables([row] * len(block_ids), range(len(block_ids)), block_ids)\n",
        "",
        "test_steps",
    ),
    Mutant(
        "block boundary one token late",
        "preemption",
        "needs_block = positions >= columns.capacities[rows]",
        "needs_block = positions > columns.capacities[rows]",
        "test_steps",
    ),
    Mutant(
        "an older request preempted for a younger one",
        "running",
        "key=_order) + 1 :]",
        "key=_order) - 1 :]",
        "test_swap",
    ),
    Mutant(
        "a batch that keeps whoever has left",
        "running",
        "            self._batch = self._batch.without(index)\n",
        "            pass\n",
        "test_steps",
    ),
    Mutant(
        "a batch taken that lacks whoever came",
        "running",
        "if before is self._batch and self._came == list(after.requests[len(before) :]):",
        "if before is self._batch:",
        "test_samples",
    ),
    Mutant(
        "the head kept when a higher priority comes",
        "waiting",
        "if len(self._lanes) > 1:\n            self._head = None",
        "if len(self._lanes) > 10:\n            self._head = None",
        "test_reservation",
    ),
    Mutant(
        "the youngest first",
        "preemption",
        "sorted(growing, key=lambda request: request.order)",
        "sorted(growing, key=lambda request: request.order, reverse=True)",
        "test_fuzz",
    ),
    Mutant(
        "copy-on-write without the copy",
        "preemption",
        "    draft.copies += copies\n",
        "",
        "test_samples",
    ),
    Mutant(
        "the youngest is the victim, whatever it costs",
        "preemption",
        "    return best\n",
        "    return candidates[-1], weigh(state, candidates[-1])\n",
        "test_admission",
    ),
    Mutant(
        "open block written by both samples",
        "samples",
        "columns.share_open_block(leader, follower)",
        "pass",
        "test_samples",
    ),
    Mutant(
        "a sample's first token not counted as in flight",
        "samples",
        "    columns.num_total_tokens[row] += 1\n",
        "",
        "test_samples",
    ),
    Mutant(
        "followers lost with their leader",
        "samples",
        "    follow(successor, others)\n",
        "    follow(successor, [])\n",
        "test_samples",
    ),
    Mutant(
        "restarted before an older plan is read",
        "recovery",
        "request.last_step = plan.step_id - 1",
        "request.last_step = 0",
        "test_recovery",
    ),
    Mutant(
        "restarted requests run together",
        "recovery",
        "        return min(self._suspects.values(), key=lambda request: request.order)",
        "        return None",
        "test_restarted",
    ),
    Mutant(
        "the failed plan's own requests trusted",
        "recovery",
        "if state.columns.last_steps[r.row] >= plan.step_id]",
        "if state.columns.last_steps[r.row] > plan.step_id]",
        "test_samples",
    ),
    Mutant(
        "a failed host copy trusted",
        "recovery",
        "                forget_blocks(state, request)\n",
        "",
        "test_swap",
    ),
    Mutant(
        "nobody is ever to blame",
        "recovery",
        "culprit = plan.sequences.requests[0]",
        "culprit = None",
        "test_recovery",
    ),
    Mutant(
        "swapped out without copies",
        "leaving",
        "BlockCopy(source, destination, CopyDirection.OUT)",
        "BlockCopy(source, source % host.total_blocks, CopyDirection.OUT)",
        "test_swap",
    ),
    Mutant(
        "swapped in to the wrong blocks",
        "blocks",
        "destinations = table[swapped.num_kept : swapped.num_kept + len(sources)]",
        "destinations = table[-len(sources) :]",
        "test_swap",
    ),
    Mutant(
        "a shared block travels and is dropped",
        "leaving",
        "max((i + 1 for i in range(num_full) if references[i] > 1), default=0)",
        "max((i for i in range(num_full) if references[i] > 1), default=0)",
        "test_swap",
    ),
    Mutant(
        "a block copied out and written in one plan",
        "leaving",
        "if clashing and state.host_blocks is not None:",
        "if not clashing and state.host_blocks is not None:",
        "test_fuzz",
    ),
    Mutant(
        "host blocks leak",
        "leaving",
        "    host.free_sequence(request.request_id)\n",
        "",
        "test_swap",
    ),
    Mutant(
        "kept blocks never let go",
        "leaving",
        "if request.swapped is not None and request.swapped.num_kept:",
        "if request.swapped is not None and request.swapped.num_kept > 10**6:",
        "test_swap",
    ),
    Mutant(
        "growth not set aside for a promise",
        "forecast",
        "return int(new_blocks.sum()) + int(columns.is_open_shared[rows].sum()) + following",
        "return 0",
        "test_reservation",
    ),
    Mutant(
        "a reservation that slips",
        "reservation",
        "if old is not None and old.request is head and not self._is_void:",
        "if old is None:",
        "test_reservation",
    ),
    Mutant(
        "backfill may end after the promise",
        "reservation",
        "if end <= reservation.due:",
        "if end <= reservation.due + 3:",
        "test_reservation",
    ),
    Mutant(
        "backfill may take what the head needs",
        "reservation",
        "if num_blocks <= reservation.spare and reservation.spare_rows > 0:",
        "if reservation.spare_rows > 0:",
        "test_reservation",
    ),
    Mutant(
        "skips without a limit",
        "admission",
        "return has_waited or request.num_skips >= self._max_skips",
        "return has_waited",
        "test_admission",
    ),
    Mutant(
        "no limit to the wait at the head",
        "admission",
        "return has_waited or request",
        "return request",
        "test_admission",
    ),
    Mutant(
        "new requests pass those that return",
        "admission",
        "if request is None or (stayed and stayed[-1].has_run and not request.has_run):",
        "if request is None:",
        "test_admission",
    ),
    Mutant(
        "skips kept beyond admission",
        "entrance",
        "    request.num_skips = 0\n",
        "",
        "test_admission",
    ),
    Mutant(
        "no watermark",
        "scheduler",
        "int(config.watermark * block_manager.total_blocks)",
        "0",
        "test_admission",
    ),
    Mutant(
        "admitted while a step that names it is in flight",
        "state",
        "return request.last_step >= oldest",
        "return False",
        "test_steps",
    ),
    Mutant(
        "rows of followers given away",
        "entrance",
        "len(state.columns.free_rows) - state.num_followers",
        "len(state.columns.free_rows)",
        "test_samples",
    ),
    Mutant(
        "minimum length one token short",
        "request",
        "self.num_prompt_tokens + self.params.min_tokens + 1, MOST_TOKENS",
        "self.num_prompt_tokens + self.params.min_tokens, MOST_TOKENS",
        "test_steps",
    ),
    Mutant(
        "minimum length beyond int32",
        "request",
        "return min(self.num_prompt_tokens + self.params.min_tokens + 1, MOST_TOKENS)",
        "return self.num_prompt_tokens + self.params.min_tokens + 1",
        "test_recovery",
    ),
    Mutant(
        "what a failed request computed can be found",
        "scheduler",
        "state.blocks.uncache(request.request_id)",
        "pass",
        "test_recovery",
    ),
    Mutant(
        "a request that can never fit is taken",
        "arrival",
        "if needed > pool_tokens:",
        "if needed > pool_tokens + 1:",
        "test_params",
    ),
    Mutant(
        "kept tokens ignored",
        "ending",
        "tuple(generated if keep_tokens is None else generated[:keep_tokens])",
        "tuple(generated)",
        "test_steps",
    ),
    Mutant(
        "prompt log-probabilities read from the cache",
        "blocks",
        "reads_cache = not request.params.prompt_logprobs",
        "reads_cache = True",
        "test_pitfalls",
    ),
    Mutant(
        "prompt log-probabilities in the wrong place after a new start",
        "results",
        "request.prompt_logprobs[part.start - 1 : end] = ",
        "request.prompt_logprobs[len(request.prompt_logprobs) :] = ",
        "test_prompt_logprobs",
    ),
    Mutant(
        "a prompt half scored goes on in another row",
        "leaving",
        "is_scored = request.params.prompt_logprobs and request.first_token_time is None",
        "is_scored = False",
        "test_prompt_logprobs",
    ),
)


SUITE = mutation.Suite(
    package=TESTS.parent / "src" / "pagetide_scheduler",
    place="{}.py",
    files=tuple(TESTS / f"{name}.py" for name in ORDER),
    mutants=MUTANTS,
    options=("-m", "not long"),
    environment={"PAGETIDE_ISOLATED": "0", "OMP_NUM_THREADS": "1"},
    preload=("pytest", "numpy", "hypothesis"),
    seconds=60.0,
)


def main() -> int:
    options = mutation.parser((__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return mutation.judge_copies(SUITE, Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
