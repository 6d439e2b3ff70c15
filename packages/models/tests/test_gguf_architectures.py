"""GGUF files of every architecture, in every encoding, against transformers with the same weights.

The files are written as llama.cpp's converter writes them: llama's q and k rows reordered by head,
the others' not; GPT-2's weights turned round from Conv1D.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")
gguf = pytest.importorskip("gguf", reason="writes the files")

from pagetide_models import UnsupportedModelError, load_model, open_model  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 8,
    "n_inner": 512,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
DECODER_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "transformer.wte.": "token_embd.",
    "transformer.wpe.": "position_embd.",
    "transformer.ln_f.": "output_norm.",
    "lm_head.": "output.",
    "transformer.h.": "blk.",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
# Where a block's half-precision scales lie, for the encodings that gguf reads but does not write.
SCALE_BYTES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ENCODINGS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SCALE_BYTES]


def random_model(name: str, **changes: Any) -> Any:
    sizes = GPT2_SIZES if name == "gpt2" else SIZES
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def encode(values: Any, encoding: str) -> Any:
    """A matrix's stored form; for K-quants random blocks, their scales set to a usual size."""
    kind = gguf.GGMLQuantizationType[encoding]
    if encoding not in SCALE_BYTES:
        return gguf.quants.quantize(values, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(values.size)
    count = values.size // elements
    blocks = torch.randint(0, 256, (count, size), generator=generator, dtype=torch.uint8).numpy()

    def set_scale(scale: float) -> Any:
        for byte in SCALE_BYTES[encoding]:
            blocks[:, byte : byte + 2] = (
                torch.tensor([scale], dtype=torch.float16).view(torch.uint8).numpy()
            )
        return gguf.quants.dequantize(blocks, kind)

    set_scale(float(0.1 / set_scale(1.0).std()))
    return blocks.reshape(values.shape[0], -1)


def permute(value: Any, heads: int) -> Any:
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(value.shape)


def inverse_permute(value: Any, heads: int) -> Any:
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(value.shape)


def write(path: Path, name: str, model: Any, encoding: str = "F32", **keys: Any) -> None:
    """Write the model, and give it the values that the file holds."""
    config, is_gpt2 = model.config, name == "gpt2"
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if is_gpt2:
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")  # transformers takes the vocabulary's size from the tokens
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    if keys.get("window"):
        writer.add_sliding_window(keys["window"])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if (
        name == "llama"
    ) else {}  # fmt: skip
    kind = gguf.GGMLQuantizationType[encoding]
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings and not keys.get("with_head"):
            continue
        values = parameter.detach().clone().numpy()
        count = next((count for stem, count in heads.items() if stem in key), 0)
        is_conv1d = is_gpt2 and any(part in key for part in (".c_attn.w", ".c_proj.w", ".c_fc.w"))
        values = permute(values, count) if count else values
        values = values.T.copy() if is_conv1d else values
        stored = key
        for old, new in (GPT2_NAMES if is_gpt2 else DECODER_NAMES).items():
            stored = stored.replace(old, new)
        if values.ndim == 1 or encoding == "F32":
            writer.add_tensor(stored, values)
            continue
        data = encode(values, encoding)
        writer.add_tensor(stored, data, raw_dtype=kind)
        values = gguf.quants.dequantize(data, kind).reshape(values.shape)
        values = values.T if is_conv1d else values
        values = inverse_permute(values, count) if count else values
        parameter.copy_(torch.from_numpy(values.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_parity(path: Path, reference: Any, run_paged: Callable[..., Any]) -> None:
    token_ids = [3, 66, 1, 20, 44, 5, 8, 13, 21, 34, 55]
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    model = load_model(path, block_size=4)
    actual = model.compute_logits(run_paged(model, token_ids, [6, 5]))
    assert float((actual - expected).abs().max()) < 3e-5 * max(float(expected.abs().max()), 1.0)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_architecture_in_every_encoding(
    tmp_path: Path, run_paged: Callable[..., Any], name: str, encoding: str
) -> None:
    path = tmp_path / "model.gguf"
    with torch.no_grad():
        reference = random_model(name, tie_word_embeddings=False)
        write(path, name, reference, encoding)
    assert_parity(path, reference, run_paged)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_every_weight_is_the_folders(tmp_path: Path, name: str) -> None:
    reference = random_model(name, tie_word_embeddings=True)
    reference.save_pretrained(tmp_path / "folder")
    write(tmp_path / "model.gguf", name, reference)
    # Not float32: packed linears have no parameters to compare by name.
    folder = load_model(tmp_path / "folder", dtype="bfloat16").state_dict()
    ours = load_model(tmp_path / "model.gguf", dtype="bfloat16").state_dict()
    assert ours.keys() == folder.keys()
    for key, value in ours.items():
        assert torch.equal(value, folder[key]), key


def test_gpt2_files_that_hold_the_table_twice(
    tmp_path: Path, run_paged: Callable[..., Any]
) -> None:
    reference = random_model("gpt2")
    write(tmp_path / "model.gguf", "gpt2", reference, with_head=True)
    assert not open_model(tmp_path / "model.gguf").config.tie_word_embeddings
    assert_parity(tmp_path / "model.gguf", reference, run_paged)


def test_a_llama_file_with_a_sliding_window_is_mistral(
    tmp_path: Path, run_paged: Callable[..., Any]
) -> None:
    reference = random_model("mistral", sliding_window=4)
    write(tmp_path / "model.gguf", "llama", reference, window=4)
    assert open_model(tmp_path / "model.gguf").config.layer_windows == (4, 4)
    assert_parity(tmp_path / "model.gguf", reference, run_paged)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "qwen2", random_model("qwen2"), window=64)
    assert open_model(tmp_path / "model.gguf").config.layer_windows == ()


def test_there_is_no_mistral_gguf(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "mistral", random_model("mistral"))
    with pytest.raises(UnsupportedModelError, match="mistral"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2"])
def test_transformers_reads_the_same_from_the_file(
    tmp_path: Path, run_paged: Callable[..., Any], name: str
) -> None:
    """The second opinion on the writer above: transformers' own GGUF reader."""
    path = tmp_path / "model.gguf"
    # Its reader takes some sizes for granted.
    fixed = {"gpt2": {"n_inner": 1024, "n_positions": 1024}, "qwen3": {"head_dim": 128}}
    changes: dict[str, Any] = fixed.get(name, {})
    with torch.no_grad():
        write(path, name, random_model(name, tie_word_embeddings=False, **changes), "Q8_0")
    token_ids = [3, 66, 1, 20, 44]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0]
    model = load_model(path, block_size=4)
    actual = model.compute_logits(run_paged(model, token_ids, [3, 2]))
    assert float((actual - expected).abs().max()) < 3e-5 * float(expected.abs().max())
