"""transformers' answers in a safetensors file, for machines that do not have transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagetide_models.errors import ModelFormatError, ModelNotFoundError
from pagetide_models.parity.trace import Trace
from pagetide_models.safetensors import read_safetensors_header
from pagetide_models.weights import read_tensor

if TYPE_CHECKING:
    from pagetide_models.decoder import CausalLM
    from pagetide_models.source import ModelSource

__all__ = ["SavedReference"]

_FORMAT: Final = "pagetide-parity-1"
_COMPARED: Final = ("architecture", "vocab_size", "hidden_size", "num_layers", "num_heads")


@dataclass(frozen=True, slots=True)
class SavedReference:
    """A trace of transformers in the dtypes of a model, and the exact one.

    Attributes:
        facts: Which model and which dtypes they are of.
        token_ids: The prompt.
        reference: The trace to compare with.
        exact_trace: The trace in float64 (float32 for large models), stored as float32.
    """

    facts: dict[str, str]
    token_ids: list[int]
    reference: Trace
    exact_trace: Trace

    def exact(self) -> Trace:
        """The exact trace."""
        return self.exact_trace

    @classmethod
    def of(
        cls,
        source: ModelSource,
        model: CausalLM,
        token_ids: Sequence[int],
        reference: Trace,
        exact: Trace,
    ) -> SavedReference:
        """What was computed for `model`."""
        return cls(_facts(source, model), list(token_ids), reference, exact)

    def check(self, source: ModelSource, model: CausalLM) -> None:
        """Raise `ValueError` if this was computed for another model or another dtype."""
        for key, value in _facts(source, model).items():
            if self.facts.get(key) != value:
                raise ValueError(
                    f"the reference was computed for {key} {self.facts.get(key)}, but the model "
                    f"has {value}; save it again for this model, or pass the options it had"
                )

    def write(self, path: Path) -> None:
        """Write the file (the `safetensors` package comes with transformers)."""
        from safetensors.torch import save_file

        tensors = {
            f"{name}/{point}": value.float().contiguous()
            for name, trace in (("reference", self.reference), ("exact", self.exact_trace))
            for point, value in trace.items()
        }
        ids = json.dumps(self.token_ids)
        save_file(tensors, path, {"format": _FORMAT, "token_ids": ids, **self.facts})

    @classmethod
    def read(cls, path: Path) -> SavedReference:
        """Read what `write` wrote.

        Raises:
            ModelNotFoundError: There is no such file.
            ModelFormatError: It is damaged or something else.
        """
        if not path.is_file():
            raise ModelNotFoundError(f"{path}: no such file; --save-reference writes one")
        header = read_safetensors_header(path)
        facts = _metadata(path)
        if facts.pop("format", None) != _FORMAT:
            raise ModelFormatError(f"{path}: not a reference that --save-reference wrote")
        traces: dict[str, dict[str, object]] = {"reference": {}, "exact": {}}
        for name, info in header.items():
            which, _, point = name.partition("/")
            if which not in traces:
                raise ModelFormatError(f"{path}: unknown tensor {name!r}")
            traces[which][point] = read_tensor(info)
        try:
            token_ids = json.loads(facts.pop("token_ids"))
            is_valid = all(type(token_id) is int for token_id in token_ids)
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid or not all("logits" in trace for trace in traces.values()):
            raise ModelFormatError(f"{path}: incomplete; save it again")
        return cls(facts, token_ids, traces["reference"], traces["exact"])  # type: ignore[arg-type]


def _facts(source: ModelSource, model: CausalLM) -> dict[str, str]:
    facts = {key: str(getattr(source.config, key)) for key in _COMPARED}
    facts["dtype"] = str(model.dtype).removeprefix("torch.")
    facts["kv_dtype"] = model.kv_cache_spec.kv_dtype
    return facts


def _metadata(path: Path) -> dict[str, str]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(length)).get("__metadata__")
    is_texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    return metadata if is_texts else {}
