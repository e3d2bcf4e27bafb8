"""The engine's side of its connections: it dials, says who it is, answers one call after the other on each.

No torch here: what makes tokens or vectors is behind `Model`, so that the tests' stand-in speaks by this same code.
One thread a connection. While a call is answered it watches the line: a gateway that hangs up has aborted the call.
"""

import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from interlock.errors import Malformed, NotFound, Refusal, Unavailable
from interlock.permit import boottime_ms
from runners.inference import frames
from runners.inference.frames import Complete, Embed, Hello, Reason
from runners.inference.pieces import Pieces

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0
TURN_MS = 500
LINE_S = 30.0

Vectors = tuple[list[list[float]], int]


@dataclass(eq=False)
class Answer:
    """One call under way. `wake` is an event descriptor: readable when `take` has something; `ends` the tokens by
    which a model ends an answer itself."""

    id: str
    prompt_tokens: int
    ends: frozenset[int]
    wake: int
    made: int = 0
    over: bool = False
    failed: bool = False
    last: int = -1
    _new: deque[int] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def put(self, tokens: Sequence[int], over: bool = False, failed: bool = False) -> None:
        """Hand on further tokens (the thread that makes them); nothing happens once it is closed."""
        with self._lock:
            if self._closed:
                return
            self._new.extend(tokens)
            self.made += len(tokens)
            self.last = tokens[-1] if tokens else self.last
            self.failed = self.failed or failed
            self.over = self.over or over
            os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """Take nothing more: the descriptor's number may soon be another file's, and must not be written to."""
        with self._lock:
            self._closed = True

    def take(self) -> list[int]:
        """Return the tokens since the last time (the connection's thread)."""
        return [self._new.popleft() for _ in range(len(self._new))]

    @property
    def ended_itself(self) -> bool:
        """Return whether the model ended the answer, not a bound."""
        return self.last in self.ends


class Model(Protocol):
    """What an engine asks of its model; a model of the other kind refuses with NotFound (``not_found.op``)."""

    @property
    def alive(self) -> bool:
        """Return whether it can answer at all."""

    def begin(self, asked: Complete, wake: int) -> Answer:
        """Begin an answer in text; raises Malformed, Unavailable."""

    def end(self, answer: Answer) -> None:
        """Forget an answer; one that is not over makes no further token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def embed(self, texts: Sequence[str], gone: Callable[[], bool]) -> Vectors:
        """Return a vector of unit length for each text, and the tokens read; stops early when `gone`."""


class TextOnly:
    """The half of a model that has no vectors."""

    def embed(self, texts: Sequence[str], gone: Callable[[], bool]) -> Vectors:  # noqa: ARG002 - Model's signature
        """Refuse."""
        raise NotFound("this engine makes text, no vectors", code="op", next_step="ask a model for embeddings")


class VectorsOnly:
    """The half of a model that has no text."""

    def begin(self, asked: Complete, wake: int) -> Answer:  # noqa: ARG002 - Model's signature
        """Refuse."""
        raise NotFound("this engine makes vectors, no text", code="op", next_step="ask a model for text")

    def end(self, answer: Answer) -> None:
        """Have nothing to end."""

    def decode(self, tokens: Sequence[int]) -> str:  # noqa: ARG002 - Model's signature
        """Have no text."""
        return ""


class _Gone(Exception):
    """The gateway hung up, or spoke out of turn."""


class Connection:
    """One open line to the gateway. `calls` counts what was asked on it."""

    def __init__(self, line: socket.socket, hello: Hello, model: Model, ending: threading.Event) -> None:
        self._line, self._hello, self._model, self._ending = line, hello, model, ending
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(line, select.POLLIN | select.POLLRDHUP)
        self._poll.register(self._wake, select.POLLIN)
        self.calls = 0

    def serve(self) -> None:
        """Answer until one side goes; raises OSError, Malformed (a frame that cannot be read)."""
        try:
            frames.send(self._line, self._hello.as_json())
            while not self._ending.is_set():
                if self._line.fileno() not in {fd for fd, _ in self._poll.poll(TURN_MS)}:
                    self._rest()
                    continue
                frame = frames.receive(self._line)
                if frame is None:
                    return
                self.calls += 1
                self._call(frame)
        except _Gone:
            return
        finally:
            os.close(self._wake)

    def _call(self, frame: dict[str, Any]) -> None:
        found = frame.get("id")
        call = found if isinstance(found, str) and len(found) <= 128 else ""
        try:
            asked = frames.request(frame)
            if isinstance(asked, Embed):
                self._embed(asked)
            else:
                self._complete(asked)
        except Refusal as refusal:
            self._refuse(call, refusal)
        except (_Gone, OSError):
            raise
        except Exception as error:  # what a library raises may quote the call: only its kind is told
            sys.stderr.write(f"a call failed: {type(error).__name__}\n")
            self._refuse(call, Unavailable("the engine could not answer this call", code="engine"))

    def _refuse(self, call: str, refusal: Refusal) -> None:
        frames.send(self._line, {"id": call, "error": refusal.as_json()})

    def _embed(self, asked: Embed) -> None:
        rows, tokens = self._model.embed(asked.input, self._is_gone)
        if self._is_gone():
            raise _Gone
        frames.send(self._line, frames.vectors(asked.id, rows, tokens))

    def _complete(self, asked: Complete) -> None:
        answer = self._model.begin(asked, self._wake)
        pieces, told = Pieces(self._model.decode, asked.stop), 0
        reason: Reason = "length"
        try:
            while True:
                over = answer.over  # before `take`: what comes between the two is taken next time
                tokens = answer.take()
                told += len(tokens)
                text = pieces.push(tokens)
                if answer.failed or not self._model.alive:
                    raise Unavailable("the engine broke off this answer", code="engine")
                if over:
                    text += pieces.finish()
                if tokens or text:
                    frames.send(self._line, frames.delta(asked.id, text, len(tokens)))
                if pieces.stopped or over or self._ending.is_set():
                    break
                self._wait()
            if pieces.stopped or (over and answer.ended_itself):
                reason = "stop"
            elif not over:
                reason = "aborted"
        finally:
            answer.close()
            self._model.end(answer)
        frames.send(self._line, frames.done(asked.id, reason, answer.prompt_tokens, told))

    def _wait(self) -> None:
        """Return when there may be news of the answer; raises _Gone when the gateway hung up or speaks out of turn."""
        if self._line.fileno() in {fd for fd, _ in self._poll.poll(TURN_MS)}:
            raise _Gone
        self._rest()

    def _rest(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def _is_gone(self) -> bool:
        return self._line.fileno() in {fd for fd, _ in self._poll.poll(0)}


class Dialer:
    """Keeps an engine's connections. `silent_ms` says for how long there has been none."""

    def __init__(self, path: str, hello: Hello, model: Model, connections: int = frames.CONNECTIONS) -> None:
        self._path, self._hello, self._model = path, hello, model
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._open, self._seen_ms = 0, boottime_ms()
        self._threads = [threading.Thread(target=self._keep, name=f"line-{n}", daemon=True) for n in range(connections)]

    def start(self) -> None:
        """Dial; the model must be warm."""
        for thread in self._threads:
            thread.start()

    @property
    def silent_ms(self) -> int:
        """Return for how many milliseconds no connection was open."""
        with self._lock:
            return 0 if self._open else boottime_ms() - self._seen_ms

    def stop(self) -> None:
        """Hang up; answers under way end as aborted."""
        self._ending.set()
        until = boottime_ms() + 2_000
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0, until - boottime_ms()) / 1_000)

    def _keep(self) -> None:
        wait = FIRST_WAIT_S
        while not self._ending.is_set():
            wait = FIRST_WAIT_S if self._once() else min(2 * wait, LONGEST_WAIT_S)
            self._ending.wait(wait)

    def _once(self) -> bool:
        """Hold one connection from dialling to its end; returns whether anything was asked on it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(LINE_S)
            try:
                line.connect(self._path)
            except OSError:
                return False
            found = Connection(line, self._hello, self._model, self._ending)
            self._count(1)
            try:
                found.serve()
            except (OSError, Malformed):
                pass  # a broken line is an end like any other
            finally:
                self._count(-1)
            return found.calls > 0

    def _count(self, change: int) -> None:
        with self._lock:
            self._open += change
            self._seen_ms = boottime_ms()
