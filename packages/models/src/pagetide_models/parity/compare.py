"""How far two traces are apart, and where first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagetide_models.parity.trace import PARTS, Trace, layer_of, point_order

__all__ = ["Comparison", "LogitDifference", "Place", "compare_logits", "compare_traces"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where two traces part.

    Attributes:
        point: The first part over the tolerance, as in `Trace`.
        layer: Its layer, or None.
        part: Its name within the layer.
        position: The first token over the tolerance.
        head: The first head of that token, or None where the part has none.
        error: The relative error there.
        worst: The largest of that part.
    """

    point: str
    layer: int | None
    part: str
    position: int
    head: int | None
    error: float
    worst: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Relative errors of one trace against another.

    Attributes:
        errors: The largest over positions and heads, by point, in order of computation.
        place: Where they part first, or None.
    """

    errors: Mapping[str, float]
    place: Place | None

    @property
    def hidden_errors(self) -> dict[str, float]:
        """Of the residual stream alone: the embedding, after each layer, after the last norm."""
        return {
            point: error
            for point, error in self.errors.items()
            if point in ("embedding", "final norm") or point.endswith(".hidden")
        }


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """``|actual - expected| / |expected|`` of each row: [T] or [T, heads]; inf where it is NaN.

    A head or token that is nearly zero is measured by its neighbours, or rounding alone would count
    as an error without bound.
    """
    difference = (actual.double() - expected.double()).norm(dim=-1)
    scale = expected.double().norm(dim=-1)
    floor = 0.01 * scale.median(dim=0, keepdim=True).values
    if scale.dim() == 2:
        floor = torch.maximum(floor, 0.1 * scale.mean(dim=1, keepdim=True))
    errors = difference / torch.maximum(scale, floor).clamp_min(1e-30)
    return torch.nan_to_num(errors, nan=float("inf"), posinf=float("inf"))


def compare_traces(actual: Trace, expected: Trace, tolerance: float) -> Comparison:
    """Compare every point that both have.

    The first place is looked for in the residual stream: the first layer whose output is over the
    tolerance; and then within that layer, in order of computation.

    Args:
        actual: Ours.
        expected: The reference's.
        tolerance: The largest relative error of a row that counts as equal.
    """
    num_layers = 1 + max((layer_of(point) or 0) for point in expected)
    common = [p for p in point_order(num_layers) if p in actual and p in expected]
    by_row = {point: relative_errors(actual[point], expected[point]) for point in common}
    errors = {point: float(rows.max()) for point, rows in by_row.items()}
    comparison = Comparison(errors, None)
    streams = comparison.hidden_errors
    stream = next((point for point, error in streams.items() if error > tolerance), None)
    if stream is None:
        return comparison
    inside = [stream]
    layer = layer_of(stream)
    if layer is not None:
        inside = [f"{layer}.{part}" for part in PARTS if f"{layer}.{part}" in errors]
    point = next((p for p in inside if errors[p] > tolerance), stream)
    return Comparison(errors, _place(point, by_row[point], tolerance))


def _place(point: str, rows: Tensor, tolerance: float) -> Place:
    by_token = rows if rows.dim() == 1 else rows.amax(dim=1)
    position = int((by_token > tolerance).nonzero()[0])
    head = None if rows.dim() == 1 else int((rows[position] > tolerance).nonzero()[0])
    error = rows[position] if head is None else rows[position, head]
    part = point.partition(".")[2] or point
    return Place(point, layer_of(point), part, position, head, float(error), float(rows.max()))


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """Logits of all positions against the reference's.

    Attributes:
        largest: The largest difference of two logits.
        largest_log_probability: The same of log-probabilities.
        num_positions: How many positions were compared.
        num_same_argmax: Positions with the same most likely token.
        num_close: Positions with another one where the reference's top two are closer than twice
            the measured difference: either answer is as good there.
        first_different: The first position with another token that is not close, or None.
    """

    largest: float
    largest_log_probability: float
    num_positions: int
    num_same_argmax: int
    num_close: int
    first_different: int | None


def compare_logits(actual: Tensor, expected: Tensor) -> LogitDifference:
    """Compare logits [T, vocab_size]."""
    actual, expected = actual.float(), expected.float()
    differences = torch.nan_to_num((actual - expected).abs().amax(dim=-1), nan=float("inf"))
    log_probabilities = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs().amax(dim=-1)
    is_same = actual.argmax(dim=-1) == expected.argmax(dim=-1)
    # Only where they differ: finding the top two costs more than all the rest.
    others = (~is_same).nonzero().squeeze(1)
    top = expected[others].topk(2, dim=-1).values
    gaps = top[:, 0] - top[:, 1]
    # A large error must not excuse itself: beyond a unit no two tokens count as close.
    is_close = (gaps < 2 * differences[others]) & (gaps < 1.0) & differences[others].isfinite()
    wrong = others[~is_close]
    return LogitDifference(
        largest=float(differences.max()),
        largest_log_probability=float(torch.nan_to_num(log_probabilities, nan=float("inf")).max()),
        num_positions=len(actual),
        num_same_argmax=int(is_same.sum()),
        num_close=int(is_close.sum()),
        first_different=int(wrong[0]) if len(wrong) else None,
    )
