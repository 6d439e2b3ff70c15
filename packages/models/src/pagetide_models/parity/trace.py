"""What a model computes on the way to its logits, part by part. T are the tokens of a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache, LayerKVCache
from pagetide_models.attention import Attention
from pagetide_models.decoder import CausalLM

__all__ = ["PARTS", "Trace", "layer_of", "point_order", "trace_model"]

# The parts of a layer in the order in which they are computed. Those of one width a head are
# [T, heads, head_dim], the others [T, width].
PARTS: Final = (
    "norm", "q", "k", "v", "rotated q", "rotated k", "cached k", "cached v", "attention", "output",
    "mlp norm", "mlp", "hidden",
)  # fmt: skip

Trace = Mapping[str, Tensor]
"""Values by point, float32 or float64 on the CPU. A point is ``embedding``, ``<layer>.<part>``,
``final norm`` or ``logits``."""


def point_order(num_layers: int) -> list[str]:
    """All points of a model in the order of their computation."""
    inner = [f"{layer}.{part}" for layer in range(num_layers) for part in PARTS]
    return ["embedding", *inner, "final norm", "logits"]


def layer_of(point: str) -> int | None:
    """The layer a point belongs to, or None."""
    number = point.partition(".")[0]
    return int(number) if number.isdigit() else None


def trace_model(
    model: CausalLM, token_ids: Sequence[int], chunks: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Run a prompt through a paged cache with scattered blocks and keep every part.

    Args:
        model: Any model of this package.
        token_ids: The prompt.
        chunks: How many tokens each step takes; None: all in one.

    Returns:
        The trace, as float32 on the CPU.
    """
    device, block_size = model.device, model.kv_cache_spec.block_size
    count = -(-len(token_ids) // block_size)
    # An odd stride through a power of two visits every block once, and none beside its neighbour.
    num_blocks = 1 << (2 * count).bit_length()
    table = [(index * (num_blocks // 2 + 1) + 1) % num_blocks for index in range(count)]
    cache = KVCache(model.kv_cache_spec, num_blocks, device=device)
    steps: dict[str, list[Tensor]] = defaultdict(list)
    start = 0
    with _hooks(model, steps):
        for size in chunks or [len(token_ids)]:
            metadata = AttentionMetadata.from_host(
                [size], [start + size], [table], block_size=block_size, num_blocks=num_blocks,
                device=device,
            )  # fmt: skip
            ids = torch.tensor(token_ids[start : start + size], device=device)
            positions = torch.arange(start, start + size, device=device)
            hidden = model(ids, positions, cache, metadata)
            steps["final norm"].append(_kept(hidden))
            steps["logits"].append(_kept(model.compute_logits(hidden)))
            start += size
    return {point: torch.cat(parts) for point, parts in steps.items()}


def _kept(value: Tensor) -> Tensor:
    return value.detach().float().cpu().clone()


@contextmanager
def _hooks(model: CausalLM, steps: dict[str, list[Tensor]]) -> Iterator[None]:
    def keep(point: str, value: Tensor) -> None:
        steps[point].append(_kept(value))

    handles = []
    for index, layer in enumerate(model.layers):
        prefix = f"{index}."

        def before(_: nn.Module, args: tuple[Any, ...], prefix: str = prefix) -> None:
            if prefix == "0.":
                keep("embedding", args[0])

        def after(_: nn.Module, _args: Any, out: Any, prefix: str = prefix) -> None:
            keep(prefix + "hidden", out[0] + out[1])

        def normed(_: nn.Module, _args: Any, out: Any, point: str) -> None:
            keep(point, out[0])

        handles.append(layer.register_forward_pre_hook(before))
        handles.append(layer.register_forward_hook(after))
        for name, part in (("attention_norm", "norm"), ("mlp_norm", "mlp norm")):
            module = getattr(layer, name, None)
            if isinstance(module, nn.Module):
                handles.append(module.register_forward_hook(_with(normed, prefix + part)))
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module):
            handles.append(mlp.register_forward_hook(_with(_whole(keep), prefix + "mlp")))
        attention = getattr(layer, "attention", None)
        if isinstance(attention, Attention):
            handles += _attention_hooks(attention, keep, prefix)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with(hook: Any, point: str) -> Any:
    return lambda module, args, out: hook(module, args, out, point)


def _whole(keep: Any) -> Any:
    return lambda _module, _args, out, point: keep(point, out)


def _attention_hooks(attention: Attention, keep: Any, prefix: str) -> list[Any]:
    def projected(_: nn.Module, _args: Any, out: Any) -> None:
        for name, part in zip("qkv", out.split(attention.sizes, dim=-1), strict=True):
            keep(prefix + name, part.unflatten(-1, (-1, attention.head_dim)))

    def attended(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        q, k, _v, kv_cache, metadata = args
        if attention.rotary is not None or attention.q_norm is not None:
            keep(prefix + "rotated q", q)
            keep(prefix + "rotated k", k)
        layer = kv_cache.layer(attention.cached.layer_index)
        for name, value in zip("kv", _read_back(layer, metadata), strict=True):
            keep(f"{prefix}cached {name}", value)
        keep(prefix + "attention", out)

    return [
        attention.qkv.register_forward_hook(projected),
        attention.cached.register_forward_hook(attended),
        attention.output.register_forward_hook(_with(_whole(keep), prefix + "output")),
    ]


def _read_back(layer: LayerKVCache, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """K and V of this step's tokens as the cache now holds them: float32 [T, heads, head_dim]."""
    slots = metadata.slot_mapping
    blocks, offsets = slots // metadata.block_size, slots % metadata.block_size

    def read(data: Tensor, scales: Tensor | None) -> Tensor:
        values = data[blocks, :, offsets].float()
        return values if scales is None else values * scales[blocks, :, offsets].unsqueeze(-1)

    return read(layer.k, layer.k_scales), read(layer.v, layer.v_scales)
