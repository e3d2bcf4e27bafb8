"""The engine: a run that answers calls for one version of one model. Format: docs/formats/engine.md.

`python -P -m runners.inference.engine --version DIGEST --name MODEL`, in the guest environment, inside a sandbox.
It loads the version through the run's broker, answers one call of its own, and only then dials the gateway. Nothing
listens here. It decides nothing: the gateway asks the gate, and the run dies by its lease.

Ends with 0 when it was told to (SIGTERM, a stop), 1 by a refusal, 3 when no gateway was there for 10 s, 4 when the
library that makes tokens gave up.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from typing import Any, Protocol

from interlock import wire
from interlock.errors import Halted, Malformed, Refusal, Stopped, Unavailable
from interlock.leash import RUN_ENV
from interlock.permit import boottime_ms
from interlock.terms import FULL, PROFILES
from runners.inference import frames
from runners.inference.dialing import Dialer, Model
from runners.inference.frames import Complete, Hello, Kind

ATTEMPT_ENV = "INTERLOCK_ATTEMPT"
ALONE_MS = 10_000
TURN_S = 1.0
WARM_S = 60.0
TOLD, REFUSED, ALONE, BROKEN = 0, 1, 3, 4
# before the libraries are read in: nothing is fetched, and no message of theirs quotes a prompt
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical",
         "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}


class Startable(Model, Protocol):
    """A model with a beginning and an end."""

    context: int

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End every answer."""


def warm_up(kind: Kind, model: Startable) -> None:
    """Answer one call: the first one takes longest. Raises what the model raises, Malformed when nothing came."""
    if kind == "embedding":
        model.embed(["warm"], lambda: False)
        return
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    answer = model.begin(Complete("warm", PROFILES[FULL], "warm", max_tokens=2, seed=0), wake)
    try:
        until = boottime_ms() + WARM_S * 1_000
        while not answer.over and boottime_ms() < until and model.alive:
            threading.Event().wait(0.01)
        if answer.failed or not answer.over:
            raise Malformed("the model makes no token", code="model")
    finally:
        answer.close()
        model.end(answer)
        os.close(wake)


def told_to_end() -> bool:
    """Return whether the broker says that this run is stopped. No answer is no stop: the lease decides that."""
    try:
        wire.ask("status", deadline_s=TURN_S)
    except Halted:
        return True
    except Refusal:
        return False
    return False


def watch(model: Startable, dialer: Dialer, ending: threading.Event) -> int:
    """Wait until there is a reason to end, and return its status."""
    while not ending.wait(TURN_S):
        if told_to_end():
            break
        if not model.alive:
            _complain(Unavailable("the library that makes tokens gave up", code="engine"))
            return BROKEN
        if dialer.silent_ms > ALONE_MS:
            return ALONE
    return TOLD


def serve(kind: Kind, model: Startable, hello: Hello, path: str, ending: threading.Event) -> int:
    """Warm up, dial, and answer until there is a reason to end; returns the status. Raises a Refusal."""
    dialer = Dialer(path, hello, model)
    try:
        begun = boottime_ms()
        model.start()
        warm_up(kind, model)
        _say({"ready": "engine", "kind": kind, "context": model.context, "warm_ms": boottime_ms() - begun})
        dialer.start()
        return watch(model, dialer, ending)
    finally:
        dialer.stop()
        model.stop()


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _complain(refusal: Refusal) -> None:
    sys.stderr.write(json.dumps({"error": refusal.as_json()}) + "\n")


def _hello(words: argparse.Namespace, kind: Kind, context: int) -> Hello:
    run, attempt = os.environ.get(RUN_ENV, ""), os.environ.get(ATTEMPT_ENV, "")
    if not run or not attempt.isdecimal():
        raise Malformed("an engine runs inside a run", code="run", next_step="start it by interlock model serve")
    return Hello(run, int(attempt), words.version, kind, context, words.name)


def main(argv: list[str] | None = None) -> int:
    """Load, serve, and return the status to exit with."""
    parser = argparse.ArgumentParser(prog="runners.inference.engine")
    parser.add_argument("--version", required=True)
    parser.add_argument("--name", required=True)
    words = parser.parse_args(argv)
    os.environ.update(QUIET)
    logging.disable()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    try:
        from runners.inference import weights

        loaded = weights.load(weights.Sealed(words.version))
        path = os.environ.get(frames.SOCKET_ENV) or frames.SOCKET
        return serve(loaded.kind, loaded.model, _hello(words, loaded.kind, loaded.model.context), path, ending)
    except Refusal as refusal:
        _complain(refusal)
        return REFUSED
    except Stopped:
        return TOLD


if __name__ == "__main__":
    sys.exit(main())
