"""The errors of a report as an SVG of two scales: layers across, a logarithm of the error up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from pagetide_models.parity.report import Report

__all__ = ["as_svg"]

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 44, 48
_COLOURS: Final = ("#00796b", "#c2185b")


def as_svg(report: Report) -> str:
    """Draw the hidden-state error after each layer, a line for each run, and the tolerance."""
    points = list(report.runs[0].comparison.hidden_errors)
    series = [[run.comparison.errors[point] for point in points] for run in report.runs]
    exponents = [_exponent(error) for errors in series for error in errors]
    exponents.append(_exponent(report.tolerance))
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = high if high > low else low + 1

    def x(index: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / max(len(points) - 1, 1)

    def y(error: float) -> float:
        share = (_exponent(error) - low) / (high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def lines() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        )
        yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        title = f"{report.architecture}, {report.dtype}, {report.kv_dtype} KV: {report.verdict}"
        yield _text(_LEFT, 20, f"Relative hidden-state error ({title})", "start")
        for exponent in range(low, high + 1):
            level = y(10.0**exponent)
            yield _line(_LEFT, level, _WIDTH - _RIGHT, level, "#dddddd")
            yield _text(_LEFT - 8, level + 4, f"1e{exponent}", "end")
        level = y(report.tolerance)
        yield _line(_LEFT, level, _WIDTH - _RIGHT, level, "#666666", dash="6 4")
        yield _text(_WIDTH - _RIGHT, level - 5, "tolerance", "end")
        step = max(1, len(points) // 16)
        for index in range(0, len(points), step):
            name = points[index].replace(".hidden", "")
            yield _text(x(index), _HEIGHT - _BOTTOM + 18, name, "middle")
        for number, (run, errors) in enumerate(zip(report.runs, series, strict=True)):
            colour = _COLOURS[number % len(_COLOURS)]
            path = " ".join(f"{x(i):.1f},{y(error):.1f}" for i, error in enumerate(errors))
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield _text(_LEFT + 220 * number, _HEIGHT - 10, run.title, "start", colour)
        yield "</svg>"

    return "\n".join(lines()) + "\n"


def _exponent(error: float) -> float:
    return math.log10(min(max(error, 1e-9), 1e3))


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1:.1f}" x2="{x2}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
