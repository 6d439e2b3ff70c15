"""What a comparison found: as text for people, as JSON for the record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pagetide_models.parity.compare import Comparison, LogitDifference, Place

__all__ = ["Report", "Rounding", "RunReport", "Verdict"]

Verdict = Literal["equal", "rounding", "different"]

# What a wrong part says about where to look, given that everything before it was right.
_ADVICE: Final = {
    "embedding": "the embedding table, or the positions added to it",
    "norm": "the norm before attention, its weight or its epsilon",
    "q": "the query projection: its rows in the fused weight, its bias, its order in the file",
    "k": "the key projection: its rows in the fused weight, its bias, its order in the file",
    "v": "the value projection: its rows in the fused weight, its bias, its order in the file",
    "rotated q": "the rotary embedding (or the norm) of queries: halves, angles, positions",
    "rotated k": "the rotary embedding (or the norm) of keys: halves, angles, positions",
    "cached k": "writing keys to the cache: slots, strides, scales",
    "cached v": "writing values to the cache: slots, strides, scales",
    "attention": "reading the cache: strides, mask, window, block table, head mapping, scale",
    "output": "the projection after attention",
    "mlp norm": "the residual addition after attention, or the norm before the MLP",
    "mlp": "the MLP: its projections, their order, its activation",
    "hidden": "the residual addition after the MLP",
    "final norm": "the norm after the last layer",
}


@dataclass(frozen=True, slots=True)
class Rounding:
    """Both sides against the exact run, at the place in question.

    Attributes:
        point: The place.
        ours, theirs: Largest relative error against the exact run.
        is_reason: Whether ours strays no further than transformers' own rounding does, there and in
            every layer.
    """

    point: str
    ours: float
    theirs: float
    is_reason: bool


@dataclass(frozen=True, slots=True)
class RunReport:
    """One way of cutting the prompt into steps.

    Attributes:
        title: How it was cut.
        comparison: Of all parts.
        logits: Of the logits of all positions.
        is_over_logit_tolerance: Whether float32 logits differ by more than 1e-3.
        rounding: Measured only where something was over a tolerance.
    """

    title: str
    comparison: Comparison
    logits: LogitDifference
    is_over_logit_tolerance: bool
    rounding: Rounding | None

    @property
    def verdict(self) -> Verdict:
        is_equal = (
            self.comparison.place is None
            and not self.is_over_logit_tolerance
            and self.logits.first_different is None
        )
        if is_equal:
            return "equal"
        return "rounding" if self.rounding is not None and self.rounding.is_reason else "different"


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison; see `RunReport` for its parts."""

    model: str
    architecture: str
    dtype: str
    kv_dtype: str
    backend: str
    num_tokens: int
    tolerance: float
    runs: tuple[RunReport, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the runs'."""
        order: tuple[Verdict, ...] = ("equal", "rounding", "different")
        return max((run.verdict for run in self.runs), key=order.index)

    def as_json(self) -> dict[str, Any]:
        """Plain data: every error of every part; None where one is infinite or NaN."""
        plain = asdict(self)
        for run, data in zip(self.runs, plain["runs"], strict=True):
            data["verdict"] = run.verdict
        return {**_finite(plain), "verdict": self.verdict}

    def as_text(self) -> str:
        """Tables and a verdict."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.model}: {self.architecture}, {self.dtype} weights, {self.kv_dtype} KV cache, "
            f"attention back end {self.backend}, {self.num_tokens} tokens"
        )
        yield from self._table()
        for run in self.runs:
            yield ""
            yield from _findings(run, self.tolerance)
        yield ""
        yield {
            "equal": "PASS: equal within the tolerance.",
            "rounding": "PASS: over the tolerance, and rounding explains it: ours is as close to "
            "the exact result as transformers is.",
            "different": "FAIL: this is not rounding.",
        }[self.verdict]

    def _table(self) -> Iterator[str]:
        yield f"largest relative error of the hidden state (tolerance {self.tolerance:.1e})"
        yield "  " + "".join(f"{title:>26}" for title in ["after", *(r.title for r in self.runs)])
        for point in self.runs[0].comparison.hidden_errors:
            name = point.replace(".hidden", "")
            name = f"layer {name}" if name.isdigit() else name
            cells = [f"{run.comparison.errors[point]:.2e}" for run in self.runs]
            yield "  " + "".join(f"{cell:>26}" for cell in [name, *cells])


def _finite(value: Any) -> Any:
    # JSON has no infinity; Python would write one all the same.
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _findings(run: RunReport, tolerance: float) -> Iterator[str]:
    logits = run.logits
    yield f"{run.title}:"
    yield (
        f"  logits differ by at most {logits.largest:.2e}, log-probabilities by "
        f"{logits.largest_log_probability:.2e}; same most likely token at {logits.num_same_argmax} "
        f"of {logits.num_positions} positions"
        + (f" ({logits.num_close} of the others too close to call)" if logits.num_close else "")
    )
    if logits.first_different is not None:
        yield f"  another most likely token first at position {logits.first_different}"
    place = run.comparison.place
    if place is not None:
        is_explained = run.rounding is not None and run.rounding.is_reason
        yield from _place_lines(run.comparison, place, tolerance, has_advice=not is_explained)
    if run.rounding is not None:
        rounding = run.rounding
        yield (
            f"  against the exact run, {rounding.point!r} is off by {rounding.ours:.2e} here and "
            f"by {rounding.theirs:.2e} in transformers: "
            + ("rounding explains it" if rounding.is_reason else "rounding does not explain it")
        )


def _place_lines(
    comparison: Comparison, place: Place, tolerance: float, *, has_advice: bool
) -> Iterator[str]:
    if place.layer is not None:
        yield f"  first bad layer: {place.layer}; its parts in order of computation:"
        prefix = f"{place.layer}."
        for point, error in comparison.errors.items():
            if point.startswith(prefix):
                mark = "  <-- first over the tolerance" if point == place.point else ""
                mark = mark or ("  over" if error > tolerance else "")
                yield f"    {point.removeprefix(prefix):<12}{error:.2e}{mark}"
    head = "" if place.head is None else f", head {place.head}"
    yield (
        f"  first over the tolerance: {place.part}, position {place.position}{head} "
        f"(error {place.error:.2e}, at worst {place.worst:.2e})"
    )
    if has_advice:
        yield f"  look at: {_ADVICE.get(place.part, place.part)}"
