"""`load_model`: from a name to a model that can run."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import cast

import torch

from pagetide_kernels import AttentionShape, select_backend
from pagetide_kvcache import KVCacheSpec, KVDType
from pagetide_models.cpu_linear import pack_linears
from pagetide_models.cpu_norm import replace_rms_norms
from pagetide_models.decoder import CausalLM
from pagetide_models.options import BuildOptions, dtype_candidates
from pagetide_models.source import ModelSource, open_model
from pagetide_models.weights import Float16RangeError, fill_parameters, is_same_tensor

__all__ = ["load_model"]

_logger = logging.getLogger(__name__)


def load_model(
    source: str | os.PathLike[str] | ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    attention_backend: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    progress: bool | None = None,
) -> CausalLM:
    """Load a model for a paged KV cache.

    Args:
        source: What `open_model` takes, or what it returned.
        device: Where the weights go.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``auto``: float32 on the CPU (its cores
            multiply fp32 fastest, and dequantised weights are not rounded again); on a GPU what the
            checkpoint holds; for bfloat16 below compute capability 8.0 float16 if every weight fits
            it, else float32, and the log says which.
        attention_backend: A name of `pagetide_kernels.available_backends`, or ``auto``.
        kv_dtype: What the KV cache stores: a `pagetide_kvcache.KVDType`, or ``auto`` for `dtype`.
        block_size: Tokens in a block of the KV cache.
        progress: Draw a bar while weights are read, if the output is a terminal.

    Returns:
        The model. On the CPU in float32 its weights are packed for oneDNN.

    Raises:
        ModelError: As `open_model`, or a tensor that cannot be read.
        ValueError: A `dtype`, `kv_dtype`, `block_size` or `attention_backend` that does not exist
            or fit (`pagetide_kernels.UnsupportedError` names the alternative).
    """
    if not isinstance(source, ModelSource):
        source = open_model(source)
    source = _with_own_head_if_it_differs(source)
    device = torch.device(device)
    first, *others = dtype_candidates(dtype, source.config.dtype, device)

    def build(resolved: torch.dtype) -> CausalLM:
        options = _options(source, resolved, device, attention_backend, kv_dtype, block_size)
        model = source.architecture.build(source.config, options)
        fill_parameters(model, source, source.layout, show=bool(progress))
        return model

    try:
        model = build(first)
    except Float16RangeError as error:
        if not others:
            raise
        model = None
        _logger.warning("%s; loading it in float32 instead", str(error).partition(";")[0])
    if model is None:  # outside the handler, whose traceback keeps the first attempt in memory
        model = build(others[0])
    elif others:
        _logger.warning(
            "%s: bfloat16 needs compute capability 8.0; every weight fits float16, which is used",
            source.path,
        )
    pack_linears(model)
    replace_rms_norms(model)
    return model.eval()


def _options(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: str,
    kv_dtype: str,
    block_size: int,
) -> BuildOptions:
    config = source.config
    name = str(dtype).removeprefix("torch.") if kv_dtype == "auto" else kv_dtype
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        kv_dtype=cast(KVDType, name),
    )
    shape = AttentionShape.of_cache(spec, num_heads=config.num_heads, query_dtype=dtype)
    return BuildOptions(dtype, device, spec, select_backend(attention_backend, shape, device))


def _with_own_head_if_it_differs(source: ModelSource) -> ModelSource:
    """A checkpoint that calls its head tied and yet stores another one means the one it stores.

    transformers decides the same way; most such files simply hold the table twice.
    """
    head = source.layout.tied_head
    if head is None or head.tensor not in source.tensors:
        return source
    embedding = next(w for w in source.layout.weights if w.parameter == "embedding.weight")
    if is_same_tensor(source.tensors[head.tensor], source.tensors[embedding.tensor]):
        return source
    config = dataclasses.replace(source.config, tie_word_embeddings=False)
    return dataclasses.replace(source, config=config)
