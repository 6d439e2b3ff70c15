"""Loading: every weight in its place (E1, E2, E7), none left out, none left uninitialised."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="writes the checkpoints")
gguf = pytest.importorskip("gguf", reason="writes the checkpoints")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="writes the checkpoints")

from pagetide_kernels import AttentionMetadata  # noqa: E402
from pagetide_kvcache import KVCache  # noqa: E402
from pagetide_models import CausalLM, ModelFormatError, load_model, open_model  # noqa: E402
from pagetide_models.weights import read_tensor, unpermute  # noqa: E402

LLAMA_8_2: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def random_llama(**changes: Any) -> Any:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**LLAMA_8_2, **changes})
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def logits_of(model: CausalLM, token_ids: list[int]) -> Any:
    cache = KVCache(model.kv_cache_spec, 16)
    metadata = AttentionMetadata.from_host(
        [len(token_ids)], [len(token_ids)], [list(range(16))], block_size=16, num_blocks=16
    )
    hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), cache, metadata)
    return model.compute_logits(hidden)


def reference_logits(model: Any, token_ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


IDS = [3, 69, 1, 20, 44, 5, 8, 13, 21, 34, 55]


def assert_same(folder: Path, reference: Any) -> None:
    torch.testing.assert_close(
        logits_of(load_model(folder), IDS), reference_logits(reference, IDS), atol=1e-4, rtol=1e-5
    )


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in safetensors_torch.load_file(path).items()}
    change(tensors)
    safetensors_torch.save_file(tensors, path)


class TestE1TiedHeads:
    """E1: the head is absent, present or its own; each gives the right logits or an error."""

    def test_tied_and_absent(self, tmp_path: Path) -> None:
        reference = random_llama(tie_word_embeddings=True)
        reference.save_pretrained(tmp_path)
        assert "lm_head.weight" not in safetensors_torch.load_file(tmp_path / "model.safetensors")
        model = load_model(tmp_path)
        assert model.config.tie_word_embeddings
        assert_same(tmp_path, reference)

    def test_tied_and_present(self, tmp_path: Path) -> None:
        reference = random_llama(tie_word_embeddings=True)
        reference.save_pretrained(tmp_path)

        def add_the_table_again(tensors: dict[str, Any]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        rewrite(tmp_path, add_the_table_again)
        assert load_model(tmp_path).config.tie_word_embeddings
        assert_same(tmp_path, reference)

    def test_called_tied_but_present_and_different(self, tmp_path: Path) -> None:
        random_llama(tie_word_embeddings=True).save_pretrained(tmp_path)

        def add_another(tensors: dict[str, Any]) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * -2.0

        rewrite(tmp_path, add_another)
        reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        assert not load_model(tmp_path).config.tie_word_embeddings
        assert_same(tmp_path, reference)

    def test_untied(self, tmp_path: Path) -> None:
        reference = random_llama(tie_word_embeddings=False)
        reference.save_pretrained(tmp_path)
        assert not load_model(tmp_path).config.tie_word_embeddings
        assert_same(tmp_path, reference)

    def test_untied_and_absent(self, tmp_path: Path) -> None:
        random_llama(tie_word_embeddings=False).save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
        with pytest.raises(ModelFormatError, match=r"missing tensor 'lm_head\.weight'"):
            load_model(tmp_path)


class TestE2NothingLeftOut:
    """E2: a tensor or shard less, a tensor more, and what would stay unset."""

    @pytest.fixture
    def sharded(self, tmp_path: Path) -> tuple[Path, Any]:
        reference = random_llama()
        reference.save_pretrained(tmp_path, max_shard_size="60KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        return tmp_path, reference

    def test_sharded(self, sharded: tuple[Path, Any]) -> None:
        assert_same(*sharded)

    def test_stray_files_are_ignored(self, sharded: tuple[Path, Any]) -> None:
        folder, reference = sharded
        safetensors_torch.save_file({"x": torch.ones(3)}, folder / "stray.safetensors")
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
        assert_same(folder, reference)

    def test_every_shard_is_needed(self, sharded: tuple[Path, Any]) -> None:
        folder, _ = sharded
        for shard in sorted(folder.glob("*.safetensors")):
            moved = shard.rename(folder / "elsewhere")
            with pytest.raises(ModelFormatError, match=shard.name):
                load_model(folder)
            moved.rename(shard)

    def test_every_tensor_is_needed(self, tmp_path: Path) -> None:
        random_llama().save_pretrained(tmp_path)
        for name in safetensors_torch.load_file(tmp_path / "model.safetensors"):
            taken: dict[str, Any] = {}
            rewrite(tmp_path, lambda t, n=name, k=taken: k.update({n: t.pop(n)}))  # type: ignore[misc]
            with pytest.raises(ModelFormatError, match=f"missing tensor '{name}'"):
                load_model(tmp_path)
            rewrite(tmp_path, lambda t, k=taken: t.update(k))  # type: ignore[misc]

    def test_an_unknown_tensor(self, tmp_path: Path) -> None:
        random_llama().save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.update({"model.extra": torch.ones(2)}))
        with pytest.raises(ModelFormatError, match=r"unknown tensor 'model\.extra'"):
            load_model(tmp_path)

    def test_rotary_buffers_of_old_files_are_ignored(self, tmp_path: Path) -> None:
        reference = random_llama()
        reference.save_pretrained(tmp_path)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
        assert_same(tmp_path, reference)

    def test_a_file_cut_after_it_was_opened(self, tmp_path: Path) -> None:
        random_llama().save_pretrained(tmp_path)
        source = open_model(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ModelFormatError, match=r"model\.safetensors.*cut short"):
            load_model(source)

    def test_a_layout_that_forgets_a_tensor(self, tmp_path: Path) -> None:
        random_llama().save_pretrained(tmp_path)
        source = open_model(tmp_path)
        whole = source.architecture.layout

        def forgetful(*arguments: Any) -> Any:
            layout = whole(*arguments)
            kept = tuple(w for w in layout.weights if not w.tensor.endswith("k_proj.weight"))
            return dataclasses.replace(layout, weights=kept)

        architecture = dataclasses.replace(source.architecture, layout=forgetful)
        with pytest.raises(ModelFormatError, match=r"layers\.0\.attention\.qkv\.weight"):
            load_model(dataclasses.replace(source, architecture=architecture))

    def test_parameters_are_nan_until_loaded(self, tmp_path: Path, monkeypatch: Any) -> None:
        random_llama().save_pretrained(tmp_path)
        monkeypatch.setattr("pagetide_models.loader.fill_parameters", lambda *_, **__: None)
        monkeypatch.setattr("pagetide_models.loader.pack_linears", lambda _: None)
        model = load_model(tmp_path)
        for name, parameter in model.named_parameters():
            rows = parameter[:70] if parameter.shape[0] == 128 and "e" in name else parameter
            assert rows.isnan().all(), name
        assert logits_of(model, IDS).isnan().all()

    def test_the_padding_of_the_vocabulary_is_zero_and_invisible(self, tmp_path: Path) -> None:
        random_llama(tie_word_embeddings=False).save_pretrained(tmp_path)
        model = load_model(tmp_path, dtype="bfloat16")  # not packed: the table can be looked at
        for table in (model.embedding.weight, model.head.weight):
            assert table.shape == (128, 64)
            assert not table[70:].any()
        assert logits_of(model, IDS).shape == (len(IDS), 70)


def write_gguf(path: Path, reference: Any, *, is_permuted: bool = True) -> None:
    """Write a transformers Llama as llama.cpp's converter does: q and k rows reordered by head."""
    config = reference.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens.": "token_embd.",
        "model.norm.": "output_norm.",
        "lm_head.": "output.",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for projection, count in heads.items():
            if projection in name and is_permuted:
                halves = value.reshape(count, 2, value.shape[0] // count // 2, -1)
                value = halves.swapaxes(1, 2).reshape(value.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestE7GGUFRotaryOrder:
    """E7: HF to GGUF to ours, 8 query and 2 kv heads of 16: every weight, and the tokens."""

    @pytest.mark.parametrize(
        "changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}]
    )
    def test_every_weight_comes_back(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        reference = random_llama(**changes)
        write_gguf(tmp_path / "model.gguf", reference)
        reference.save_pretrained(tmp_path / "folder")
        arguments = {"dtype": "float16"}  # not packed: parameters can be compared by name
        ours = load_model(tmp_path / "model.gguf", **arguments).state_dict()
        folder = load_model(tmp_path / "folder", **arguments).state_dict()
        assert ours.keys() == folder.keys()
        for name, value in ours.items():
            assert torch.equal(value, folder[name]), name

    def test_greedy_tokens_are_those_of_transformers(self, tmp_path: Path) -> None:
        reference = random_llama()
        write_gguf(tmp_path / "model.gguf", reference)
        model = load_model(tmp_path / "model.gguf")
        cache = KVCache(model.kv_cache_spec, 8)
        prompt, ours = IDS, []
        start = 0
        for _ in range(64):
            end = start + len(prompt)
            metadata = AttentionMetadata.from_host(
                [len(prompt)], [end], [list(range(8))], block_size=16, num_blocks=8
            )
            hidden = model(torch.tensor(prompt), torch.arange(start, end), cache, metadata)
            start, prompt = end, [int(model.compute_logits(hidden[-1:]).argmax())]
            ours += prompt
        expected = reference.generate(
            torch.tensor([IDS]), max_new_tokens=64, min_new_tokens=64, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert ours == expected[0, len(IDS) :].tolist()

    def test_leaving_the_order_alone_would_show(self, tmp_path: Path) -> None:
        reference = random_llama()
        write_gguf(tmp_path / "model.gguf", reference, is_permuted=False)
        wrong = logits_of(load_model(tmp_path / "model.gguf"), IDS)
        assert float((wrong - reference_logits(reference, IDS)).abs().max()) > 0.1

    def test_unpermute_undoes_the_conversion_whatever_the_head_size(self) -> None:
        for heads, size in [(1, 2), (2, 4), (8, 16), (3, 40), (9, 64)]:
            original = torch.arange(heads * size * 3.0).view(heads * size, 3)
            permuted = original.view(heads, 2, size // 2, 3).swapaxes(1, 2).reshape(-1, 3)
            assert torch.equal(unpermute(permuted, heads), original)
            assert torch.equal(unpermute(permuted[:, 0], heads), original[:, 0])


@pytest.mark.parametrize(
    "encoding",
    ["F64", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
     "Q5_K", "Q6_K"],
)  # fmt: skip
def test_every_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    from gguf.quants import dequantize

    from pagetide_models.gguf import read_gguf_header
    from pagetide_models.tensors import ENCODINGS

    kind = gguf.GGMLQuantizationType[encoding]
    block = ENCODINGS[encoding]
    assert (block.block_elements, block.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 6, 768
    generator = torch.Generator().manual_seed(1)
    if encoding in ("F64", "F32", "F16"):
        dtype = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}[encoding]
        data = torch.randn(rows, columns, generator=generator).to(dtype).numpy()
        expected = torch.from_numpy(data).float()
    else:  # any bytes are quantised values; keep the scales' exponents small
        count = block.num_bytes(rows * columns)
        data = torch.randint(0, 60, (count,), generator=generator, dtype=torch.uint8).numpy()
        data = data.reshape(rows, -1)
        expected = torch.from_numpy(dequantize(data, kind))
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read_gguf_header(tmp_path / "one.gguf").tensors["w"]
    assert info.shape == (rows, columns)
    values = read_tensor(info)
    assert values.shape == (rows, columns)
    torch.testing.assert_close(values.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_checkpoint_dtypes(tmp_path: Path, stored: str) -> None:
    reference = random_llama().to(getattr(torch, stored))
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.config.dtype == stored
    assert model.dtype == torch.float32  # auto on the CPU
    # Not reference.float(): its rotary frequencies were rounded with the rest (B18).
    oracle = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(tmp_path, oracle)


def test_weights_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    random_llama().save_pretrained(tmp_path)

    def enlarge(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70_000.0

    rewrite(tmp_path, enlarge)
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.up_proj\.weight.*70000"):
        load_model(tmp_path, dtype="float16")
    load_model(tmp_path, dtype="bfloat16")


def test_loading_leaves_no_second_copy(tmp_path: Path) -> None:
    random_llama(hidden_size=512, intermediate_size=1024, vocab_size=1000).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    # Packed linears and the CPU's norms hold no parameter: what is left is the embedding.
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]


def test_progress_is_silent_in_a_pipe(tmp_path: Path, capfd: Any) -> None:
    random_llama().save_pretrained(tmp_path)
    capfd.readouterr()  # transformers draws a bar of its own
    load_model(tmp_path, progress=True)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_registered_architecture_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    from pagetide_models import register_model, registered_models, registry
    from pagetide_models.registry import find_architecture

    monkeypatch.setattr(registry, "_registered", {})
    mine = dataclasses.replace(find_architecture("llama", "here"), name="mine")
    register_model(mine)
    assert "mine" in registered_models()
    with pytest.raises(ValueError, match="registered already"):
        register_model(mine)
    register_model(mine, replace=True)
    with pytest.raises(ValueError, match="'llama' is registered already"):
        register_model(dataclasses.replace(mine, name="llama"))
    reference = random_llama()
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
    assert_same(tmp_path, reference)
