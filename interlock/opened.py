"""The files of one load: opened only when the manifest names them, one at a time, each item checked. No torch here."""

import os
from dataclasses import dataclass

from interlock import layout
from interlock.asking import ask_for_file
from interlock.layout import Part
from interlock.sealed import Reader


@dataclass(frozen=True)
class Source:
    """What `load_begin` answered: the load's id, whose checkpoint it is, and the files that its manifest names."""

    load: str
    run: str
    step: int
    files: frozenset[str]


class OpenFiles:
    """Opens the files of one load, one at a time, the last one kept open.

    Args: `source` which load; only its files are asked for.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._name, self._fd = "", -1
        self._reader: Reader | None = None

    def reader(self, name: str) -> Reader:
        """Return a reader of one file; raises Untrusted when the manifest does not name it, the broker's refusal."""
        if self._reader is not None and name == self._name:
            return self._reader
        self.close()
        if name not in self._source.files:
            raise layout.broken("it names a file that the manifest does not list")
        _, fd, key = ask_for_file("load_file", load=self._source.load, name=name)
        self._fd = fd
        self._reader, self._name = Reader(fd, key, self._source.run, self._source.step), name
        return self._reader

    def close(self) -> None:
        """Close the file that is open, if there is one."""
        reader, fd = self._reader, self._fd
        self._reader, self._fd = None, -1
        try:
            if reader is not None:
                reader.close()
        finally:
            if fd >= 0:
                os.close(fd)

    def item(self, name: str, item: str) -> bytes:
        """Return the bytes of the item called `item`, with an empty offset, of file `name`."""
        reader = self.reader(name)
        for number, found in enumerate(reader.items):
            if (found.name, found.offset) == (item, ()):
                return bytes(reader.read(number))
        raise layout.broken("a file lacks the item that it is there for")

    def fill(self, name: str, offset: tuple[int, ...], part: Part, target: memoryview, start: int = 0) -> None:
        """Fill `target` from byte `start` of a part of the tensor or value `name` at `offset`."""
        reader = self.reader(part.file)
        if part.item >= len(reader.items):
            raise layout.broken("a file has fewer items than it says")
        found = reader.items[part.item]
        if (found.name, found.offset, found.size) != (name, (*offset, part.start), part.size):
            raise layout.broken("an item is another one than it says")
        reader.read_into(part.item, target, start)
