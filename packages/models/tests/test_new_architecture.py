"""The architectures that README and documentation add are complete, and equal transformers'."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")

from pagetide_models import load_model, registered_models, registry  # noqa: E402
from pagetide_models.parity import ParityOptions, run_parity  # noqa: E402

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[3] / "docs" / "design" / "adding-an-architecture.md"
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


def program(path: Path, pattern: str) -> str:
    if not path.exists():
        pytest.skip(f"{path.name} is not part of a source distribution")
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return "\n\n".join(block for block in blocks if re.search(pattern, block))


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def assert_parity(folder: Path, run_paged: Callable[..., Any], name: str, **changes: Any) -> None:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **changes})
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in reference.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    reference.save_pretrained(folder)
    model = load_model(folder, block_size=4)
    token_ids = list(range(3, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    for chunks in ([37], [20, 15, 1, 1]):
        logits = model.compute_logits(run_paged(model, token_ids, chunks))
        assert float((logits - expected).abs().max()) < 2e-5 * max(float(expected.abs().max()), 1)
    assert run_parity(str(folder), ParityOptions(num_tokens=12)).verdict == "equal"


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 5}, {"use_bias": False}, {"tie_word_embeddings": False}],
    ids=["plain", "window", "no bias", "untied"],
)
def test_the_documentations_starcoder2(
    tmp_path: Path, run_paged: Callable[..., Any], changes: dict[str, Any]
) -> None:
    source = program(PAGE, "def |register_model")
    assert len(source.splitlines()) < 100
    exec(compile(source, str(PAGE), "exec"), {})
    assert "starcoder2" in registered_models()
    assert_parity(tmp_path, run_paged, "starcoder2", **changes)


@pytest.mark.parametrize(
    "changes",
    [{"head_dim": 16}, {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}],
    ids=["plain", "every bias"],
)
def test_the_readmes_seed_oss(
    tmp_path: Path, run_paged: Callable[..., Any], changes: dict[str, Any]
) -> None:
    exec(compile(program(README, "register_model"), str(README), "exec"), {})
    assert_parity(tmp_path, run_paged, "seed_oss", **changes)
