"""One comparison from options to report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from pagetide_models.errors import ModelError, ModelFormatError
from pagetide_models.loader import load_model
from pagetide_models.parity.compare import Comparison, compare_logits, compare_traces
from pagetide_models.parity.reference_file import SavedReference
from pagetide_models.parity.report import Report, Rounding, RunReport
from pagetide_models.parity.trace import Trace, trace_model
from pagetide_models.parity.transformers_side import load_transformers, trace_transformers
from pagetide_models.source import ModelSource, open_model

if TYPE_CHECKING:
    from pathlib import Path

    from pagetide_models.decoder import CausalLM

__all__ = ["ParityOptions", "run_parity"]

DEFAULT_PROMPT: Final = (
    "The tide rises, the tide falls, and the twilight darkens; along the sea-sands damp and brown "
    "the traveller hastens toward the town."
)
# Of a row's relative error. 16-bit types have 2^-11 and 2^-8 a rounding, which add up over layers.
TOLERANCES: Final = {
    torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2,
}  # fmt: skip
KV_TOLERANCES: Final = {"int8": 2e-2, "int8-block": 1e-1}
LOGIT_TOLERANCE: Final = 1e-3  # of float32 logits, absolute
ROUNDING_FACTOR: Final = 3.0  # how many times transformers' own rounding error ours may be
_SMALL: Final = 1 << 30  # parameters up to which the exact run is in float64


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """What to compare and how.

    Attributes:
        prompt: A text, or None: a sentence of our own, or random ids without a tokenizer.
        num_tokens: Use this many random token ids instead of a text.
        dtype, kv_dtype, backend, device, block_size: As `load_model`.
        tolerance: The largest relative error that counts as equal; None: by the dtypes.
        save_reference: Write what transformers computed to this file.
        reference: Compare with such a file instead of running transformers.
    """

    prompt: str | None = None
    num_tokens: int | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    backend: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    tolerance: float | None = None
    save_reference: Path | None = None
    reference: Path | None = None

    def __post_init__(self) -> None:
        if self.num_tokens is not None and self.num_tokens < 1:
            raise ValueError(f"num_tokens must be positive, got {self.num_tokens}")
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")
        if self.reference is not None and self.save_reference is not None:
            raise ValueError("give reference or save_reference, not both")


class _TransformersRuns:
    """The reference, and the exact run when somebody asks."""

    def __init__(self, source: ModelSource, model: CausalLM, token_ids: Sequence[int]) -> None:
        self._source, self._model, self._token_ids = source, model, token_ids
        self._theirs = load_transformers(source, model.dtype, model.device)
        self.reference: Trace = trace_transformers(
            self._theirs, token_ids, model.kv_cache_spec.kv_dtype
        )

    def exact(self) -> Trace:
        is_small = sum(p.numel() for p in self._theirs.parameters()) <= _SMALL
        if self._model.dtype == torch.float32 and is_small:
            wide = self._theirs.double()
        else:  # loaded again: converting would keep what the first loading rounded
            wide_dtype = torch.float64 if is_small else torch.float32
            wide = load_transformers(self._source, wide_dtype, self._model.device)
        return trace_transformers(wide, self._token_ids)


def run_parity(name: str, options: ParityOptions, *, revision: str | None = None) -> Report:
    """Load a model twice, run the same tokens through both, and say whether they agree.

    Ours runs the prompt in one step, and again in chunks with single tokens at the end, so that
    queries and keys of different lengths meet as they do in decoding.

    Args:
        name: What `open_model` takes.
        options: What to compare and how.
        revision: Of a hub id.

    Raises:
        ModelError: The model or the reference cannot be read, or transformers is not installed.
        ValueError: An option that does not fit.
    """
    source = open_model(name, revision=revision)
    saved = None if options.reference is None else SavedReference.read(options.reference)
    model = load_model(
        source, device=options.device, dtype=options.dtype, kv_dtype=options.kv_dtype,
        attention_backend=options.backend, block_size=options.block_size,
    )  # fmt: skip
    kv_dtype = model.kv_cache_spec.kv_dtype
    if saved is not None:
        saved.check(source, model)
        token_ids = saved.token_ids
        runs: SavedReference | _TransformersRuns = saved
    else:
        token_ids = _token_ids(source, options)
        runs = _TransformersRuns(source, model, token_ids)
    tolerance = options.tolerance or max(TOLERANCES[model.dtype], KV_TOLERANCES.get(kv_dtype, 0.0))
    exact: Trace | None = None
    if options.save_reference is not None:
        exact = runs.exact()
        SavedReference.of(source, model, token_ids, runs.reference, exact).write(
            options.save_reference
        )
    reports = []
    for title, chunks in _schedules(len(token_ids)):
        ours = trace_model(model, token_ids, chunks)
        comparison = compare_traces(ours, runs.reference, tolerance)
        logits = compare_logits(ours["logits"], runs.reference["logits"])
        is_over = kv_dtype == "float32" and logits.largest > LOGIT_TOLERANCE
        rounding = None
        if comparison.place is not None or is_over or logits.first_different is not None:
            exact = runs.exact() if exact is None else exact
            rounding = _rounding(ours, runs.reference, exact, comparison)
        reports.append(RunReport(title, comparison, logits, is_over, rounding))
    return Report(
        model=str(source.path),
        architecture=source.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=kv_dtype,
        backend=model.backend.name,
        num_tokens=len(token_ids),
        tolerance=tolerance,
        runs=tuple(reports),
    )


def _schedules(num_tokens: int) -> list[tuple[str, list[int]]]:
    """The prompt whole; and in two uneven chunks followed by up to four single tokens."""
    num_single = min(num_tokens // 4, 4)
    first = (num_tokens - num_single) * 3 // 5
    chunks = [first, num_tokens - num_single - first, *[1] * num_single]
    chunked = [size for size in chunks if size]
    whole = [("whole prompt", [num_tokens])]
    return whole if len(chunked) == 1 else [*whole, ("chunks and single tokens", chunked)]


def _token_ids(source: ModelSource, options: ParityOptions) -> list[int]:
    limit = source.config.max_position_embeddings
    num_random = options.num_tokens
    if num_random is None:
        try:
            ids = source.load_tokenizer().encode(options.prompt or DEFAULT_PROMPT)
        except ModelError:
            if options.prompt is not None:
                raise
            num_random = 32  # a checkpoint without a tokenizer can still be compared
        else:
            if not 1 <= len(ids) <= limit:
                raise ValueError(f"the prompt has {len(ids)} tokens; the model takes 1 to {limit}")
            source.config.check_token_ids(ids)
            return ids
    generator = random.Random(0)
    return [generator.randrange(source.config.vocab_size) for _ in range(min(num_random, limit))]


def _rounding(ours: Trace, theirs: Trace, exact: Trace, comparison: Comparison) -> Rounding:
    """Measure both against the exact run: rounding is the reason if ours strays no further."""
    point = "logits" if comparison.place is None else comparison.place.point
    if point not in exact:
        raise ModelFormatError(f"the reference holds no exact values of {point!r}")
    mine = compare_traces(ours, exact, float("inf")).errors
    other = compare_traces(theirs, exact, float("inf")).errors
    is_reason = all(
        mine[key] <= ROUNDING_FACTOR * other[key] + 1e-12
        for key in (point, *comparison.hidden_errors, "logits")
    )
    return Rounding(point, mine[point], other[point], is_reason)
