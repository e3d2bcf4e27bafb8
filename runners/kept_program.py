"""A program of ours that this node keeps running: the broker, the gateway."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from interlock.errors import Unavailable


class Line(Protocol):
    """Our end of such a program."""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""

    def end(self) -> None:
        """End it."""


L = TypeVar("L", bound=Line)


class KeptProgram(Generic[L]):
    """Starts the program, starts it again when it died, ends it.

    Args: `name` of the program; `start` makes a new one; `died` is told its name, once a death. `keep` and `end` are
    for one thread at a time, `line` is for any.
    """

    def __init__(self, name: str, start: Callable[[], L], died: Callable[[str], None]) -> None:
        self._name, self._start, self._died = name, start, died
        self._line: L | None = None

    def line(self) -> L:
        """Return the live program; raises Unavailable (``unavailable.NAME``) while it is away."""
        if self._line is None or not self._line.alive:
            raise Unavailable(f"the {self._name} is not running", code=self._name, next_step="try again in a second")
        return self._line

    def keep(self) -> None:
        """Start it unless it runs. What was connected to the one that died gets errors: its sockets died with it."""
        if self._line is not None and self._line.alive:
            return
        if self._line is not None:
            self._died(self._name)
            self._line.end()
            self._line = None
        self._line = self._start()

    def end(self) -> None:
        """End it for good."""
        if self._line is not None:
            self._line.end()
            self._line = None
