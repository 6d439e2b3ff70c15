"""The parity tool: it passes what is right, and names the right place of what is wrong.

Wrong are weights of a checkpoint, one after another, and then the engine's own sources: copies of
them are broken and run in a process of their own, against transformers' saved answers.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="changes the checkpoints")

from pagetide_models import ModelError  # noqa: E402
from pagetide_models.__main__ import main  # noqa: E402
from pagetide_models.parity import (  # noqa: E402
    ParityOptions,
    Report,
    compare_traces,
    run_parity,
    trace_model,
)
from pagetide_models.parity.compare import compare_logits  # noqa: E402
from pagetide_models.parity.trace import point_order  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 301,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": {
        "vocab_size": 301,
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
SIZES["mistral"] = {**SIZES["llama"], "sliding_window": 6}
SIZES["qwen3"] = {**SIZES["llama"], "head_dim": 16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A random model's folder, and the file with transformers' answers to 32 random tokens."""
    torch.set_num_threads(1)
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(name, **SIZES[name])
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                mean, std = (1.0, 0.3) if parameter.dim() == 1 else (0.0, 0.15)
                torch.nn.init.normal_(parameter, mean, std)
            model.save_pretrained(folder)
            answers = folder / "answers.safetensors"
            report = run_parity(str(folder), ParityOptions(save_reference=answers))
            assert report.verdict == "equal"
            made[name] = folder, answers
        return made[name]

    return make


@pytest.fixture
def changed(
    saved: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> Callable[[str, str, Callable[[Any], Any]], Report]:
    """Compare a checkpoint of which one tensor was changed with the answers of the sound one."""

    def compare(name: str, tensor: str, change: Callable[[Any], Any]) -> Report:
        folder, answers = saved(name)
        copy = tmp_path / "changed"
        shutil.copytree(folder, copy)
        tensors = safetensors_torch.load_file(copy / "model.safetensors")
        value = tensors[tensor].clone()
        tensors[tensor] = change(value)
        safetensors_torch.save_file(tensors, copy / "model.safetensors")
        return run_parity(str(copy), ParityOptions(reference=answers))

    return compare


@pytest.mark.parametrize("name", SIZES)
def test_every_architecture_passes_in_all_its_parts(
    saved: Callable[[str], tuple[Path, Path]], name: str
) -> None:
    folder, answers = saved(name)
    for options in (ParityOptions(num_tokens=21, block_size=4), ParityOptions(reference=answers)):
        report = run_parity(str(folder), options)
        assert report.verdict == "equal"
        assert [run.title for run in report.runs] == ["whole prompt", "chunks and single tokens"]
        for run in report.runs:
            points = [p for p in point_order(4) if name != "gpt2" or "rotated" not in p]
            assert list(run.comparison.errors) == points
            assert max(run.comparison.errors.values()) < 1e-5
            assert run.logits.largest < 1e-3
            assert run.logits.num_same_argmax == run.logits.num_positions
            assert run.rounding is None


PLACES = [
    ("llama", "model.embed_tokens.weight", None, "embedding"),
    ("llama", "model.layers.1.input_layernorm.weight", 1, "norm"),
    ("llama", "model.layers.2.self_attn.q_proj.weight", 2, "q"),
    ("llama", "model.layers.0.self_attn.k_proj.weight", 0, "k"),
    ("llama", "model.layers.3.self_attn.v_proj.weight", 3, "v"),
    ("llama", "model.layers.1.self_attn.o_proj.weight", 1, "output"),
    ("llama", "model.layers.1.post_attention_layernorm.weight", 1, "mlp norm"),
    ("llama", "model.layers.2.mlp.up_proj.weight", 2, "mlp"),
    ("llama", "model.norm.weight", None, "final norm"),
    ("qwen3", "model.layers.1.self_attn.k_norm.weight", 1, "rotated k"),
    ("gpt2", "transformer.wpe.weight", None, "embedding"),
    ("gpt2", "transformer.h.2.ln_1.bias", 2, "norm"),
    ("gpt2", "transformer.h.1.attn.c_attn.weight", 1, "q"),
    ("gpt2", "transformer.h.1.mlp.c_proj.bias", 1, "mlp"),
    ("gpt2", "transformer.ln_f.bias", None, "final norm"),
]


@pytest.mark.parametrize(("name", "tensor", "layer", "part"), PLACES)
def test_a_changed_weight_is_found(
    changed: Callable[..., Report], name: str, tensor: str, layer: int | None, part: str
) -> None:
    report = changed(name, tensor, lambda value: value * 1.01)
    assert report.verdict == "different"
    for run in report.runs:
        assert run.comparison.place is not None
        assert (run.comparison.place.layer, run.comparison.place.part) == (layer, part)
        assert run.comparison.place.position == 0
        assert run.rounding is not None
        assert not run.rounding.is_reason
    text = report.as_text()
    assert "FAIL" in text
    assert "rounding does not explain it" in text
    assert f"first over the tolerance: {part}, position 0" in text


def test_the_head_of_a_changed_row_is_found(changed: Callable[..., Report]) -> None:
    def change(value: Any) -> Any:
        value[8 * 5 + 3] += 0.5  # head 5 of eight of 8
        return value

    report = changed("llama", "model.layers.2.self_attn.q_proj.weight", change)
    place = report.runs[0].comparison.place
    assert place is not None
    assert (place.layer, place.part, place.head) == (2, "q", 5)


def test_a_changed_head_matrix_shows_in_the_logits_alone(changed: Callable[..., Report]) -> None:
    report = changed("llama", "lm_head.weight", lambda value: value * -1)
    assert report.verdict == "different"
    run = report.runs[0]
    assert run.comparison.place is None
    assert run.logits.first_different is not None
    assert run.is_over_logit_tolerance


def test_a_nan_is_over_every_tolerance(changed: Callable[..., Report]) -> None:
    def change(value: Any) -> Any:
        value[3, 5] = torch.nan
        return value

    report = changed("llama", "model.layers.1.mlp.down_proj.weight", change)
    place = report.runs[0].comparison.place
    assert place is not None
    assert (place.layer, place.part, place.worst) == (1, "mlp", float("inf"))
    assert report.verdict == "different"
    plain = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert plain["runs"][0]["comparison"]["place"]["worst"] is None


# Package, file in it, what is written there, what a slip would write, arguments of the tool; then
# the place that must be named: layer, part, position and head of the whole prompt and of chunks.
# None: that run is not affected (with as many queries as keys both corners of a mask are one).
Where = tuple[int, str, int, int | None]
CPU, REFERENCE = ("--backend", "cpu"), ("--backend", "reference")
BREAKS: dict[str, tuple[str, str, dict[str, str], tuple[str, ...], Where | None, Where | None]] = {
    "stride of a slot, writing": (
        "pagetide_kernels", "reference.py",
        {"slots // shape.block_size, slots % shape.block_size":
         "slots // shape.block_size, slots % (shape.block_size - 1)"},
        REFERENCE, (0, "cached k", 0, 0), (0, "cached k", 0, 0),
    ),
    "stride of a block, reading": (
        "pagetide_kernels", "cpu/work_list.py",
        {"(block_ids * num_kv_heads + torch.arange(num_kv_heads)":
         "(block_ids + torch.arange(num_kv_heads)"},
        CPU, (0, "attention", 0, 0), None,
    ),
    "mask offset": (
        "pagetide_kernels", "reference.py",
        {"torch.arange(seq_len - query_len, seq_len,": "torch.arange(0, query_len,"},
        REFERENCE, None, (0, "attention", 16, 0),
    ),
    "window one too wide": (
        "pagetide_kernels", "reference.py",
        {"key_positions > query_positions - window": "key_positions >= query_positions - window"},
        REFERENCE, (0, "attention", 6, 0), (0, "attention", 6, 0),
    ),
    "GQA index": (
        "pagetide_kernels", "reference.py",
        {"k = k.repeat_interleave(num_heads // num_kv_heads, dim=0)":
         "k = k.repeat(num_heads // num_kv_heads, 1, 1)",
         "v = v.repeat_interleave(num_heads // num_kv_heads, dim=0)":
         "v = v.repeat(num_heads // num_kv_heads, 1, 1)"},
        REFERENCE, (0, "attention", 0, 1), (0, "attention", 0, 1),
    ),
    "rotary half": (
        "pagetide_kernels", "small_ops.py",
        {"x32.roll(rotary_dim // 2, dims=-1)": "x32.roll(1, dims=-1)"},
        CPU, (0, "rotated q", 1, 0), (0, "rotated q", 1, 0),
    ),
    "rotary sign": (
        "pagetide_kernels", "small_ops.py",
        {"torch.cat((-sin, sin), dim=-1)": "torch.cat((sin, -sin), dim=-1)"},
        CPU, (0, "rotated q", 1, 0), (0, "rotated q", 1, 0),
    ),
    "gate and up": (
        "pagetide_models", "decoder_layout.py",
        {"inner, hidden, gate_up, bias)": "inner, hidden, gate_up, bias, inner)",
         "inner, hidden, gate_up, bias, inner)": "inner, hidden, gate_up, bias)"},
        CPU, (0, "mlp", 0, None), (0, "mlp", 0, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("slip", BREAKS)
def test_a_slip_in_the_sources_is_found(
    saved: Callable[[str], tuple[Path, Path]], tmp_path: Path, slip: str
) -> None:
    package, file, edits, arguments, whole, chunked = BREAKS[slip]
    source = Path(str(importlib.import_module(package).__file__)).parent
    shutil.copytree(
        source, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "_lib")
    )
    text = (source / file).read_text(encoding="utf-8")
    for old in edits:
        assert text.count(old) == 1, f"{file} no longer reads {old!r}: give the slip anew"
    # Through a mark: an edit must not be undone by the next.
    for number, old in enumerate(edits):
        text = text.replace(old, f"\0{number}\0")
    for number, new in enumerate(edits.values()):
        text = text.replace(f"\0{number}\0", new)
    (tmp_path / package / file).write_text(text, encoding="utf-8")
    folder, answers = saved("mistral")
    command = [sys.executable, "-m", "pagetide_models", "parity", str(folder), *arguments]
    done = subprocess.run(
        [*command, "--reference", str(answers), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "different"
    for run, expected in zip(report["runs"], (whole, chunked), strict=True):
        place = run["comparison"]["place"]
        if expected is None:
            assert run["verdict"] == "equal"
        else:
            named = (place["layer"], place["part"], place["position"], place["head"])
            assert named == expected
            assert not run["rounding"]["is_reason"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounding_is_told_from_errors(
    saved: Callable[[str], tuple[Path, Path]], tmp_path: Path, name: str, dtype: str
) -> None:
    folder, _ = saved(name)
    # Far below what 16 bits can hold: everything is over it, and all of it is rounding.
    options = ParityOptions(dtype=dtype, tolerance=1e-6, num_tokens=24)
    report = run_parity(str(folder), options)
    assert report.verdict == "rounding"
    assert "rounding explains it" in report.as_text()
    assert "look at" not in report.as_text()
    answers = tmp_path / "answers.safetensors"
    run_parity(str(folder), replace(options, save_reference=answers))
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    tensors = safetensors_torch.load_file(copy / "model.safetensors")
    key = next(k for k in tensors if ".1." in k and ("mlp.up_proj" in k or "c_fc.weight" in k))
    tensors[key] = tensors[key] * 1.1
    safetensors_torch.save_file(tensors, copy / "model.safetensors")
    report = run_parity(str(copy), replace(options, reference=answers))
    assert report.verdict == "different"


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8", "int8-block"])
def test_quantised_caches_pass_against_keys_rounded_alike(
    saved: Callable[[str], tuple[Path, Path]], kv_dtype: str
) -> None:
    folder, _ = saved("llama")
    report = run_parity(str(folder), ParityOptions(kv_dtype=kv_dtype, num_tokens=24))
    assert report.verdict in ("equal", "rounding")
    assert report.runs[0].comparison.errors["0.q"] < 1e-5
    if kv_dtype != "int8-block":  # whose blocks are rounded again as they fill
        assert report.runs[0].comparison.errors["0.cached k"] < 1e-2


class TestCommand:
    def test_text_and_status(
        self, saved: Callable[[str], tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, answers = saved("llama")
        assert main(["parity", str(folder), "--reference", str(answers)]) == 0
        printed = capsys.readouterr().out
        assert "PASS: equal within the tolerance." in printed
        assert "layer 3" in printed
        assert "same most likely token at 32 of 32 positions" in printed

    def test_json_and_plot(
        self,
        saved: Callable[[str], tuple[Path, Path]],
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        folder, answers = saved("gpt2")
        plot = tmp_path / "errors.svg"
        arguments = ["parity", str(folder), "--reference", str(answers), "--json"]
        assert main([*arguments, "--plot", str(plot)]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == "equal"
        assert set(report["runs"][1]["comparison"]["errors"]) >= {"0.attention", "3.mlp", "logits"}
        root = ElementTree.parse(plot).getroot()
        tags = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert tags[0] == "svg"
        assert tags.count("polyline") == 2

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nowhere/at/all"], "no such file"),
            (["FOLDER", "--prompt", "Hello"], "tokenizer.json"),
            (["FOLDER", "--dtype", "int4"], "int4"),
            (["FOLDER", "--num-tokens", "0"], "num_tokens"),
            (["FOLDER", "--tolerance", "-1"], "tolerance"),
            (["FOLDER", "--reference", "nowhere"], "--save-reference"),
            (["FOLDER", "--reference", "FOLDER/model.safetensors"], "not a reference"),
            (["FOLDER", "--reference", "ANSWERS", "--kv-dtype", "float16"], "kv_dtype float32"),
            (["OTHER", "--reference", "ANSWERS"], "architecture llama"),
        ],
    )
    def test_what_cannot_be_compared(
        self,
        saved: Callable[[str], tuple[Path, Path]],
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        words: str,
    ) -> None:
        folder, answers = saved("llama")
        names = {"FOLDER": folder, "ANSWERS": answers, "OTHER": saved("gpt2")[0]}
        for name, path in names.items():
            arguments = [argument.replace(name, str(path)) for argument in arguments]
        assert main(["parity", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert words in captured.err

    def test_without_transformers_it_says_what_to_do(
        self, saved: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        folder, answers = saved("llama")
        with pytest.raises(ModelError, match=r"pagetide-models\[parity\].*--reference"):
            run_parity(str(folder), ParityOptions())
        assert run_parity(str(folder), ParityOptions(reference=answers)).verdict == "equal"

    def test_help_imports_no_torch(self, run_python: Callable[[str], str]) -> None:
        printed = run_python(
            "import sys\n"
            "from pagetide_models.__main__ import main\n"
            "try:\n    main(['parity', '--help'])\n"
            "except SystemExit as done:\n    assert done.code == 0\n"
            "print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
        )
        assert printed.splitlines()[-1] == "[]"
        assert "exit status: 0 equal" in printed


def test_a_damaged_reference_is_refused(
    saved: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, answers = saved("llama")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(answers.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cut\.safetensors"):
        run_parity(str(folder), ParityOptions(reference=cut))


def test_close_logits_are_counted_and_large_errors_excuse_nothing() -> None:
    expected = torch.tensor([[1.0, 1.00001, 0.0], [5.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    actual = torch.tensor([[1.0, 0.99999, 0.0], [5.0, 1.0, 0.0], [2.0, 9.0, 0.0]])
    logits = compare_logits(actual, expected)
    assert (logits.num_same_argmax, logits.num_close, logits.first_different) == (1, 1, 2)


def test_a_trace_compared_with_itself(saved: Callable[[str], tuple[Path, Path]]) -> None:
    from pagetide_models import load_model

    folder, _ = saved("llama")
    model = load_model(folder, block_size=4)
    trace = trace_model(model, list(range(9)))
    comparison = compare_traces(trace, trace, 1e-12)
    assert comparison.place is None
    assert set(comparison.errors.values()) == {0.0}
    assert not any(module._forward_hooks for module in model.modules())
