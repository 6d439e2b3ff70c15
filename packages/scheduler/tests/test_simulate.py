"""The simulator: the same scheduler on a trace, in virtual time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fuzzing import run_once

from pagetide_scheduler import SchedulerConfig
from pagetide_scheduler.__main__ import main
from pagetide_scheduler.simulation import StepTime, simulate
from pagetide_scheduler.trace import TraceRequest, read_trace, shipped_traces, write_trace

POLICIES = ("fcfs", "lookahead", "reserve")


def config(admission: str = "lookahead", **options: object) -> SchedulerConfig:
    return SchedulerConfig(admission=admission, max_model_len=10_000, **options)


def test_one_request_by_hand() -> None:
    """Prompt of 10 in chunks of 4: three steps, then three more tokens, a second a step."""
    trace = [TraceRequest(arrival=2.0, prompt_tokens=10, output_tokens=4, max_tokens=8)]
    run = simulate(
        trace,
        config(max_num_batched_tokens=4),
        total_blocks=8,
        block_size=4,
        step_time=StepTime(fixed=1.0, token=0.0, key=0.0, copy=0.0),
        overlap=0,
    )
    assert run.num_steps == 6
    assert run.seconds == 6.0
    assert run.queue_seconds == [0.0]
    assert run.first_token_seconds == [3.0]
    assert run.between_tokens_seconds == [1.0, 1.0, 1.0]
    assert run.num_output_tokens == 4
    assert run.num_computed_tokens == 13
    assert run.recomputed == 0.0


def test_overlap_computes_one_token_too_many_and_no_more() -> None:
    trace = [TraceRequest(0.0, 10, 4, 8)]
    run = simulate(trace, config(), total_blocks=8, block_size=4, overlap=1)
    assert run.num_output_tokens == 4
    assert run.num_computed_tokens == 14


@pytest.mark.parametrize("name", ["poisson", "bursty", "giant"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_shipped_traces_run_to_their_end(name: str, policy: str) -> None:
    trace = read_trace(name)
    run = simulate(trace, config(policy, max_num_seqs=64), total_blocks=256)
    assert run.num_requests == len(trace)
    assert run.num_output_tokens == sum(request.output_tokens for request in trace)
    assert run.num_prompt_tokens == sum(request.prompt_tokens for request in trace)
    assert (run.cache_hits > 0.3) == (name != "giant")
    again = simulate(trace, config(policy, max_num_seqs=64), total_blocks=256)
    assert again == run


def test_what_cannot_fit_is_counted_and_left_out() -> None:
    trace = [TraceRequest(0.0, 100, 1, 1), TraceRequest(0.0, 4, 2, 2)]
    run = simulate(trace, config(), total_blocks=4, block_size=4)
    assert (run.num_refused, run.num_requests) == (1, 1)


def test_swapping_computes_nothing_again() -> None:
    trace = [TraceRequest(0.0, 20, 60, 60) for _ in range(6)]
    runs = [
        simulate(
            trace, config(preemption=way), total_blocks=40, block_size=4, host_blocks=200, overlap=0
        )
        for way in ("recompute", "swap")
    ]
    assert all(run.num_preemptions > 0 for run in runs)
    assert runs[0].recomputed > 0.1
    assert runs[1].recomputed == 0.0


def test_the_command_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    assert main(["simulate", "giant", "--blocks", "210", "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    for word in (*POLICIES, "output tokens/s", "first token", "preemptions", "recomputed"):
        assert word in printed
    assert len({line.index("reserve") for line in printed.splitlines() if "reserve" in line}) == 1
    root = ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 9


def test_a_trace_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.jsonl"
    trace = [TraceRequest(0.5, 4, 2, 3, "p", 2, 1), TraceRequest(0.0, 4, 2, 3)]
    path.write_text(write_trace(trace), encoding="utf-8")
    assert read_trace(str(path)) == trace[::-1]
    assert main(["simulate", str(path), "--policy", "fcfs"]) == 0
    assert "fcfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival": 0}', "line 1"),
        ('{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1, "max_tokens": 1}', "at least 1"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 2, "max_tokens": 1}', "output"),
        ("nonsense", "line 1"),
        ("", "no request"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    assert main(["simulate", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_unknown_traces_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.jsonl"]) == 2
    assert "poisson" in capsys.readouterr().err
    assert main(["simulate", "giant", "--policy", "best"]) == 2
    assert "'best'" in capsys.readouterr().err
    assert set(shipped_traces()) == {"poisson", "bursty", "giant"}


def test_the_replay_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = io.StringIO()
    engine = run_once(1, journal=journal)
    path = tmp_path / "recording.jsonl"
    path.write_text(journal.getvalue(), encoding="utf-8")
    assert main(["replay", str(path)]) == 0
    assert "every plan is the same" in capsys.readouterr().out
    entries = journal.getvalue().splitlines()
    start = json.loads(entries[0])
    start["config"]["max_num_batched_tokens"] += 1
    path.write_text("\n".join([json.dumps(start), *entries[1:]]), encoding="utf-8")
    status = main(["replay", str(path)])
    assert status in (0, 2)  # a larger budget need not matter to this run
    assert engine.outputs
