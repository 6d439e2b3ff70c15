"""A loaded model and a configuration become an engine."""

from __future__ import annotations

import torch

from pagetide_kvcache import BlockManager, KVCache
from pagetide_models import CausalLM, ModelConfig
from pagetide_runtime.config import EngineConfig
from pagetide_runtime.engine import Engine
from pagetide_runtime.memory import plan_num_blocks
from pagetide_runtime.model_runner import ModelRunner
from pagetide_scheduler import Scheduler, SchedulerConfig

__all__ = ["build_engine", "make_block_manager", "resolve_device", "resolve_max_model_len"]


def resolve_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` means here.

    Raises:
        ValueError: no such device, or none that Pagetide runs on.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}: give 'auto', 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: Pagetide runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch sees no usable NVIDIA GPU here; use device='cpu'")
    return device


def resolve_max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens a request may reach: `EngineConfig.max_model_len`, or the model's own limit.

    Raises:
        ValueError: it is more than the model's.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was trained for {limit} positions; "
            "ask for at most that"
        )
    return config.max_model_len or limit


def make_block_manager(model: CausalLM, config: EngineConfig) -> BlockManager:
    """A pool of the blocks asked for, or of those that the model's device has room for.

    Raises:
        ValueError: more context than the model has, or more blocks than memory.
    """
    num_blocks = plan_num_blocks(
        model.kv_cache_spec,
        model.device,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=resolve_max_model_len(model.config, config),
        memory_fraction=config.memory_fraction,
    )
    return BlockManager(
        num_blocks,
        model.kv_cache_spec.block_size,
        enable_prefix_cache=config.enable_prefix_cache,
    )


def build_engine(model: CausalLM, config: EngineConfig, block_manager: BlockManager) -> Engine:
    """An engine over a loaded model and a pool of blocks, which it alone may change from now on."""
    max_model_len = resolve_max_model_len(model.config, config)
    eos_token_ids = model.config.eos_token_ids
    host_blocks = None
    host_cache = None
    if config.num_host_blocks:
        host_blocks = BlockManager(
            config.num_host_blocks, block_manager.block_size, enable_prefix_cache=False
        )
        host_cache = KVCache(
            model.kv_cache_spec, config.num_host_blocks, pin_memory=model.device.type == "cuda"
        )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_overlap=config.max_plans_in_flight,
            admission=config.admission,
            preemption=config.preemption,
            vocab_size=model.config.vocab_size,
        ),
        block_manager,
        host_block_manager=host_blocks,
        eos_token_ids=eos_token_ids,
    )
    runner = ModelRunner(
        model,
        KVCache(model.kv_cache_spec, block_manager.total_blocks, device=model.device),
        num_rows=config.max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        host_cache=host_cache,
    )
    return Engine(scheduler, runner, max_plans_in_flight=config.max_plans_in_flight)
