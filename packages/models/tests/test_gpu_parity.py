"""fp16 and bf16 on a GPU: how far SmolLM2's predictions move, ours against transformers' own.

Rounding moves any half-precision model away from the fp32 one. How far is measured as the mean
Kullback-Leibler divergence KL(fp32 || half) of the next-token distributions over a fixed text, once
for transformers' model in that dtype and once for ours with each attention back end: ours may lose
at most 1.2 times what transformers loses.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_kernels import AttentionMetadata, available_backends  # noqa: E402
from pagetide_kvcache import KVCache  # noqa: E402
from pagetide_models import load_model, open_model  # noqa: E402

pytestmark = [
    pytest.mark.model,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_TOKENS = 1024
CHUNKS = [448, 1, 255, 288] + [1] * 32  # prefill, chunks that read the cache back, and decode
TEXT = Path(__file__).parent / "data" / "fixed_text.md"
HALF_DTYPES = ["float16", "bfloat16"]


def gpu_backends() -> list[str]:
    """Back ends that run here; `reference` alone where there is no GPU to ask."""
    if not torch.cuda.is_available():
        return ["reference"]
    return [name for name, status in available_backends("cuda").items() if status.is_available]


def mean_kl(exact: Any, other: Any) -> float:
    """Mean over positions of KL(exact || other) in nats, of logits [T, vocab_size]."""
    exact, other = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


@pytest.fixture(scope="module")
def token_ids(demo_gguf: Path) -> list[int]:
    ids = open_model(demo_gguf).load_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    assert len(ids) > NUM_TOKENS
    return ids[:NUM_TOKENS]


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path, token_ids: list[int]) -> Callable[[str], Any]:
    """transformers' logits [T, vocab_size] in a dtype, on the GPU; the file is opened once."""
    transformers = pytest.importorskip("transformers", reason="the oracle")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
    ).eval()
    model.cuda()
    ids = torch.tensor([token_ids], device="cuda")
    known: dict[str, Any] = {}
    with torch.no_grad():
        known["float32"] = model(ids, use_cache=False).logits[0].float()
        for dtype in HALF_DTYPES:
            half = copy.deepcopy(model)
            # As loading in that dtype does: parameters only. The rotary frequencies stay in fp32.
            for parameter in half.parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype))
            known[dtype] = half(ids, use_cache=False).logits[0].float()
    return known.__getitem__


def our_logits(path: Path, token_ids: list[int], **options: Any) -> Any:
    """float32 [T, vocab_size], in chunks through a paged cache whose blocks lie scattered."""
    model = load_model(path, device="cuda", **options)
    block_size = model.kv_cache_spec.block_size
    num_blocks = -(-len(token_ids) // block_size) + 3
    kv_cache = KVCache(model.kv_cache_spec, num_blocks, device="cuda")
    if kv_cache.data.is_floating_point():
        kv_cache.data.fill_(float("nan"))  # what this sequence did not write must not be read
    generator = torch.Generator().manual_seed(4)
    table = torch.randperm(num_blocks, generator=generator)[: num_blocks - 3].tolist()
    parts, start = [], 0
    for size in CHUNKS:
        metadata = AttentionMetadata.from_host(
            [size], [start + size], [table],
            block_size=block_size, num_blocks=num_blocks, device="cuda",
        )  # fmt: skip
        ids = torch.tensor(token_ids[start : start + size], device="cuda")
        positions = torch.arange(start, start + size, device="cuda")
        parts.append(model.compute_logits(model(ids, positions, kv_cache, metadata)))
        start += size
    assert start == len(token_ids)
    return torch.cat(parts).float()


def record(**figures: Any) -> None:
    """Append a line of figures to the file that PAGETIDE_GPU_RECORD_FILE names, if it does."""
    if path := os.environ.get("PAGETIDE_GPU_RECORD_FILE"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"device": torch.cuda.get_device_name(), **figures}) + "\n")


@pytest.mark.parametrize("backend", gpu_backends())
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_loses_no_more_than_transformers_does(
    demo_gguf: Path, token_ids: list[int], theirs: Callable[[str], Any], dtype: str, backend: str
) -> None:
    exact = theirs("float32")
    allowed = 1.2 * mean_kl(exact, theirs(dtype))
    assert allowed > 0  # rounding does show
    actual = mean_kl(
        exact, our_logits(demo_gguf, token_ids, dtype=dtype, attention_backend=backend)
    )
    print(f"{backend} {dtype}: KL {actual:.3e}, {1.2 * actual / allowed:.3f} of transformers'")
    record(backend=backend, dtype=dtype, kl=actual, transformers_kl=allowed / 1.2)
    assert actual <= allowed


@pytest.mark.parametrize("backend", gpu_backends())
def test_fp32_on_the_gpu_is_exact(
    demo_gguf: Path, token_ids: list[int], theirs: Callable[[str], Any], backend: str
) -> None:
    """The comparison above is between equals only if the fp32 models agree: TF32 is off in both."""
    ours = our_logits(demo_gguf, token_ids, dtype="float32", attention_backend=backend)
    kl = mean_kl(theirs("float32"), ours)
    print(f"{backend} float32: KL {kl:.3e}")
    record(backend=backend, dtype="float32", kl=kl)
    assert kl <= 1e-6


@pytest.mark.parametrize("kv_dtype", ["int8", "int8-block"])
@pytest.mark.parametrize("backend", gpu_backends())
def test_an_int8_kv_cache_keeps_the_predictions(
    demo_gguf: Path, token_ids: list[int], backend: str, kv_dtype: str
) -> None:
    """Perplexity within 0.5 % of an fp16 KV cache's (`int8-block` 3 %), as on the CPU."""
    options = {"dtype": "float16", "attention_backend": backend}
    targets = torch.tensor(token_ids[1:], device="cuda")
    half = our_logits(demo_gguf, token_ids, **options)
    int8 = our_logits(demo_gguf, token_ids, kv_dtype=kv_dtype, **options)
    losses = [float(torch.nn.functional.cross_entropy(x[:-1], targets)) for x in (half, int8)]
    agreement = float((half.argmax(-1) == int8.argmax(-1)).float().mean())
    change = abs(losses[1] - losses[0])  # of the logarithm of the perplexity
    print(f"{backend} {kv_dtype}: perplexity changes by {change:.3%}, argmax equal {agreement:.2%}")
    record(backend=backend, kv_dtype=kv_dtype, perplexity_change=change, argmax_equal=agreement)
    assert change <= (0.005 if kv_dtype == "int8" else 0.03)
    assert agreement >= (0.97 if kv_dtype == "int8" else 0.95)
