"""An engine without a model, for the gateway's tests: the engine's own line code, and a text that it says slowly.

In one process with a test: `with StandIn(path) as engine:`; `engine.script` counts what was begun and what was ended
before its time. As one that can be killed: `python -m tests.inference.stand_in PATH`.
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from interlock.errors import NotFound, Refusal
from runners.inference.dialing import Answer, Dialer
from runners.inference.frames import Complete, Hello, Kind

VERSION = "sha256:" + "5e" * 32
END = 0x10FFFF


@dataclass
class Script:
    """What the stand-in says: `text`, a character a token, each `pace_s` after the last, the first after `think_s`.

    Counters: `asked` every call as the engine got it; `made` all tokens; `aborted_at` how many tokens each call had
    made that was ended before its time; `refusal` is raised instead of an answer.
    """

    kind: Kind = "text"
    text: str = "the quick brown fox"
    pace_s: float = 0.0
    think_s: float = 0.0
    refusal: Refusal | None = None
    asked: list[Complete] = field(default_factory=list)
    embedded: list[tuple[str, ...]] = field(default_factory=list)
    made: int = 0
    aborted_at: list[int] = field(default_factory=list)
    alive: bool = True
    _stopped: set[int] = field(default_factory=set)

    def begin(self, asked: Complete, wake: int) -> Answer:
        """Begin to say the text."""
        if self.kind != "text":
            raise NotFound("this engine makes vectors, no text", code="op")
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal
        answer = Answer(asked.id, 3, frozenset({END}), wake)
        threading.Thread(target=self._say, args=(answer, asked.max_tokens), daemon=True).start()
        return answer

    def _say(self, answer: Answer, limit: int) -> None:
        time.sleep(self.think_s)
        tokens = [*(ord(c) for c in self.text), END][:limit]
        for place, token in enumerate(tokens):
            if id(answer) in self._stopped:
                return
            self.made += 1
            try:
                answer.put([token], over=place == len(tokens) - 1)
            except OSError:  # the connection went, and its event with it
                return
            time.sleep(self.pace_s)

    def end(self, answer: Answer) -> None:
        """Stop saying it."""
        if not answer.over:
            self._stopped.add(id(answer))
            self.aborted_at.append(answer.made)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters."""
        return "".join(chr(t) for t in tokens if t != END)

    def embed(self, texts: Sequence[str], gone: Callable[[], bool]) -> tuple[list[list[float]], int]:
        """Return a vector that tells the length of each text."""
        if self.kind != "embedding":
            raise NotFound("this engine makes text, no vectors", code="op")
        self.embedded.append(tuple(texts))
        until = time.monotonic() + self.think_s
        while time.monotonic() < until and not gone():
            time.sleep(0.01)
        return [[1.0, float(len(one))] for one in texts], sum(len(one.split()) for one in texts)


class StandIn:
    """A stand-in that dials `path` while it lasts."""

    def __init__(
        self, path: str, script: Script | None = None, *, run: str = "run_1", attempt: int = 1, version: str = VERSION,
        name: str = "luna", connections: int = 4,
    ) -> None:
        self.script = script or Script()
        hello = Hello(run, attempt, version, self.script.kind, 4096, name)
        self._dialer = Dialer(path, hello, self.script, connections)

    def __enter__(self) -> Self:
        self._dialer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dialer.stop()


def main() -> None:
    """Dial until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--think", type=float, default=0.0)
    parser.add_argument("--text", default="the quick brown fox")
    parser.add_argument("--run", default="run_1")
    parser.add_argument("--version", default=VERSION)
    words = parser.parse_args()
    script = Script(text=words.text, pace_s=words.pace, think_s=words.think)
    with StandIn(words.path, script, run=words.run, version=words.version):
        threading.Event().wait()


if __name__ == "__main__":
    main()
