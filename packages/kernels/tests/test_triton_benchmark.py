"""The attention benchmark's own logic, with invented times and the reference for a back end."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark on the CPU: small cases, two peers, of whom one always fails."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention
    import attention_measure
    import attention_peers

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel here")

    times = iter(range(10, 10_000))
    monkeypatch.setattr(attention_measure, "DEVICE", "cpu")
    monkeypatch.setattr(attention_measure, "L2_BYTES", 1 << 10)
    monkeypatch.setattr(
        attention_measure, "timed", lambda calls: [call() for call in calls] and next(times)
    )
    monkeypatch.setattr(
        attention_measure, "measure_ceilings", lambda: {"copy_tb_s": 4.0, "matmul_tflop_s": 700.0}
    )
    peers = {"torch-sdpa": attention_peers.torch_sdpa, "broken": broken}
    monkeypatch.setattr(attention, "PEERS", peers)
    monkeypatch.setattr(
        attention,
        "CASES",
        [
            attention_peers.Case("tiny decode", 6, 2, 64, 40, 3, is_ragged=True),
            attention_peers.Case("tiny prefill", 4, 4, 32, 35, 2, 35),
            attention_peers.Case("tiny chunk", 4, 2, 32, 50, 2, 20),
            *(attention_peers.Case("tiny", 4, 2, 64, 33, n, is_warm=True) for n in (1, 4)),
        ],
    )
    return attention


def run(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str
) -> list[dict[str, object]]:
    monkeypatch.setattr(
        sys, "argv", ["attention.py", "--out", str(folder), "--backends", "reference", "--peers",
                      "torch-sdpa,broken", *options],
    )  # fmt: skip
    attention.main()
    return json.loads((folder / "attention.json").read_text())["rows"]


def test_every_kernel_of_every_case_has_a_row(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = run(attention, monkeypatch, tmp_path)
    assert len(rows) == 5 * 4
    for row in rows:
        if row["kernel"] == "broken":
            assert row["failure"] == "RuntimeError: no such kernel here"
            continue
        assert row["is_correct"], row
        assert row["times_best_peer"] is not None
        assert row["tokens_s"] > 0
        if row["kernel"] == "reference":
            assert row["prepare_us"] > 0
    decode = {row["kernel"]: row for row in rows if row["case"].startswith("tiny decode")}
    assert decode["torch-sdpa"]["times_best_peer"] == 1
    peer, own = decode["torch-sdpa"]["us"], decode["reference"]["us"]
    assert decode["reference"]["times_best_peer"] == pytest.approx(peer / own, abs=1e-3)
    assert decode["reference int8"]["kv_mb"] <= decode["reference"]["kv_mb"]
    assert "times_own_float16" in decode["reference int8"]
    warm = [row for row in rows if row["is_warm"] and row["kernel"] == "reference"]
    assert [row["batch"] for row in warm] == [1, 4]
    assert warm[1]["scaling"] == pytest.approx(4 * warm[0]["us"] / warm[1]["us"], abs=1e-2)
    with (tmp_path / "attention.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    printed = capsys.readouterr().out
    assert "no such kernel here" in printed
    assert "tokens/s" in printed
    assert "WRONG" not in printed


def test_a_run_cut_short_is_taken_up_again(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = run(attention, monkeypatch, tmp_path, "--only", "tiny decode")
    assert len(before) == 4
    after = run(attention, monkeypatch, tmp_path, "--resume")
    assert after[:4] == before
    assert len(after) == 20
    assert run(attention, monkeypatch, tmp_path, "--resume", "--seconds", "0") == after


def test_a_wrong_answer_is_no_peer_to_be_measured_by(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    right = attention.PEERS["torch-sdpa"]
    monkeypatch.setitem(
        attention.PEERS, "torch-sdpa",
        lambda case, problems: [lambda call=c: call() * 1.1 for c in right(case, problems)],
    )  # fmt: skip
    rows = run(attention, monkeypatch, tmp_path, "--only", "tiny prefill")
    assert [row["is_correct"] for row in rows if row["kernel"] == "torch-sdpa"] == [False]
    assert all(row.get("times_best_peer") is None for row in rows)
    assert "WRONG" in capsys.readouterr().out


def test_a_kernel_that_takes_too_long_is_left(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def endless(*_: object) -> None:
        while True:
            torch.zeros(1)

    monkeypatch.setitem(attention.PEERS, "broken", endless)
    for limit in ("SECONDS_A_KERNEL", "SECONDS_A_WARM_UP"):
        monkeypatch.setattr(attention, limit, 1)
    rows = run(attention, monkeypatch, tmp_path, "--only", "tiny decode")
    assert [row["failure"] for row in rows if row["kernel"] == "broken"] == [
        "TimeoutError: not done after 1 s"
    ]
    assert len(rows) == 4


def test_timing_needs_no_card_to_be_read(attention: ModuleType) -> None:
    """Sizes of the real table: every case has a name of its own, and INT8's is beyond 256 MB."""
    from attention_peers import Case

    source = (BENCHMARKS / "attention.py").read_text(encoding="utf-8")
    real = eval(source.split("CASES = ")[1].split("\nQUICK")[0], {"Case": Case})
    assert len({str(case) for case in real}) == len(real) == 22
    assert sum(case.is_warm for case in real) == 4
    case = next(case for case in real if case.batch == 32 and case.head_dim == 128)
    assert 2 * case.batch * case.context * case.num_kv_heads * case.head_dim * 2 > 256e6
