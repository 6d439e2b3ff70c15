"""Automatic prefix caching: full blocks found again by the exact tokens before and in them.

The index is one dict, `(serial of the parent block, the block's token bytes) -> block`. A block
gets a serial, never used again, when it becomes findable. A serial thus stands for one block at
one time with everything before it, so two keys are equal only if every token up to the end of the
block is equal: no hash is trusted, whatever Python's dict does underneath. When a block leaves the
index, its children's keys name a serial that no walk can arrive at any more. They need no clean-up:
nobody asks for them, so they grow old and are reused in their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from pagetide_kvcache.errors import InvariantError
from pagetide_kvcache.tokens import TOKEN_BYTES

__all__ = ["PrefixIndex", "PrefixPath"]

# The root of a path is no block: its salt stands in the serial's place, wrapped so that no salt
# can equal a serial.
Root = tuple[Hashable]
Parent = int | Root
Key = tuple[Parent, bytes]


class PrefixPath:
    """How far one sequence has walked down the index.

    The block at its end need not be the sequence's own: where two sequences computed the same
    block, only the first one's is findable, and both walk through that one. So the end can be
    evicted under a sequence that does not hold it; `serial` then differs from the block's own.

    Attributes:
        root: the salt, as a one-tuple.
        num_blocks: blocks of the sequence that lie on the path.
        block_id: the findable block at the end (meaningless while `num_blocks` is 0).
        serial: that block's serial when the path went through it, or `root`.
    """

    __slots__ = ("block_id", "num_blocks", "root", "serial")

    def __init__(self, root: Root) -> None:
        self.root = root
        self.reset()

    def reset(self) -> None:
        """Goes back to the root: the next commit walks from there."""
        self.num_blocks = 0
        self.block_id = 0
        self.serial: Parent = self.root

    def copy(self) -> PrefixPath:
        twin = PrefixPath(self.root)
        twin.num_blocks, twin.block_id, twin.serial = self.num_blocks, self.block_id, self.serial
        return twin


class PrefixIndex:
    """The findable blocks, and the order in which the unreferenced ones of them are evicted.

    Beside the dict, each block's key and serial stand in lists at its id: eight bytes a block, and
    much kinder to the processor's caches than two more dicts.

    Attributes:
        unreferenced: findable blocks that nobody holds, least recently used first.
    """

    __slots__ = ("_block_bytes", "_blocks", "_keys", "_next_serial", "_serials", "unreferenced")

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._blocks: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * total_blocks
        self._serials = [0] * total_blocks  # of those that have a key
        self._next_serial = 0
        self.unreferenced: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, root: Root, token_bytes: bytes) -> list[int]:
        """The blocks that hold the longest known prefix of these tokens (whole blocks of bytes)."""
        blocks, serials, step = self._blocks, self._serials, self._block_bytes
        parent: Parent = root
        found = []
        for offset in range(0, len(token_bytes), step):
            block_id = blocks.get((parent, token_bytes[offset : offset + step]))
            if block_id is None:
                break
            found.append(block_id)
            parent = serials[block_id]
        return found

    def path_through(self, root: Root, found: Sequence[int]) -> PrefixPath:
        """The path of a sequence that begins with the blocks that `find` found."""
        path = PrefixPath(root)
        if found:
            self._end(path, len(found), found[-1])
        return path

    def is_intact(self, path: PrefixPath) -> bool:
        """Whether the block at the path's end is still what it was when the path got there."""
        block_id = path.block_id
        return not path.num_blocks or (
            self._keys[block_id] is not None and self._serials[block_id] == path.serial
        )

    def step(self, path: PrefixPath, token_bytes: bytes) -> bool:
        """Walks an intact path on by one block with these tokens, if that block is findable."""
        block_id = self._blocks.get((path.serial, token_bytes))
        if block_id is None:
            return False
        self._end(path, path.num_blocks + 1, block_id)
        return True

    def extend(self, path: PrefixPath, token_bytes: bytes, block_ids: Sequence[int]) -> None:
        """Walks the path on through `block_ids`, making those findable that no other equals.

        A block whose tokens and past are in the index already stays unfindable, and the path goes
        through the one that is there.
        """
        blocks, keys, serials, step = self._blocks, self._keys, self._serials, self._block_bytes
        parent = path.serial
        offset = 0
        block_id = path.block_id
        is_new = False  # below a new block nothing is known
        for own_id in block_ids:
            key = (parent, token_bytes[offset : offset + step])
            offset += step
            found = None if is_new else blocks.get(key)
            if found is None:
                is_new = True
                if keys[own_id] is not None:  # findable below a parent that is gone: it moves here
                    self.remove(own_id)
                blocks[key] = block_id = own_id
                keys[own_id] = key
                serials[own_id] = parent = self._next_serial
                self._next_serial = parent + 1
            else:
                block_id = found
                parent = serials[found]
        path.num_blocks += len(block_ids)
        path.block_id = block_id
        path.serial = parent

    def extend_each(
        self,
        paths: Sequence[PrefixPath],
        indices: Sequence[int],
        block_ids: Sequence[int],
        contents: Sequence[bytes],
    ) -> list[int]:
        """`extend` for many sequences, each by one block: `block_ids[i]`, the one at `indices[i]`
        of its sequence, with the tokens `contents[i]`.

        Returns the positions of the paths that do not end just before that block, or are not
        intact; these are left alone.
        """
        blocks, keys, serials = self._blocks, self._keys, self._serials
        others = []
        position = -1
        for path, index, own_id, content in zip(paths, indices, block_ids, contents, strict=True):
            position += 1
            end, parent = path.block_id, path.serial
            is_intact = not index or (serials[end] == parent and keys[end] is not None)
            if path.num_blocks != index or not is_intact:
                others.append(position)
                continue
            key = (parent, content)
            found = blocks.get(key)
            if found is None:
                if keys[own_id] is not None:  # findable below a parent that is gone: it moves here
                    self.remove(own_id)
                blocks[key] = found = own_id
                keys[own_id] = key
                serials[own_id] = self._next_serial
                self._next_serial += 1
            path.num_blocks = index + 1
            path.block_id = found
            path.serial = serials[found]
        return others

    def shorten(self, path: PrefixPath, num_blocks: int, block_ids: Sequence[int]) -> None:
        """Ends the path after at most `num_blocks` of the sequence's own `block_ids`.

        Where the sequence's own block at the new end is not the findable one, the path goes back
        to its root and the next commit walks again.
        """
        if path.num_blocks <= num_blocks:
            return
        path.reset()
        if num_blocks and block_ids[num_blocks - 1] in self:
            self._end(path, num_blocks, block_ids[num_blocks - 1])

    def _end(self, path: PrefixPath, num_blocks: int, block_id: int) -> None:
        path.num_blocks = num_blocks
        path.block_id = block_id
        path.serial = self._serials[block_id]

    def remove(self, block_id: int) -> None:
        """Makes a findable block unfindable; its content may change from now on."""
        self._forget((block_id,))

    def retire(self, block_ids: Iterable[int]) -> list[int]:
        """Keeps those of these unreferenced blocks that are findable; returns the others."""
        keys, unreferenced = self._keys, self.unreferenced
        others = []
        for block_id in block_ids:
            if keys[block_id] is None:
                others.append(block_id)
            else:
                unreferenced[block_id] = None
        return others

    def revive(self, block_ids: Iterable[int]) -> None:
        """Takes blocks that somebody holds again out of the order of eviction."""
        unreferenced = self.unreferenced
        for block_id in block_ids:
            unreferenced.pop(block_id, None)

    def evict(self, num_blocks: int) -> list[int]:
        """Makes the least recently used unreferenced blocks unfindable and returns them."""
        pop_oldest = self.unreferenced.popitem
        evicted = [pop_oldest(last=False)[0] for _ in range(num_blocks)]
        self._forget(evicted)
        return evicted

    def _forget(self, block_ids: Iterable[int]) -> None:
        blocks, keys = self._blocks, self._keys
        for block_id in block_ids:
            key = keys[block_id]
            if key is not None:
                del blocks[key]
                keys[block_id] = None  # its serial stays behind, and is nobody's

    def verify(self) -> None:
        """Recounts the index.

        Raises:
            InvariantError: two of its books disagree, or a key is not one block long.
        """
        serials = set()
        for block_id, (key, serial) in enumerate(zip(self._keys, self._serials, strict=True)):
            if key is None:
                continue
            parent, token_bytes = key
            self._check(
                self._blocks.get(key) == block_id, f"block {block_id} is not found by its own key"
            )
            self._check(
                len(token_bytes) == self._block_bytes,
                f"block {block_id} is findable by part of its tokens",
            )
            self._check(
                0 <= serial < self._next_serial
                and not (isinstance(parent, int) and parent >= serial),
                f"block {block_id} is older than its parent",
            )
            serials.add(serial)
        self._check(
            len(serials) == len(self._blocks), "a key leads nowhere, or two blocks share a serial"
        )

    @staticmethod
    def _check(is_true: bool, what: str) -> None:
        if not is_true:
            raise InvariantError(what)
