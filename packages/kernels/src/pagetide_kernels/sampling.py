"""Sampling the next token of every row, each row by its own parameters and its own random stream.

A row's token depends on that row alone: on its logits, its parameters, its key and its position.
Nothing is shared between rows, so neighbours and order cannot matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetide_kernels.philox import philox_uniform
from pagetide_kernels.validation import require_tensor

__all__ = ["greedy", "sample"]

# At and below this temperature the distribution is its maximum; dividing by less would overflow.
GREEDY_TEMPERATURE = 1e-5
# Enough for nearly every row: sorting a vocabulary of 50,000 takes 20 times as long.
NUM_CANDIDATES = 256


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id among equals.

    For a step whose rows are all greedy, which the host knows, this is all there is to sampling.

    Args:
        logits: [S, V].

    Returns:
        int64 [S].
    """
    require_tensor("logits", logits, (None, None), None, logits.device)
    return logits.argmax(dim=-1)


@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw a token for each row from its logits, cut to its ``top_k`` and then its ``top_p``.

    The tokens of a row are ordered by logit, the lower id first among equals. ``top_k`` keeps the
    first ``top_k``; ``top_p`` keeps of those the shortest prefix that has ``top_p`` of their
    probability, at least one token. The draw inverts the cumulative distribution at a uniform
    number of draw 0 of the row's Philox stream, so a token outside the kept set, or of probability
    zero, is never drawn.

    Args:
        logits: floating point [S, V].
        temperature: float32 [S]; at and below 1e-5, the most likely token.
        top_k: int32 [S]; 0 and below, or V and above: all tokens.
        top_p: float32 [S], between 0 and 1; 1: all tokens.
        keys: int64 [S], the key of each request.
        positions: int64 [S], the position of the token that is drawn.

    Returns:
        int64 [S].

    Raises:
        ValueError: a shape, dtype or device that does not fit; on the CPU also a negative or
            non-finite
            temperature, or a ``top_p`` outside 0 to 1.
    """
    device = logits.device
    require_tensor("logits", logits, (None, None), None, device)
    num_rows, vocab_size = logits.shape
    if not logits.is_floating_point() or vocab_size == 0:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; V floats a row are needed"
        )
    for name, value, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("keys", keys, torch.int64),
        ("positions", positions, torch.int64),
    ):
        require_tensor(name, value, (num_rows,), dtype, device)
    if device.type == "cpu":
        # Elsewhere a look at the values would wait for the device; the scheduler has checked them.
        _require_in_range(temperature, top_p)

    tokens = greedy(logits)
    is_random = (temperature > GREEDY_TEMPERATURE) & (top_k != 1)
    rows = is_random.nonzero().view(-1)
    if len(rows) == 0:
        return tokens
    # Subtracting the maximum before dividing keeps every quotient at or below 0.
    # In place, here and below: a fresh [S, V] costs more than what is computed in it.
    logits = logits[rows].float()
    logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(temperature[rows].unsqueeze(1))
    uniform = philox_uniform(keys[rows], positions[rows], 0, dtype=torch.float64)
    tokens[rows] = _draw(logits, top_k[rows], top_p[rows], uniform)
    return tokens


def _draw(logits: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """A token a row, in vocabulary order where nothing is cut, else in descending order.

    Args:
        logits: float32 [S, V], the largest of each row 0; overwritten.
        top_k: int32 [S].
        top_p: float32 [S].
        uniform: float64 [S], in (0, 1).
    """
    vocab_size = logits.shape[1]
    top_k = torch.where((top_k <= 0) | (top_k > vocab_size), vocab_size, top_k).long()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    is_cut = (top_k < vocab_size) | (top_p < 1)
    whole = (~is_cut).nonzero().view(-1)
    if len(whole):
        weights = logits.exp_() if len(whole) == len(logits) else logits[whole].exp_()
        tokens[whole] = _invert(weights.cumsum(dim=-1, dtype=torch.float64), uniform[whole])

    cut = is_cut.nonzero().view(-1)
    if len(cut):
        top_k, top_p, uniform = top_k[cut], top_p[cut], uniform[cut]
        if len(cut) < len(logits):
            logits = logits[cut]
        total = logits.exp().sum(dim=-1, dtype=torch.float64)
        few = min(NUM_CANDIDATES, vocab_size)
        values, ids = logits.topk(few, dim=-1)
        # Equal logits come in any order from topk: order them by id, as the sort below does.
        ids, by_id = ids.sort(dim=-1)
        values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, by_value)
        drawn, num_kept = _draw_ordered(values, ids, total, top_k, top_p, uniform)
        # Candidates decide only if what they keep ends above the last of them: else equals, or
        # more of the kept set, may lie beyond.
        last_kept = values.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
        beyond = (last_kept <= values[:, -1]).nonzero().view(-1)
        if len(beyond) and few < vocab_size:
            values, ids = logits[beyond].sort(dim=-1, descending=True, stable=True)
            drawn[beyond], _ = _draw_ordered(
                values, ids, total[beyond], top_k[beyond], top_p[beyond], uniform[beyond]
            )
        tokens[cut] = drawn
    return tokens


def _draw_ordered(
    values: Tensor, ids: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Cut rows in descending order and draw from what is left.

    Args:
        values: float32 [S, C], logits in descending order.
        ids: int64 [S, C], their tokens.
        total: float64 [S], the sum of ``exp`` over the row's whole vocabulary.
        top_k: int64 [S].
        top_p: float32 [S].
        uniform: float64 [S].

    Returns:
        int64 [S], the tokens drawn, and int64 [S], how many candidates were kept.
    """
    cumulative = values.exp().double().cumsum(dim=-1)
    num_candidates = values.shape[1]
    last_of_top_k = (top_k - 1).clamp(max=num_candidates - 1).unsqueeze(1)
    # The mass that top_p is a part of: all of the row, or where top_k cuts, what top_k keeps.
    mass = torch.where(
        top_k <= num_candidates, cumulative.gather(1, last_of_top_k).squeeze(1), total
    )
    # The first prefix that has the mass ends at the token that crosses it.
    num_before = (cumulative < (top_p.double() * mass).unsqueeze(1)).sum(dim=-1)
    num_kept = torch.where(top_p < 1, num_before + 1, num_candidates)
    num_kept = torch.minimum(num_kept, last_of_top_k.squeeze(1) + 1)
    kept_mass = cumulative.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    # A uniform number below 1 times the mass rounds to less than the mass: the index is a kept one.
    index = (cumulative <= (uniform * kept_mass).unsqueeze(1)).sum(dim=-1)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1), num_kept


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds ``uniform`` of the row's total."""
    last = cumulative.shape[1] - 1
    target = (uniform * cumulative[:, last]).unsqueeze(1)
    # The clamp matters for a row of NaN alone: whatever token it gives, it is one.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=last)


def _require_in_range(temperature: Tensor, top_p: Tensor) -> None:
    is_bad = ~((temperature >= 0) & (temperature < torch.inf))
    if is_bad.any():
        value = float(temperature[is_bad][0])
        raise ValueError(f"temperature={value} must be a finite number of at least 0")
    is_bad = ~((top_p >= 0) & (top_p <= 1))
    if is_bad.any():
        raise ValueError(f"top_p={float(top_p[is_bad][0])} must lie between 0 and 1")
