"""Simulations side by side: a table, and a picture in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from pagetide_scheduler.simulation import Simulation

Column = npt.NDArray[np.float64]
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e5ea2", "#b8860b")
_WIDTH, _HEIGHT, _MARGIN = 420, 220, 44


def table(runs: Sequence[Simulation]) -> str:
    """A line a figure and a column a run; times in milliseconds as median / p95 / p99."""
    rows: list[list[str]] = [["", *[run.policy for run in runs]]]

    def add(label: str, values: Sequence[str]) -> None:
        rows.append([label, *values])

    add("requests", [str(run.num_requests) for run in runs])
    add("refused", [str(run.num_refused) for run in runs])
    add("steps", [str(run.num_steps) for run in runs])
    add("seconds", [f"{run.seconds:.2f}" for run in runs])
    add("output tokens/s", [f"{run.tokens_per_second:.0f}" for run in runs])
    add("queue time, ms", [_percentiles(run.queue_seconds) for run in runs])
    add("first token, ms", [_percentiles(run.first_token_seconds) for run in runs])
    add("longest first token, ms", [f"{max(run.first_token_seconds) * 1e3:.0f}" for run in runs])
    add("between tokens, ms", [_percentiles(run.between_tokens_seconds) for run in runs])
    add("preemptions", [str(run.num_preemptions) for run in runs])
    add("prompt tokens cached", [f"{run.cache_hits:.1%}" for run in runs])
    add("tokens recomputed", [f"{run.recomputed:.1%}" for run in runs])
    add("empty slots", [f"{run.empty_slots:.1%}" for run in runs])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for label, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def picture(runs: Sequence[Simulation], title: str) -> str:
    """Three charts: time to first token, blocks held and requests waiting, a line a run."""
    charts = [
        _chart(
            "share of requests by time to first token, s",
            [_distribution(run.first_token_seconds) for run in runs],
            1.0,
        ),
        _chart(
            "share of the pool held, over time, s",
            [(np.array(run.times), np.array(run.used_blocks)) for run in runs],
            1.0,
        ),
        _chart(
            "requests waiting, over time, s",
            [(np.array(run.times), np.array(run.waiting, float)) for run in runs],
            max(1.0, *(max(run.waiting, default=0) for run in runs)),
        ),
    ]
    width, height = _WIDTH * len(charts), _HEIGHT + 60
    legend = "".join(
        f'<rect x="{_MARGIN + 130 * i}" y="36" width="12" height="4" fill="{colour}"/>'
        f'<text x="{_MARGIN + 18 + 130 * i}" y="42">{escape(run.policy)}</text>'
        for i, (run, colour) in enumerate(zip(runs, COLOURS, strict=False))
    )
    body = "".join(
        f'<g transform="translate({_WIDTH * i} 50)">{chart}</g>' for i, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" '
        f'fill="white"/><text x="{_MARGIN}" y="22" font-size="15">{escape(title)}</text>'
        f"{legend}{body}</svg>\n"
    )


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    middle, high, highest = np.percentile(np.array(seconds) * 1e3, (50, 95, 99))
    return f"{middle:.0f} / {high:.0f} / {highest:.0f}"


def _distribution(values: Sequence[float]) -> tuple[Column, Column]:
    ordered = np.sort(np.array(values))
    return ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered))


def _chart(label: str, lines: Sequence[tuple[Column, Column]], top: float) -> str:
    right = max([float(x.max()) for x, _ in lines if len(x)], default=1.0) or 1.0
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    parts = [
        f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{inner_width}" height="{inner_height}" '
        'fill="none" stroke="#bbb"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{escape(label)}</text>',
        f'<text x="{_MARGIN - 6}" y="{_MARGIN + 10}" text-anchor="end">{top:.3g}</text>',
        f'<text x="{_MARGIN - 6}" y="{_HEIGHT - _MARGIN}" text-anchor="end">0</text>',
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - _MARGIN + 16}" text-anchor="end">'
        f"{right:.3g}</text>",
    ]
    for (x, y), colour in zip(lines, COLOURS, strict=False):
        if len(x):
            keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), 400)).astype(int))
            xs = _MARGIN + x[keep] / right * inner_width
            ys = _HEIGHT - _MARGIN - y[keep] / top * inner_height
            points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
    return "".join(parts)
