"""What was measured: compared, printed, and written as JSON, CSV and a plot."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def compare(rows: list[Row]) -> None:
    """Adds to one case's rows the ratios to its best correct peer and of INT8 to our float16.

    Above 1 is faster. Of a warm case, tokens/s and how they scale from one sequence are added
    by `scale_warm`.
    """
    timed = [row for row in rows if "us" in row]
    best = min((r["us"] for r in timed if r["is_peer"] and r["is_correct"]), default=None)
    own = {r["kernel"]: r["us"] for r in timed}
    for row in timed:
        row["times_best_peer"] = None if best is None else round(best / row["us"], 3)
        name, _, kind = row["kernel"].partition(" ")
        if kind == "int8" and name in own:
            row["times_own_float16"] = round(own[name] / row["us"], 3)


def scale_warm(rows: list[Row]) -> None:
    """Adds to the warm rows how many times the tokens of one sequence they make in a second."""
    warm = [row for row in rows if row["is_warm"] and "us" in row]
    alone = {row["kernel"]: row["us"] for row in warm if row["batch"] == 1}
    for row in warm:
        if row["kernel"] in alone:
            row["scaling"] = round(row["batch"] * alone[row["kernel"]] / row["us"], 2)


def line(row: Row, *, is_decode: bool) -> str:
    """A row as a line of text."""
    if "us" not in row:
        return f"  {row['kernel']:16s} {row['failure']}"
    rate = f"{row['tb_s']:6.2f} TB/s" if is_decode else f"{row['tflop_s']:6.0f} TFLOP/s"
    text = (
        f"  {row['kernel']:16s} {row['us']:9.1f} us {rate} {row['percent_of_ceiling']:5.1f}%"
        f"  best peer / this {row['times_best_peer'] or math.nan:5.2f}  error {row['error']:.1e}"
    )
    if not row["is_correct"]:
        text += "  WRONG"
    if "times_own_float16" in row:
        text += f"  of float16 {row['times_own_float16']:.2f}x"
    if "prepare_us" in row:
        text += f"  prepare {row['prepare_us']:.1f} us"
    if row["is_warm"]:
        text += f"  {row['tokens_s']:,.0f} tokens/s"
        if "scaling" in row:
            text += f" ({row['scaling']:.2f}x of one)"
    return text


def write(record: Row, folder: Path) -> None:
    """attention.json and attention.csv, whole after every kernel: a run may be cut short."""
    rows = record["rows"]
    (folder / "attention.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "attention.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[Row], path: Path) -> bool:
    """Speed relative to the best peer, a group of bars a case; False without matplotlib."""
    rows = [row for row in rows if row.get("times_best_peer")]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(cases) + 2))
    height = 0.8 / len(kernels)
    for i, kernel in enumerate(kernels):
        own = [row for row in rows if row["kernel"] == kernel]
        places = [cases.index(row["case"]) + i * height for row in own]
        axes.barh(places, [r["times_best_peer"] for r in own], height=height, label=kernel)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([i + 0.4 for i in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to the best peer of the same run")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True
