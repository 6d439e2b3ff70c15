"""The `pagetide` command: bad input is one line and status 2, if it can be before torch."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Runs the command and afterwards says what was imported, on a line of its own on standard error.
_REPORTING = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("\\nTORCH %s\\n" % ("torch" in sys.modules)))
from pagetide_runtime.cli import main
main(prog_name="pagetide")
"""
# Torch must not even be looked for: an import of it fails loudly.
_WITHOUT_TORCH = "import sys; sys.modules['torch'] = None" + _REPORTING.replace(
    '"torch" in sys.modules', "sys.modules.get('torch') is not None"
)


def pagetide(
    *arguments: str | bytes, code: str = _REPORTING, **options: object
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}, **options,  # type: ignore[call-overload]
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    status, out, err = result
    lines = [line for line in err.splitlines() if line and not line.startswith("TORCH ")]
    assert status == 2, err
    assert out == ""
    assert len(lines) == 1 and lines[0].startswith("Error: "), err
    assert "Traceback" not in err
    assert "TORCH False" in err
    for word in words:
        assert word in lines[0]


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.gguf"
    assert_refused(pagetide("generate", str(path), "hi"), "nowhere.gguf")


def test_a_text_file_named_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("these are not weights\n" * 100)
    assert_refused(pagetide("generate", str(path), "hi"), "notes.gguf")
    assert_refused(pagetide("chat", str(path)), "notes.gguf")


def test_a_pickle_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"\x80\x04}.")
    assert_refused(pagetide("generate", str(path), "hi"), "pytorch_model.bin")


def _key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def small_gguf(architecture: str) -> bytes:
    keys = [
        _key("general.architecture", 8, _text(architecture)),
        _key(f"{architecture}.block_count", 4, struct.pack("<I", 1)),
        _key(f"{architecture}.context_length", 4, struct.pack("<I", 64)),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)


def test_a_gguf_cut_at_any_byte_of_its_header(tmp_path: Path) -> None:
    # Every cut in one process: the command's own entry is called for each.
    data = small_gguf("llama")
    (tmp_path / "whole.gguf").write_bytes(data)
    code = """
import io, sys, contextlib, pathlib
sys.modules['torch'] = None
from pagetide_runtime.cli import main
folder = pathlib.Path(sys.argv[1]); data = (folder / 'whole.gguf').read_bytes(); results = []
for length in range(len(data)):
    (folder / 'cut.gguf').write_bytes(data[:length])
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            main(['generate', str(folder / 'cut.gguf'), 'hi'], prog_name='pagetide')
        except SystemExit as end:
            status = end.code
    results.append((length, status, err.getvalue()))
bad = [r for r in results if r[1] != 2 or r[2].count('\\n') != 1 or 'cut.gguf' not in r[2]]
print(len(results), bad[:3])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{len(data)} []"


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    path.write_bytes(small_gguf("perceiver9000"))
    assert_refused(pagetide("generate", str(path), "hi"), "perceiver9000")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["PerceiverForCausalLM"], "model_type": "perceiver"})
    )
    assert_refused(pagetide("generate", str(folder), "hi"), "perceiver")


def test_a_hub_id_without_a_network_says_what_to_do() -> None:
    assert_refused(
        pagetide("generate", "nobody-here/no-such-model", "hi"), "nobody-here/no-such-model"
    )


def test_bad_sampling_parameters() -> None:
    assert_refused(pagetide("generate", "x.gguf", "hi", "--temperature", "nan"), "temperature")
    assert_refused(pagetide("generate", "x.gguf", "hi", "--top-p", "0"), "top_p")
    assert_refused(pagetide("generate", "x.gguf", "hi", "--max-tokens", "0"), "max_tokens")


def test_options_out_of_range_are_refused_before_anything_is_read() -> None:
    for command in (["generate", "x.gguf", "hi"], ["chat", "x.gguf"]):
        for option in ("--max-model-len", "--num-blocks", "--block-size", "--token-budget"):
            result = pagetide(*command, option, "-5", code=_WITHOUT_TORCH)
            assert_refused(result, "=-5: give a whole number of at least 1")


def test_bytes_that_are_no_text_are_refused() -> None:
    assert_refused(pagetide("generate", "x.gguf", "ok", b"a\xff"), "prompt 2 of 2", "UTF-8")


@pytest.mark.model
def test_bad_prompts_are_refused_before_torch_or_any_weight_is_read(demo_model: Path) -> None:
    model = str(demo_model)
    for arguments in (["", "ok"], ["   "]):
        assert_refused(pagetide("generate", model, *arguments, code=_WITHOUT_TORCH), "empty")
    too_long = "word " * 9000
    result = pagetide("generate", model, too_long, code=_WITHOUT_TORCH)
    assert_refused(result, "8192")
    result = pagetide("generate", model, "a b c d", "--max-model-len", "3", code=_WITHOUT_TORCH)
    assert_refused(result, "3")


@pytest.mark.model
def test_generate_in_a_pipe(demo_model: Path) -> None:
    status, out, err = pagetide(
        "generate", str(demo_model), "The capital of France is", "--max-tokens", "4"
    )
    assert status == 0 and out.startswith(" Paris")
    assert "%|" not in err  # no progress bar in a pipe
    status, out, _ = pagetide(
        "generate", str(demo_model), "The capital of France is", "The opposite of hot is",
        "--max-tokens", "6", "--stats",
    )  # fmt: skip
    assert status == 0
    assert "> The capital of France is\nParis" in out and "> The opposite of hot is\n" in out
    for name in ("prompts", "tokens/s", "blocks", "prefix hits"):
        assert name in out


@pytest.mark.model
def test_blocks_are_counted_even_if_every_answer_ends_in_its_first_step(demo_model: Path) -> None:
    status, out, _ = pagetide(
        "generate", str(demo_model), "The capital of France is", "--max-tokens", "1", "--stats"
    )
    assert status == 0 and "1 used, 0 shared" in out


@pytest.mark.model
def test_chat_is_multi_turn(demo_model: Path) -> None:
    from pagetide_runtime import LLM, SamplingParams

    turns = ["Name a city in Japan.", "And one in Italy?"]
    status, out, err = pagetide(
        "chat", str(demo_model), "--max-tokens", "12", input="\n".join([*turns, "/exit", ""])
    )
    assert status == 0, err
    llm = LLM(demo_model, device="cpu", num_blocks=64, progress=False)
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12)).text
        messages.append({"role": "assistant", "content": answer})
    assert out == f"{messages[1]['content']}\n{messages[3]['content']}\n"


@pytest.mark.model
def test_ctrl_c_ends_the_answer_and_not_the_program(demo_model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _REPORTING, "chat", str(demo_model), "--max-tokens", "400"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Count from 1 to 1000, one number a line.\n")
    process.stdin.flush()
    assert process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    seen = b""
    deadline = time.monotonic() + 60
    while b"[interrupted]" not in seen and time.monotonic() < deadline:
        seen += process.stdout.read1(4096)  # type: ignore[attr-defined]
    assert b"[interrupted]" in seen
    process.stdin.write(b"Say hello.\n/exit\n")
    process.stdin.close()
    rest = process.stdout.read()
    assert process.wait(60) == 0
    assert len(rest.strip()) > 0  # the next turn was answered


def test_a_second_ctrl_c_ends_the_answer_without_waiting_for_a_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pagetide_runtime import TextChunk
    from pagetide_runtime.cli.chat import _answer

    closed: list[bool] = []

    class SlowLLM:
        def chat_prompt(self, messages: object) -> list[int]:
            return [1]

        def stream(self, prompts: object, params: object) -> Iterator[TextChunk]:
            try:
                yield TextChunk(0, 0, "Once")
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)  # as if no token had come in between
                yield TextChunk(0, 0, " never shown")
            finally:
                closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    messages = [{"role": "user", "content": "a story"}]
    assert _answer(SlowLLM(), messages, object()) == "Once"  # type: ignore[arg-type]
    assert capsys.readouterr().out == "Once [interrupted]\n"
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_help_and_version_import_no_torch() -> None:
    status, out, err = pagetide("--help")
    assert status == 0 and "generate" in out and "chat" in out and "TORCH False" in err
    status, out, _ = pagetide("generate", "--help")
    assert status == 0 and "--kv-dtype" in out
    status, out, _ = pagetide("--version")
    assert status == 0 and "pagetide" in out
