"""transformers' side of a comparison: the same parts, recorded from its own modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pagetide_models.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from pagetide_models.source import ModelSource

__all__ = ["load_transformers", "round_to_cache", "trace_transformers"]

_PROBE: Final = "pagetide_probe"
Keep = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Names:
    """What an architecture family calls its modules there."""

    body: str
    layers: str
    norm: str
    attention: str
    projections: tuple[str, ...]
    output: str
    mlp_norm: str
    final_norm: str


_FAMILIES: Final = (
    _Names(
        body="model", layers="layers", norm="input_layernorm", attention="self_attn",
        projections=("q_proj", "k_proj", "v_proj"), output="o_proj",
        mlp_norm="post_attention_layernorm", final_norm="norm",
    ),
    _Names(
        body="transformer", layers="h", norm="ln_1", attention="attn", projections=("c_attn",),
        output="c_proj", mlp_norm="ln_2", final_norm="ln_f",
    ),
)  # fmt: skip


def load_transformers(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """Open the same files with transformers.

    Raises:
        ModelError: It is not installed.
        UnsupportedModelError: It has no such model, or one whose modules are not known here.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ModelError(
            "comparing needs transformers: pip install 'pagetide-models[parity]', or compare with "
            "what --save-reference wrote where it is installed (--reference FILE)"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path, arguments = source.path, {}
    if source.gguf is not None:
        path, arguments = source.path.parent, {"gguf_file": source.path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments)
    if _names(model) is None:
        raise UnsupportedModelError(
            f"{source.path}: transformers' {type(model).__name__} names its modules in a way that "
            "this comparison does not know"
        )
    return model.to(device).eval()


def _names(model: Any) -> _Names | None:
    for names in _FAMILIES:
        if hasattr(getattr(model, names.body, None), names.layers):
            return names
    return None


def round_to_cache(x: Tensor, kv_dtype: str) -> Tensor:
    """Keys or values [..., head_dim] as a cache of `kv_dtype` gives them back, in x's dtype."""
    if kv_dtype.startswith("int8"):
        scales = x.float().abs().amax(-1, keepdim=True) / 127.0
        levels = (x.float() / torch.where(scales == 0, 1.0, scales)).round().clamp(-127, 127)
        return (levels * scales).to(x.dtype)
    return x.to(getattr(torch, kv_dtype)).to(x.dtype)


def trace_transformers(
    model: Any, token_ids: Sequence[int], kv_dtype: str | None = None
) -> dict[str, Tensor]:
    """Run a prompt through a transformers model and keep every part.

    Args:
        model: What `load_transformers` returned, or any model of those architectures.
        token_ids: The prompt.
        kv_dtype: Round keys and values as a cache of this type does; None: not at all.

    Returns:
        The trace on the CPU: float64 of a float64 model, else float32.
    """
    names = _names(model)
    if names is None:
        raise UnsupportedModelError(f"{type(model).__name__} has modules of unknown names")
    trace: dict[str, Tensor] = {}

    def keep(point: str, value: Tensor) -> None:
        wide = value.detach() if value.dtype == torch.float64 else value.detach().float()
        trace[point] = wide.cpu().clone()

    with torch.no_grad(), _probe(model, keep, kv_dtype), _hooks(model, names, keep):
        ids = torch.tensor([token_ids], device=next(model.parameters()).device)
        keep("logits", model(ids, use_cache=False).logits[0])
    return trace


@contextmanager
def _probe(model: Any, keep: Keep, kv_dtype: str | None) -> Iterator[None]:
    """Put an attention function in place that records its arguments and calls transformers' own."""
    masks: Any = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    functions: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        prefix = f"{module.layer_idx}."
        if _rotates(module):
            keep(prefix + "rotated q", query[0].transpose(0, 1))
            keep(prefix + "rotated k", key[0].transpose(0, 1))
        if kv_dtype is not None:
            key, value = round_to_cache(key, kv_dtype), round_to_cache(value, kv_dtype)
        keep(prefix + "cached k", key[0].transpose(0, 1))
        keep(prefix + "cached v", value[0].transpose(0, 1))
        output, weights = functions["sdpa"](module, query, key, value, mask, **kwargs)
        keep(prefix + "attention", output[0])
        return output, weights

    functions.register(_PROBE, attend)
    masks.register(_PROBE, masks["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(_PROBE)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _rotates(module: Any) -> bool:
    return not hasattr(module, "c_attn")


@contextmanager
def _hooks(model: Any, names: _Names, keep: Keep) -> Iterator[None]:
    handles: list[Any] = []

    def on(module: Any, point: str) -> None:
        def record(_module: Any, _args: Any, out: Any) -> None:
            keep(point, (out[0] if isinstance(out, tuple) else out)[0])

        handles.append(module.register_forward_hook(record))

    def on_projection(module: Any, parts: str, prefix: str, head_dim: int) -> None:
        def record(_module: Any, _args: Any, out: Any) -> None:
            for part, value in zip(parts, out[0].chunk(len(parts), dim=-1), strict=True):
                keep(prefix + part, value.unflatten(-1, (-1, head_dim)))

        handles.append(module.register_forward_hook(record))

    body = getattr(model, names.body)
    layers = getattr(body, names.layers)
    handles.append(
        layers[0].register_forward_pre_hook(lambda _module, args: keep("embedding", args[0][0]))
    )
    for index, layer in enumerate(layers):
        attention, prefix = getattr(layer, names.attention), f"{index}."
        on(getattr(layer, names.norm), prefix + "norm")
        parts = "qkv" if len(names.projections) == 1 else None
        for place, projection in enumerate(names.projections):
            on_projection(
                getattr(attention, projection), parts or "qkv"[place], prefix, attention.head_dim
            )
        on(getattr(attention, names.output), prefix + "output")
        on(getattr(layer, names.mlp_norm), prefix + "mlp norm")
        on(layer.mlp, prefix + "mlp")
        on(layer, prefix + "hidden")
    on(getattr(body, names.final_norm), "final norm")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
