"""The loading half under torch's distributed checkpoint (DCP): what fits where, and bytes straight into it.

Needs torch. A file is opened only when the broker's answer (the verified manifest) names it, one at a time. What the
layout says of an item must be what the file itself says of it. No pickle, no torch.load.
"""

import math
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from interlock import layout, tensors
from interlock.errors import Conflict
from interlock.layout import ASSETS, METADATA, Layout, Part, Shard
from interlock.opened import OpenFiles

SHOWN = 3


class SealedLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Plans how a checkpoint fills a state, and refuses what does not fit it exactly.

    Args: `state` what `interlock.load` was given; `found` the checkpoint's layout.
    """

    def __init__(self, state: MutableMapping[str, Any], found: Layout) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state, self._found = state, found
        self._values: dict[str, Any] = {}
        self.spread = tensors.Spread({}, ())

    def set_up_planner(self, _: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the state apart; an optimizer that never stepped gets its state first when the checkpoint has one."""
        for key, value in self._state.items():
            if isinstance(value, torch.optim.Optimizer) and not value.state and self._has_below(f"{key}.state."):
                tensors.prime(value)
        self.spread = tensors.spread(self._state)
        self.state_dict = {n: leaf.value for n, leaf in self.spread.leaves.items()}
        self.original_state_dict, self.metadata, self.is_coordinator = self.state_dict, metadata, is_coordinator

    def _has_below(self, prefix: str) -> bool:
        return any(n.startswith(prefix) for names in (self._found.tensors, self._found.values) for n in names)

    def create_local_plan(self) -> LoadPlan:
        """Return the reads of this rank; raises Conflict (``conflict.layout``) when a name, shape or dtype differs."""
        known = {**self._found.tensors, **self._found.values}
        missing = [n for n in self.state_dict if n not in known]
        if missing:
            raise _differs(f"the checkpoint lacks {_some(missing)}")
        for name, value in self.state_dict.items():
            row = self._found.tensors.get(name)
            if (row is not None) is not isinstance(value, torch.Tensor):
                raise _differs(f"{name!r} is a tensor on one side and a value on the other")
            if row is not None:
                _check_fit(name, row, value)
        plan = super().create_local_plan()
        plan.planner_data = sorted(self.state_dict)
        return plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse a checkpoint of which no rank asks a part: nothing is left behind in silence. Coordinator only."""
        asked = {name for plan in global_plan for name in plan.planner_data}
        extra = [n for n in (*self._found.tensors, *self._found.values) if n not in asked]
        if extra:
            raise _differs(f"the state lacks {_some(extra)}, which the checkpoint has")
        return global_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Keep the value that `value` encodes until every read has succeeded."""
        self._values[read_item.dest_index.fqn] = layout.decode_value(value)

    def set_values(self) -> None:
        """Put the values into the state and hand their dicts to the objects that they came from."""
        for name, value in self._values.items():
            leaf = self.spread.leaves[name]
            leaf.holder[leaf.key] = value
        for owner, taken in self.spread.owners:
            owner.load_state_dict(taken)


def _differs(message: str) -> Conflict:
    return Conflict(
        message, code="layout", next_step="build the state as it was when it was saved: same model, same names",
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(n) for n in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _check_fit(name: str, row: layout.TensorRow, tensor: Any) -> None:
    size, dtype = tuple(tensor.size()), tensors.NAMES[tensor.dtype]
    if size != row.size:
        raise _differs(f"tensor {name!r} was saved with shape {list(row.size)}, here it has {list(size)}")
    if dtype != row.dtype:
        raise _differs(f"tensor {name!r} was saved as {row.dtype}, here it is {dtype}")


def metadata_of(found: Layout) -> Metadata:
    """Return DCP's own form of a layout, for its planner."""
    rows: dict[str, Any] = {name: BytesStorageMetadata() for name in found.values}
    for name, row in found.tensors.items():
        rows[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensors.DTYPES[row.dtype]), torch.Size(row.size),
            [ChunkStorageMetadata(torch.Size(s.offset), torch.Size(s.sizes)) for s in row.shards],
        )
    return Metadata(rows)


class SealedReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint through the broker.

    Args: `found` the authenticated layout; `files` where its files are opened. Raises Untrusted when the layout and
    the manifest do not name the same files.
    """

    def __init__(self, found: Layout, files: OpenFiles, listed: frozenset[str]) -> None:
        if set(found.files()) != listed - {METADATA, ASSETS}:
            raise layout.broken("it is about other files than the manifest")
        self._found, self._files = found, files
        self._order = {name: n for n, name in enumerate(found.files())}
        self._shards = {(n, s.offset): s for n, row in found.tensors.items() for s in row.shards}

    def reset(self, _: Any = None) -> None:
        """Nothing to do: a reader serves one load."""

    @classmethod
    def validate_checkpoint_id(cls, _: Any) -> bool:
        """Return False: there are no paths and no URLs here."""
        return False

    def read_metadata(self, *_: Any) -> Metadata:
        """Return the metadata; it was read and checked before, since DCP swallows what is raised here."""
        return metadata_of(self._found)

    def set_up_storage_reader(self, *_: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: SealedLoadPlanner) -> Any:
        """Read every item, file by file in the order in which they were written."""
        try:
            for item in sorted(plan.items, key=self._place):
                if item.type is LoadItemType.BYTE_IO:
                    name = item.storage_index.fqn
                    part = self._found.values[name]
                    data = bytearray(part.size)
                    self._files.fill(name, (), part, memoryview(data))
                    planner.load_bytes(item, bytes(data))
                else:
                    with torch.no_grad():
                        self._read_tensor(item, planner.resolve_tensor(item).detach())
        finally:
            self._files.close()
        done = Future()
        done.set_result(None)
        return done

    def _shard(self, item: ReadItem) -> Shard:
        return self._shards[item.storage_index.fqn, tuple(item.storage_index.offset)]

    def _place(self, item: ReadItem) -> tuple[int, int]:
        byte_io = item.type is LoadItemType.BYTE_IO
        part = self._found.values[item.storage_index.fqn] if byte_io else self._shard(item).parts[0]
        return self._order[part.file], part.item

    def _read_tensor(self, item: ReadItem, target: Any) -> None:
        """Fill `target` with a box of a shard: straight into its memory, or through a buffer of this host."""
        name, shard = item.storage_index.fqn, self._shard(item)
        box, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        span = run_of_elements(shard.sizes, box, lengths)
        if span is None:
            whole = torch.empty(shard.sizes, dtype=target.dtype)
            self._fill(name, shard, tensors.memory(whole), 0)
            for dim, (first, length) in enumerate(zip(box, lengths, strict=True)):
                whole = whole.narrow(dim, first, length)
            target.copy_(whole)
            return
        straight = tensors.is_plain_memory(target)
        buffer = target if straight else torch.empty(lengths, dtype=target.dtype)
        self._fill(name, shard, tensors.memory(buffer), span * target.element_size())
        if not straight:
            target.copy_(buffer)

    def _fill(self, name: str, shard: Shard, target: memoryview, start: int) -> None:
        for part, low, high in _cuts(shard.parts, start, start + len(target)):
            self._files.fill(name, shard.offset, part, target[low - start : high - start], low - part.start)


def _cuts(parts: tuple[Part, ...], start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
    """Yield the parts that hold bytes `start` to `stop` of a shard, each with the first and last byte it gives."""
    for part in parts:
        low, high = max(start, part.start), min(stop, part.start + part.size)
        if low < high:
            yield part, low, high


def run_of_elements(sizes: tuple[int, ...], box: tuple[int, ...], lengths: tuple[int, ...]) -> int | None:
    """Return the first element of a box that lies in one run in a contiguous shard, or None when it does not."""
    for dim in range(len(sizes)):
        if lengths[dim] != 1:
            if lengths[dim + 1 :] != sizes[dim + 1 :]:
                return None
            break
    return sum(first * math.prod(sizes[dim + 1 :]) for dim, first in enumerate(box))
