"""Random numbers with known answers, and tokens drawn as their row alone demands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pagetide_kernels as pk
from pagetide_kernels.philox import philox4x32

KNOWN = [  # Random123's known-answer vectors for philox4x32-10: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter: Any, key: Any, expected: Any) -> None:
    words = philox4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key)
    )
    assert tuple(int(word) for word in words) == expected


def test_uniform_is_the_top_of_the_words_of_key_position_and_draw() -> None:
    """The 64-bit key and position as low and high words, in every bit, negative int64 included."""
    counter, key, expected = KNOWN[2]
    signed = (key[0] | key[1] << 32) - (1 << 64 if key[1] >> 31 else 0)
    position = (counter[0] | counter[1] << 32) - (1 << 64 if counter[1] >> 31 else 0)
    draw = counter[2] | counter[3] << 32
    keys, positions = torch.tensor([signed]), torch.tensor([position])
    assert pk.philox_uniform(keys, positions, draw).item() == ((expected[0] >> 9) + 0.5) / 2**23
    wide = pk.philox_uniform(keys, positions, draw, dtype=torch.float64).item()
    assert wide == ((expected[0] << 20 | expected[1] >> 12) + 0.5) / 2**52


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform_and_open(dtype: torch.dtype) -> None:
    count = 1_000_000
    u = pk.philox_uniform(torch.full((count,), 7), torch.arange(count), 0, dtype=dtype)
    assert u.dtype == dtype
    assert u.min() > 0
    assert u.max() < 1
    expected = count / 100
    counts = torch.histc(u.double(), 100, 0, 1)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 99 + 5 * math.sqrt(2 * 99)
    other = pk.philox_uniform(torch.full((count,), 8), torch.arange(count), 0, dtype=dtype)
    assert abs(torch.corrcoef(torch.stack([u, other]))[0, 1].item()) < 0.005


def test_uniform_refuses() -> None:
    keys = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="keys has dtype"):
        pk.philox_uniform(keys.int(), keys, 0)
    with pytest.raises(ValueError, match="draw=-1"):
        pk.philox_uniform(keys, keys, -1)
    with pytest.raises(ValueError, match="dtype="):
        pk.philox_uniform(keys, keys, 0, dtype=torch.float16)


def draw(
    logits: torch.Tensor,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    *,
    keys: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sample`` with a parameter a call or a row; by default the key is the row's number."""
    rows = len(logits)

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return pk.sample(
        logits,
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        keys=torch.arange(rows) if keys is None else keys,
        positions=torch.full((rows,), 5) if positions is None else positions,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(dtype: torch.dtype, temperature: float) -> None:
    """11.06 / 1e-5 overflows a half: no NaN, no other token (D1)."""
    logits = torch.linspace(-11.06, 11.06, 1000).repeat(64, 1)[:, torch.randperm(1000)].to(dtype)
    logits[:, 17] = 12.5
    assert (draw(logits, temperature) == 17).all()


def test_tiny_top_p_is_the_top_token() -> None:
    logits = torch.randn(64, 1000)
    for top_p in (0.0, 1e-30, 1e-4):
        assert torch.equal(draw(logits, top_p=top_p), logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", [3, 300, 2000])
def test_top_k_1_and_temperature_0_agree_and_take_the_lowest_of_equals(vocab_size: int) -> None:
    """Ties (D8): [5, 5, 1] gives token 0 either way, wherever the tie stands."""
    logits = torch.full((32, vocab_size), 5.0)
    logits[:, 2] = 1.0
    for first in (0, 1, vocab_size - 2 if vocab_size > 3 else 1):
        logits[:, :first] = -1.0
        for parameters in ({"top_k": 1}, {"temperature": 0.0}, {"top_p": 1e-6}, {"top_p": 0.0}):
            assert (draw(logits, **parameters) == first).all(), (first, parameters)
    assert (pk.greedy(logits) == first).all()


CUTS = [
    (1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (1.3, 12, 0.9), (1.0, 400, 1.0),
    (2.0, 300, 0.95), (1.0, -1, 0.5), (1.0, 10**6, 0.999), (1.0, 256, 1.0), (1.0, 255, 1.0),
]  # fmt: skip


def exact_probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """By the definition, in float64, over the whole sorted vocabulary."""
    p = torch.softmax(logits.double() / temperature, dim=-1)
    order = torch.sort(logits, descending=True, stable=True).indices
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = p[order].cumsum(0) - p[order]
        p[order[before >= float(torch.tensor(top_p))]] = 0
        p /= p.sum()
    return p


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CUTS)
@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_draws_follow_the_distribution(
    temperature: float, top_k: int, top_p: float, vocab_size: int
) -> None:
    """A chi-square over many draws, and not one draw outside the kept set (D4)."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, generator=generator) * 2
    logits[3] = -26.0  # probability about 2e-13
    expected = exact_probabilities(logits, temperature, top_k, top_p)
    count, rows = 100_000, 2000
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for first in range(0, count, rows):
        tokens = draw(
            logits.expand(rows, -1), temperature, top_k, top_p,
            keys=torch.full((rows,), 99), positions=torch.arange(first, first + rows),
        )  # fmt: skip
        counts += torch.bincount(tokens, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    check_chi_square(counts, expected)


def test_a_million_draws() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -27.0, 0.5, -3.0, -3.0])
    count, rows = 1_000_000, 100_000
    for parameters in ({}, {"top_p": 0.97}, {"top_k": 6}):
        counts = torch.zeros(8, dtype=torch.int64)
        for first in range(0, count, rows):
            tokens = draw(
                logits.expand(rows, -1), **parameters,
                keys=torch.full((rows,), 3), positions=torch.arange(first, first + rows),
            )  # fmt: skip
            counts += torch.bincount(tokens, minlength=8)
        expected = exact_probabilities(
            logits, 1.0, parameters.get("top_k", 0), parameters.get("top_p", 1.0)
        )
        assert counts[expected < 1e-9].sum() == 0
        check_chi_square(counts, expected)


def check_chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    expected = probabilities * counts.sum()
    is_common = expected >= 10
    counts = torch.cat([counts[is_common], counts[~is_common].sum()[None]]).double()
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    is_possible = expected > 0
    statistic = ((counts - expected) ** 2 / expected)[is_possible].sum().item()
    freedom = int(is_possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(1, freedom)), (statistic, freedom)


def test_a_row_does_not_know_its_neighbours() -> None:
    """16 rows of different parameters in 50 orders, alone, and beside others (C12, D6)."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab_size = 16, 1000
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    temperature = torch.tensor([0.0, 0.5, 1.0, 3.0] * 4)
    top_k = torch.tensor([0, 1, 7, 500] * 2 + [0, 256, 1000, 2] * 2)
    top_p = torch.tensor([1.0] * 6 + [0.5, 0.9, 0.99, 1e-4] * 2 + [0.3, 1.0])
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.arange(rows) * 7

    def draw_rows(order: torch.Tensor) -> torch.Tensor:
        return draw(
            logits[order], temperature[order], top_k[order], top_p[order],
            keys=keys[order], positions=positions[order],
        )  # fmt: skip

    expected = draw_rows(torch.arange(rows))
    for _ in range(50):
        size = int(torch.randint(1, rows + 1, (), generator=generator))
        order = torch.randperm(rows, generator=generator)[:size]
        assert torch.equal(draw_rows(order), expected[order])
    for row in range(rows):
        assert draw_rows(torch.tensor([row])) == expected[row]


def test_draws_change_with_key_and_position_and_with_nothing_else() -> None:
    logits = torch.zeros(1, 1000).expand(200, -1)
    by_position = draw(logits, keys=torch.zeros(200).long(), positions=torch.arange(200))
    by_key = draw(logits, keys=torch.arange(200), positions=torch.zeros(200).long())
    assert len(set(by_position.tolist())) > 150
    assert len(set(by_key.tolist())) > 150
    again = draw(logits, keys=torch.zeros(200).long(), positions=torch.arange(200))
    assert torch.equal(by_position, again)


def test_ties_at_the_edge_of_the_kept_set_keep_the_lower_ids() -> None:
    """All equal: top_k = k keeps tokens 0..k-1, whatever order topk returns equals in."""
    logits = torch.zeros(5000, 600)
    for top_k in (2, 100, 300):
        tokens = draw(logits, top_k=top_k)
        assert tokens.max() == top_k - 1
        assert tokens.min() == 0
    tokens = draw(logits, top_p=0.5)
    assert tokens.max() == 299


def test_masked_tokens_are_never_drawn() -> None:
    """Tokens at -inf (a grammar's mask) have no probability, even if only they fill top_k."""
    logits = torch.full((500, 700), -torch.inf)
    logits[:, [5, 600]] = torch.tensor([1.0, 2.0])
    for parameters in ({}, {"top_k": 50}, {"top_k": 400}, {"top_p": 0.999}, {"temperature": 9.0}):
        assert set(draw(logits, **parameters).tolist()) == {5, 600}, parameters


def test_a_row_of_nan_still_gives_a_token() -> None:
    logits = torch.full((3, 500), torch.nan)
    logits[1] = 0
    logits[1, 4] = 90
    for parameters in ({}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.0}):
        tokens = draw(logits, **parameters)
        assert ((tokens >= 0) & (tokens < 500)).all()
        assert tokens[1] == 4


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -0.1}, "temperature="),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": -0.1}, "top_p="),
        ({"top_p": 1.1}, "top_p="),
        ({"top_p": math.nan}, "top_p=nan"),
    ],
)
def test_values_out_of_range_are_refused(parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(torch.zeros(2, 10), **parameters)


def test_a_fractional_top_k_is_refused() -> None:
    """top_k = 0.4 truncated to 0 means "off"; rounded, a zero-sum distribution (D3)."""
    ones = torch.ones(2)
    good = {
        "temperature": ones, "top_k": torch.ones(2, dtype=torch.int32), "top_p": ones,
        "keys": torch.zeros(2, dtype=torch.int64), "positions": torch.zeros(2, dtype=torch.int64),
    }  # fmt: skip
    pk.sample(torch.zeros(2, 10), **good)
    for name, value in (
        ("top_k", ones * 0.4), ("temperature", ones.double()), ("top_p", torch.ones(3)),
        ("keys", torch.zeros(2).int()), ("positions", torch.zeros(2)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} has"):
            pk.sample(torch.zeros(2, 10), **(good | {name: value}))
    with pytest.raises(ValueError, match="logits are"):
        pk.sample(torch.zeros(2, 0), **good)


def test_no_rows() -> None:
    assert draw(torch.zeros(0, 10)).shape == (0,)
