"""The saving half under torch's distributed checkpoint (DCP): plan, sealed files of each rank, commit. Needs torch.

DCP decides which rank writes which shard and carries errors from rank to rank. Everything that touches bytes is
here: no pickle, no torch.save, one thread, and nothing is committed unless every planned item was written.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from interlock import layout, tensors
from interlock.asking import ask, ask_for_file, bytes_of
from interlock.errors import Conflict, Malformed
from interlock.layout import ASSETS, METADATA, Layout, Part, Shard, TensorRow
from interlock.manifest import MAX_FILES, WEIGHTS, asset_name
from interlock.sealed import Writer

FILE: Final = 96_000_000  # bytes in the clear; with tags and index it stays below the 100 MB of a file of weights
STATE_FILE: Final = 16_000_000  # smaller: the broker checks one file while the next one is written
CHUNK: Final = 1 << 20  # what was sealed is still in the core's own cache when it is written
INDEX_ROOM: Final = 3 << 20
ROW: Final = 160
SPARE: Final = 2  # files of a rank that values and a full index may add


class SealedSavePlanner(DefaultSavePlanner):  # type: ignore[misc]
    """Plans the save of a state that `spread` took apart; values are encoded here, before anything is written.

    Args: `state` what `interlock.save` was given.
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # noqa: ARG002
        """Take the state apart; raises Malformed (``malformed.state``). What DCP passes is not looked at."""
        leaves = tensors.spread(self._state).leaves
        flat = {n: leaf.value if leaf.is_tensor else layout.encode_value(n, leaf.value) for n, leaf in leaves.items()}
        super().set_up_planner(flat, storage_meta, is_coordinator)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor, or the encoded bytes of a value: never what torch.save would make of it."""
        return self.lookup_object(write_item.index)


class _Files:
    """The sealed files of one rank, each of at most `limit` bytes in the clear: the next one begins when one is full.

    Several files let the broker check them side by side, and a rank that loads open only what it needs.
    """

    def __init__(self, save: str, run: str, step: int, limit: int) -> None:
        self._save, self._run, self._step, self._limit = save, run, step, limit
        self._prefix, self._number = "", 0
        self._name, self._fd = "", -1
        self._writer: Writer | None = None
        self._room, self._rows = 0, 0

    def named(self, prefix: str) -> "_Files":
        """Name the files ``<prefix>-0.sealed``, ``<prefix>-1.sealed``… and return self."""
        self._prefix = prefix
        return self

    def put(self, name: str, offset: tuple[int, ...], data: memoryview, *, whole: bool = False) -> tuple[Part, ...]:
        """Seal the bytes of one shard, cut where a file is full, or of a value, which is never cut (`whole`).

        Raises Malformed (``malformed.state``) when no file can hold a value.
        """
        if whole and len(data) > self._limit:
            raise Malformed(f"value {name!r} is too large", code="state", next_step="keep it as a tensor")
        parts: list[Part] = []
        at = 0
        while not parts or at < len(data):
            left = len(data) - at
            writer = self._with_room(name, left if whole else min(1, left))
            size = min(left, self._room)
            item = writer.add(name, (*offset, at), data[at : at + size])
            parts.append(Part(self._name, item, at, size))
            self._room -= size
            at += size
        return tuple(parts)

    def _with_room(self, name: str, size: int) -> Writer:
        """Return a writer with room for `size` bytes and one more row of its index."""
        row = len(name.encode()) + ROW
        if self._writer is None or self._room < size or self._rows + row > INDEX_ROOM:
            self.finish()
            self._begin(f"{self._prefix}-{self._number}.sealed")
            self._number += 1
        self._rows += row
        assert self._writer is not None
        return self._writer

    def _begin(self, name: str) -> None:
        answer, fd, key = ask_for_file("save_file", save=self._save, name=name)
        self._name, self._fd = name, fd
        self._room, self._rows = self._limit, 0
        wrapped, beside = bytes_of(answer, "wrapped"), _a_core_is_free()
        self._writer = Writer(fd, key, wrapped, self._run, self._step, CHUNK, beside=beside)

    def finish(self) -> None:
        """Finish and close the file that is open, if there is one."""
        try:
            if self._writer is not None:
                self._writer.finish(sync=False)  # the broker does that, while the next file is written
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file that is open, finished or not."""
        fd, self._fd, self._writer = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def whole(self, name: str, items: Mapping[str, bytes]) -> None:
        """Write one file of its own with named items that have an empty offset."""
        try:
            self._begin(name)
            assert self._writer is not None
            for item, data in items.items():
                self._writer.add(item, (), data)
            self.finish()
        finally:
            self.drop()


class SealedWriter(StorageWriter):  # type: ignore[misc]
    """Writes a checkpoint into files that the broker hands out, and has the broker commit it.

    Args: `run` this run's id; `step` from 0; `kind` `state` or `weights`; `assets` name → bytes, kept with weights.
    """

    def __init__(self, run: str, step: int, kind: str, assets: Mapping[str, bytes]) -> None:
        self._run, self._step, self._kind, self._assets = run, step, kind, assets
        self._rank = 0
        self.save = ""

    def reset(self, _: Any = None) -> None:
        """Nothing to do: a writer serves one save."""

    @classmethod
    def validate_checkpoint_id(cls, _: Any) -> bool:
        """Return False: there are no paths and no URLs here."""
        return False

    def set_up_storage_writer(self, _: bool, **kwargs: Any) -> None:
        """Note the rank; refuse assets that could not be kept (Malformed)."""
        self._rank = int(kwargs.get("rank", 0))
        for name, data in self._assets.items():
            asset_name(name)
            if not isinstance(data, bytes):
                raise Malformed(f"asset {name!r} is not bytes", code="state", next_step="read the file as bytes")
        if sum(map(len, self._assets.values())) > FILE:
            raise Malformed(f"assets are larger than {FILE} bytes", code="state", next_step="keep fewer")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save at the broker and tell its id to every rank. Coordinator only."""
        answer = ask("save_begin", step=self._step, kind=self._kind)
        self.save = str(answer["save"])
        limit = FILE if self._kind == WEIGHTS else _file_limit(plans)
        return [replace(plan, storage_data=(self.save, limit)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SealedSavePlanner) -> Any:
        """Write this rank's items, in this thread: what fails here fails the save."""
        save, limit = plan.storage_data
        files = _Files(save, self._run, self._step, limit).named(f"r{self._rank}")
        results = []
        try:
            for item in plan.items:
                data = planner.resolve_data(item)
                if item.type is WriteItemType.BYTE_IO:
                    parts = files.put(item.index.fqn, (), memoryview(data), whole=True)
                else:
                    host = tensors.on_host(data)
                    parts = files.put(item.index.fqn, tuple(item.index.offset), tensors.memory(host))
                results.append(WriteResult(item.index, sum(p.size for p in parts), parts))
            files.finish()
        finally:
            files.drop()
        done = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write assets and layout, then commit; the digest goes to all ranks in `metadata.planner_data`.

        Coordinator only. Raises Conflict (``conflict.items``) when other items were written than planned.
        """
        found = _layout(metadata, results)
        planned = sum(len(row.shards) for row in found.tensors.values()) + len(found.values)
        if sum(map(len, results)) != planned:
            raise _uncounted("more was written than was planned")
        if len(found.files()) + 2 > MAX_FILES:
            raise Malformed(f"a checkpoint has at most {MAX_FILES} files", code="state", next_step="use fewer ranks")
        files = _Files(self.save, self._run, self._step, FILE)
        items = sum(1 for _ in found.parts()) + len(self._assets) + 1
        if self._assets:
            files.whole(ASSETS, self._assets)
        files.whole(METADATA, {"metadata": found.encode()})
        answer = ask("save_commit", save=self.save, items=items, assets=dict.fromkeys(self._assets, ASSETS))
        metadata.planner_data = str(answer["digest"])


def _file_limit(plans: list[SavePlan]) -> int:
    """Return how large a file of training state may be: the usual size, more where the number of files would not do."""
    each = max(1, (MAX_FILES - 2) // len(plans) - SPARE)
    largest = max(sum(_size(item) for item in plan.items) for plan in plans)
    return max(STATE_FILE, -(-largest // each) if each > 1 else largest + FILE)


def _size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return int(item.tensor_data.chunk.sizes.numel()) * layout.DTYPES[tensors.NAMES[item.tensor_data.properties.dtype]]


def _a_core_is_free() -> bool:
    """Return whether each rank of this node has two cores; torchrun tells how many ranks there are."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return 2 * int(ranks if ranks.isdecimal() else 1) <= len(os.sched_getaffinity(0))


def _uncounted(message: str) -> Conflict:
    return Conflict(message, code="items", next_step="save again; a writer failed without telling")


def _layout(metadata: Metadata, results: list[list[WriteResult]]) -> Layout:
    """Return the layout of what was written; raises Conflict when an item of the plan is missing."""
    parts = {(r.index.fqn, r.index.offset): r.storage_data for rank in results for r in rank}
    rows: dict[str, TensorRow] = {}
    values: dict[str, Part] = {}
    try:
        for name, row in metadata.state_dict_metadata.items():
            if not isinstance(row, TensorStorageMetadata):
                (values[name],) = parts[name, None]
                continue
            shards = tuple(Shard(tuple(c.offsets), tuple(c.sizes), parts[name, c.offsets]) for c in row.chunks)
            rows[name] = TensorRow(tensors.NAMES[row.properties.dtype], tuple(row.size), shards)
    except KeyError:
        raise _uncounted("not every planned item was written") from None
    return Layout(rows, values)
