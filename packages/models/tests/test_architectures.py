"""Every architecture at reduced size and odd shapes: transformers' logits in fp32, chunked or not.

Random models are saved by transformers and loaded by the real loader; test_llama_parity has Llama's
own cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="changes the checkpoints")

from pagetide_models import (  # noqa: E402
    ModelFormatError,
    UnsupportedModelError,
    load_model,
    open_model,
    registered_models,
)

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
TINY_GPT2: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
RATIO_7 = {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 40}
RATIO_3 = {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 96}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, head_dim 40": ("gpt2", {"n_embd": 120, "n_head": 3}),
    "gpt2, head_dim 96": ("gpt2", {"n_embd": 96, "n_head": 1}),
    "gpt2, own inner size": ("gpt2", {"n_inner": 52}),
    "gpt2, square inner size": ("gpt2", {"n_inner": 48}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2, epsilon": ("gpt2", {"layer_norm_epsilon": 0.1}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, ratio 7, head_dim 40": ("qwen2", RATIO_7),
    "qwen2, ratio 3, head_dim 96": ("qwen2", RATIO_3),
    "qwen2, window of the later layers": ("qwen2", WINDOW),
    "qwen2, window of the layers named": (
        "qwen2",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2, window switched off": ("qwen2", {**WINDOW, "use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied, bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, ratio 7, head_dim 40": ("qwen3", RATIO_7),
    "qwen3, ratio 3, head_dim 96": ("qwen3", RATIO_3),
    "qwen3, window of the later layers": ("qwen3", WINDOW),
    "mistral, window 4": ("mistral", {"sliding_window": 4}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mistral, ratio 7, head_dim 40": ("mistral", {**RATIO_7, "sliding_window": 4}),
    "mistral, tied, ratio 3, head_dim 96": (
        "mistral",
        {**RATIO_3, "tie_word_embeddings": True, "sliding_window": 5},
    ),
    **{
        f"{name}, {kind}": (name, {"rope_parameters": {"rope_theta": 500.0, **rule}})
        for name in ("qwen2", "qwen3", "mistral")
        for kind, rule in ROPE.items()
    },
}


def random_model(name: str, **changes: Any) -> Any:
    tiny = TINY_GPT2 if name == "gpt2" else TINY
    if name == "qwen2":  # it has no head_dim of its own unless one is given
        tiny = {key: value for key, value in tiny.items() if key != "head_dim"}
    config = transformers.AutoConfig.for_model(name, **{**tiny, **changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones and biases as zeros: tell them apart
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def assert_parity(folder: Path, reference: Any, run_paged: Callable[..., Any]) -> None:
    model = load_model(folder, block_size=4)
    token_ids = torch.randint(
        0, model.config.vocab_size, (45,), generator=torch.Generator().manual_seed(2)
    )
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    bound = 2e-5 * max(float(expected.abs().max()), 1.0)
    for chunks in ([45], [1] * 45, [7, 1, 16, 20, 1]):
        logits = model.compute_logits(run_paged(model, token_ids.tolist(), chunks))
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) < bound


def test_the_five_are_registered() -> None:
    assert {"gpt2", "llama", "mistral", "qwen2", "qwen3"} <= set(registered_models())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(
    tmp_path: Path, run_paged: Callable[..., Any], case: str
) -> None:
    name, changes = CASES[case]
    reference = random_model(name, **changes)
    reference.save_pretrained(tmp_path)
    assert open_model(tmp_path).config.architecture == name
    assert_parity(tmp_path, reference, run_paged)


def test_windows_are_where_transformers_has_them(tmp_path: Path) -> None:
    random_model("qwen2", **WINDOW).save_pretrained(tmp_path)
    assert open_model(tmp_path).config.layer_windows == (None, 4, 4)
    random_model("qwen2", **{**WINDOW, "use_sliding_window": False}).save_pretrained(tmp_path)
    assert open_model(tmp_path).config.layer_windows == ()


@pytest.mark.parametrize(("written", "windows"), [(..., (None, 4096, 4096)), (None, ())])
def test_qwens_window_absent_or_null(tmp_path: Path, written: Any, windows: Any) -> None:
    random_model("qwen3", **WINDOW).save_pretrained(tmp_path)
    edit_config(tmp_path, sliding_window=written, layer_types=...)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert open_model(tmp_path).config.layer_windows == windows
    assert [theirs.sliding_window if kind == "sliding_attention" else None
            for kind in theirs.layer_types] == list(windows or (None, None, None))  # fmt: skip


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not ...:
            config[key] = value
    path.write_text(json.dumps(config))


def test_an_old_qwen2_file_names_no_layer_types(
    tmp_path: Path, run_paged: Callable[..., Any]
) -> None:
    reference = random_model("qwen2", **WINDOW)
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=...)
    assert_parity(tmp_path, reference, run_paged)


@pytest.mark.parametrize(("written", "window"), [(..., 4096), (None, None), (7, 7)])
def test_mistrals_window_by_what_is_written(tmp_path: Path, written: Any, window: Any) -> None:
    random_model("mistral").save_pretrained(tmp_path)
    edit_config(tmp_path, sliding_window=written)
    ours = open_model(tmp_path).config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.window(0) == window == theirs.sliding_window


class TestGPT2:
    """E5 and E10: how GPT-2 checkpoints differ, and where its context ends."""

    def rename(self, folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        path = folder / "model.safetensors"
        tensors = {name: value.clone() for name, value in safetensors_torch.load_file(path).items()}
        safetensors_torch.save_file(change(tensors), path)

    @pytest.mark.parametrize("prefix", ["", "transformer."])
    def test_both_prefixes_and_old_buffers(
        self, tmp_path: Path, run_paged: Callable[..., Any], prefix: str
    ) -> None:
        reference = random_model("gpt2")
        reference.save_pretrained(tmp_path)

        def rewrite(tensors: dict[str, Any]) -> dict[str, Any]:
            renamed = {prefix + key.removeprefix("transformer."): v for key, v in tensors.items()}
            for index in range(2):
                mask = torch.ones(1, 1, 50, 50).tril()
                renamed[f"{prefix}h.{index}.attn.bias"] = mask.bool() if index else mask
                renamed[f"{prefix}h.{index}.attn.masked_bias"] = torch.tensor(-1e4)
            renamed["lm_head.weight"] = renamed[f"{prefix}wte.weight"].clone()
            return renamed

        self.rename(tmp_path, rewrite)
        assert_parity(tmp_path, reference, run_paged)

    def test_an_unknown_buffer_is_still_refused(self, tmp_path: Path) -> None:
        random_model("gpt2").save_pretrained(tmp_path)
        self.rename(tmp_path, lambda t: {**t, "transformer.h.0.attn.other": torch.ones(1)})
        with pytest.raises(ModelFormatError, match=r"unknown tensor 'transformer\.h\.0\.attn\.oth"):
            open_model(tmp_path)

    def test_a_transposed_weight_has_the_wrong_shape(self, tmp_path: Path) -> None:
        random_model("gpt2").save_pretrained(tmp_path)
        name = "transformer.h.1.mlp.c_fc.weight"
        self.rename(tmp_path, lambda t: {**t, name: t[name].t().contiguous()})
        with pytest.raises(ModelFormatError, match=r"h\.1\.mlp\.c_fc\.weight.*\[192, 48\]"):
            open_model(tmp_path)

    def test_the_context_is_a_hard_limit(
        self, tmp_path: Path, run_paged: Callable[..., Any]
    ) -> None:
        reference = random_model("gpt2")
        reference.save_pretrained(tmp_path)
        model = load_model(tmp_path, block_size=4)
        ids = [5] * 50
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0, -1]
        hidden = run_paged(model, ids, [49, 1])
        torch.testing.assert_close(
            model.compute_logits(hidden[-1:])[0], expected, atol=1e-4, rtol=1e-5
        )
        # 50 positions: a table padded to 64 rows would have read zeros here.
        with pytest.raises(ValueError, match="51 tokens is beyond the model's context of 50"):
            run_paged(model, [5] * 51, [50, 1])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"activation_function": "relu"}, "GELU"),
            ({"scale_attn_weights": False}, "scale_attn_weights"),
            ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
            ({"add_cross_attention": True}, "add_cross_attention"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ],
    )
    def test_what_is_not_supported_is_said(
        self, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        random_model("gpt2").save_pretrained(tmp_path)
        edit_config(tmp_path, **change)
        with pytest.raises(UnsupportedModelError, match=words):
            open_model(tmp_path)


def test_positions_beyond_a_rotary_context_are_refused_too(
    tmp_path: Path, run_paged: Callable[..., Any]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    random_model("mistral", rope_parameters=rope).save_pretrained(tmp_path)
    model = load_model(tmp_path, block_size=4)
    run_paged(model, [5] * 96, [96])
    with pytest.raises(ValueError, match="97 tokens is beyond the model's context of 96"):
        run_paged(model, [5] * 97, [97])
