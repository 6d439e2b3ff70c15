"""What an INT8 KV cache costs SmolLM2: perplexity and next tokens on a fixed text.

The text is a snapshot of this project's documentation, which the model has not seen: its choices
are close there (perplexity 34), and rounding keys and values turns about one in fifty of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_models import load_model, open_model  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.long]
NUM_TOKENS = 2049
TEXT = Path(__file__).parent / "data" / "fixed_text.md"


@pytest.fixture(scope="module")
def judged(demo_gguf: Path, run_paged: Callable[..., Any]) -> Callable[[str], tuple[float, Any]]:
    """Perplexity and most likely tokens with a KV dtype, decoded in chunks that read it back."""
    tokenizer = open_model(demo_gguf).load_tokenizer()
    known: dict[str, tuple[float, Any]] = {}

    def judge(kv_dtype: str) -> tuple[float, Any]:
        if kv_dtype not in known:
            token_ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
            assert len(token_ids) == NUM_TOKENS
            model = load_model(demo_gguf, kv_dtype=kv_dtype)
            hidden = run_paged(model, token_ids[:-1], [256] * 8)
            targets = torch.tensor(token_ids[1:])
            losses, likely = [], []
            for rows, wanted in zip(hidden.split(256), targets.split(256), strict=True):
                logits = model.compute_logits(rows)
                losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
                likely.append(logits.argmax(-1))
            known[kv_dtype] = float(torch.cat(losses).mean().exp()), torch.cat(likely)
        return known[kv_dtype]

    return judge


@pytest.mark.parametrize(
    ("kv_dtype", "perplexity_bound", "agreement_bound"),
    [("int8", 0.005, 0.975), ("int8-block", 0.03, 0.95)],
)
def test_perplexity_and_next_tokens(
    judged: Callable[[str], tuple[float, Any]],
    kv_dtype: str,
    perplexity_bound: float,
    agreement_bound: float,
) -> None:
    expected, tokens = judged("float16")
    actual, others = judged(kv_dtype)
    agreement = float((tokens == others).float().mean())
    print(
        f"{kv_dtype}: perplexity {actual:.4f} (fp16 {expected:.4f}), "
        f"same most likely token at {agreement:.2%}"
    )
    assert abs(actual / expected - 1) <= perplexity_bound
    assert agreement >= agreement_bound
