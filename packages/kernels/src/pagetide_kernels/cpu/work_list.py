"""What is derived once a step: which sequences go together, what they gather, what is masked.

Sequences with few queries (decode, drafts) are batched: equal query lengths, similar key lengths,
padded to the longest of the batch. A sequence with many queries (prefill) goes alone, in tiles of
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagetide_kernels.cpu.tiles import Scratch
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

__all__ = ["Chunk", "LongQuery", "Plan", "ShortQueryBatch", "WorkList"]

# Beyond this many queries a batched product no longer gains over a sequence's own.
MAX_BATCHED_QUERY_LEN = 16
# Queries of a prefill sequence that share a product; it skips the keys behind the last of them.
QUERY_TILE = 256
# Elements gathered at a time: 4 MB of float32 stay in the cores' caches until they are used.
CHUNK_ELEMENTS = 1 << 20
# Padding elements of K that cost as much time as starting another batch (measured: about 70 us).
BATCH_START_ELEMENTS = 190_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive blocks of every sequence of a batch, gathered together.

    Attributes:
        start: first key column of the batch that the chunk holds.
        stop: the column behind its last.
        tile_ids: int64 [B * num_kv_heads * blocks], ``block_id * num_kv_heads + head``.
        padding_ids: int64, the gathered keys ``(sequence, head, key)`` below ``stop`` that lie
            beyond their sequence; their slots may hold anything, NaN included, and must be zeroed.
            Keys that were gathered beyond ``stop`` are cut off instead.
    """

    start: int
    stop: int
    tile_ids: Tensor
    padding_ids: Tensor


@dataclass(frozen=True, slots=True)
class ShortQueryBatch:
    """``num_seqs`` sequences of ``query_len`` queries each, padded to the longest.

    Attributes:
        tokens: the step's tokens of the batch, sequence by sequence: a slice, or int64 ids.
        mask: float32 [num_seqs, query_len, keys], 0 where visible, else -inf; None where every
            query sees every key, as a lone sequence does that decodes.
    """

    tokens: slice | Tensor
    num_seqs: int
    query_len: int
    mask: Tensor | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class LongQuery:
    """One sequence of many queries.

    Attributes:
        tokens: the step's tokens of the sequence.
        first_key: position of the first key gathered, the first of a block.
        seq_len: keys of the sequence.
        tile_ids: int64 [num_kv_heads * blocks], ``block_id * num_kv_heads + head``.
    """

    tokens: slice
    first_key: int
    seq_len: int
    tile_ids: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's attention under one window.

    Attributes:
        batches: the sequences of few queries.
        long_queries: the sequences of many.
        causal_mask: float32 [QUERY_TILE, longest key range], 0 where visible, else -inf; its last
            row
            sees its last column, and every tile's mask is its lower right corner.
    """

    batches: tuple[ShortQueryBatch, ...]
    long_queries: tuple[LongQuery, ...]
    causal_mask: Tensor


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence on the host."""

    row: int
    stop: int
    query_len: int
    seq_len: int

    @property
    def start(self) -> int:
        return self.stop - self.query_len

    def first_block(self, window: int | None, block_size: int) -> int:
        """The first block that any of its queries sees."""
        if window is None:
            return 0
        return max(0, self.seq_len - self.query_len - window + 1) // block_size


@dataclass(frozen=True, slots=True)
class WorkList:
    """The ``cpu`` back end's view of one step. Made by ``build``.

    Attributes:
        shape: the shape it was made for.
        num_tokens: tokens that belong to a sequence.
        is_every_token_attended: whether attention writes every one of the step's tokens.
        slot_block_ids: int64 [num_tokens], where ``store_kv`` writes.
        slot_offsets: int64 [num_tokens].
        slot_rows: int64 [num_tokens * num_kv_heads], the same as rows of the flattened cache.
    """

    shape: AttentionShape
    num_tokens: int
    is_every_token_attended: bool
    slot_block_ids: Tensor
    slot_offsets: Tensor
    slot_rows: Tensor
    scratch: Scratch
    _sequences: tuple[_Sequence, ...]
    _block_tables: Tensor
    _plans: dict[int | None, Plan] = field(default_factory=dict)

    @classmethod
    def build(cls, metadata: AttentionMetadata, shape: AttentionShape) -> WorkList:
        """Read the step's tensors."""
        stops = metadata.query_start_loc.tolist()
        sequences = tuple(
            # Queries before position 0 see no key: their output stays zero.
            _Sequence(row, stop, min(stop - start, seq_len), seq_len)
            for row, start, stop, seq_len in zip(
                metadata.rows.tolist(), stops, stops[1:], metadata.seq_lens.tolist(), strict=False
            )
            if stop > start and seq_len > 0
        )
        slots = metadata.slot_mapping[: stops[-1]]
        block_ids, offsets = slots // shape.block_size, slots % shape.block_size
        tile_ids = block_ids.unsqueeze(1) * shape.num_kv_heads + torch.arange(shape.num_kv_heads)
        return cls(
            shape=shape,
            num_tokens=stops[-1],
            is_every_token_attended=sum(s.query_len for s in sequences) == metadata.num_tokens,
            slot_block_ids=block_ids,
            slot_offsets=offsets,
            slot_rows=(tile_ids * shape.block_size + offsets.unsqueeze(1)).view(-1),
            scratch=Scratch(),
            _sequences=sequences,
            _block_tables=metadata.block_tables,
        )

    def serves(self, shape: AttentionShape) -> bool:
        """Whether indices made for this list's shape are those of ``shape``."""
        mine = self.shape
        return (mine.num_kv_heads, mine.block_size) == (shape.num_kv_heads, shape.block_size)

    def plan(self, window: int | None) -> Plan:
        """The plan under ``window``, made when the step first asks for it."""
        plan = self._plans.get(window)
        if plan is None:
            long = [s for s in self._sequences if s.query_len > MAX_BATCHED_QUERY_LEN]
            short = [s for s in self._sequences if s.query_len <= MAX_BATCHED_QUERY_LEN]
            plan = Plan(
                batches=tuple(self._batch(batch, window) for batch in self._partition(short)),
                long_queries=tuple(self._long_query(s, window) for s in long),
                causal_mask=_causal_mask(max((s.seq_len for s in long), default=0), window),
            )
            self._plans[window] = plan
        return plan

    def _partition(self, sequences: list[_Sequence]) -> Iterator[list[_Sequence]]:
        """Batches of equal query lengths; a new one where padding costs more than starting it."""
        affordable = BATCH_START_ELEMENTS // (self.shape.num_kv_heads * self.shape.head_dim)
        batch: list[_Sequence] = []
        padding = 0
        for sequence in sorted(sequences, key=lambda s: (s.query_len, -s.seq_len)):
            if batch:
                padding += batch[0].seq_len - sequence.seq_len
                if padding > affordable or sequence.query_len != batch[0].query_len:
                    yield sorted(batch, key=lambda s: s.stop)
                    batch, padding = [], 0
            batch.append(sequence)
        if batch:
            yield sorted(batch, key=lambda s: s.stop)

    def _batch(self, sequences: list[_Sequence], window: int | None) -> ShortQueryBatch:
        block_size, num_kv_heads = self.shape.block_size, self.shape.num_kv_heads
        query_len = sequences[0].query_len
        rows = torch.tensor([s.row for s in sequences])
        seq_lens = torch.tensor([s.seq_len for s in sequences]).unsqueeze(1)
        first_blocks = torch.tensor(
            [s.first_block(window, block_size) for s in sequences]
        ).unsqueeze(1)
        last_blocks = (seq_lens - 1) // block_size
        num_blocks = int((last_blocks - first_blocks).max()) + 1
        num_keys = int((seq_lens - first_blocks * block_size).max())

        # A shorter sequence repeats its last block, never one that it does not own.
        columns = torch.minimum(first_blocks + torch.arange(num_blocks), last_blocks)
        block_ids = self._block_tables[rows.unsqueeze(1), columns].long()
        tile_ids = block_ids.unsqueeze(1) * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)

        keys = first_blocks * block_size + torch.arange(num_keys)
        queries = (seq_lens - query_len + torch.arange(query_len)).unsqueeze(2)
        is_hidden = keys.unsqueeze(1) > queries
        if window is not None:
            is_hidden |= keys.unsqueeze(1) <= queries - window
        is_padding = torch.zeros(len(sequences), num_kv_heads, num_blocks * block_size).bool()
        is_padding[:, :, :num_keys] = (keys >= seq_lens).unsqueeze(1)

        block_elements = tile_ids[:, :, 0].numel() * block_size * self.shape.head_dim
        num_chunks = -(-num_blocks * block_elements // CHUNK_ELEMENTS)
        blocks_a_chunk = -(-num_blocks // num_chunks)
        chunks = []
        for first in range(0, num_blocks, blocks_a_chunk):
            last = min(first + blocks_a_chunk, num_blocks)
            start, stop = first * block_size, last * block_size
            chunks.append(
                Chunk(
                    start=start,
                    stop=min(stop, num_keys),
                    tile_ids=tile_ids[:, :, first:last].reshape(-1),
                    padding_ids=is_padding[:, :, start:stop].reshape(-1).nonzero().view(-1),
                )
            )
        return ShortQueryBatch(
            tokens=_token_ids(sequences),
            num_seqs=len(sequences),
            query_len=query_len,
            mask=_additive(is_hidden) if is_hidden.any() else None,
            chunks=tuple(chunks),
        )

    def _long_query(self, sequence: _Sequence, window: int | None) -> LongQuery:
        block_size, num_kv_heads = self.shape.block_size, self.shape.num_kv_heads
        first = sequence.first_block(window, block_size)
        last = -(-sequence.seq_len // block_size)
        block_ids = self._block_tables[sequence.row, first:last].long()
        return LongQuery(
            tokens=slice(sequence.start, sequence.stop),
            first_key=first * block_size,
            seq_len=sequence.seq_len,
            tile_ids=(block_ids * num_kv_heads + torch.arange(num_kv_heads).unsqueeze(1)).view(-1),
        )


def _token_ids(sequences: list[_Sequence]) -> slice | Tensor:
    """The tokens of the sequences: a slice where they are neighbours, which spares copies."""
    start, stop = sequences[0].start, sequences[-1].stop
    if stop - start == sum(s.query_len for s in sequences):
        return slice(start, stop)
    return torch.tensor([token for s in sequences for token in range(s.start, s.stop)])


def _additive(is_hidden: Tensor) -> Tensor:
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -torch.inf)


def _causal_mask(num_keys: int, window: int | None) -> Tensor:
    keys = torch.arange(num_keys)
    queries = torch.arange(num_keys - QUERY_TILE, num_keys).unsqueeze(1)
    is_hidden = keys > queries
    if window is not None:
        is_hidden |= keys <= queries - window
    return _additive(is_hidden)
