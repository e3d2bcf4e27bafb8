"""What becomes of an engine's connection between one call and the next."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from interlock.order import Labels
from interlock.tier import Tier
from policy.snapshot import ModelRow
from runners.inference import frames
from runners.inference.pool import Engine, Pool
from tests.inference.stand_in import VERSION

ROW = ModelRow("luna", "lab", Tier.NONE, VERSION, "serving", ())
DONE = frames.encode(frames.done("c1", "stop", 1, 1))
ERROR = frames.encode({"error": {"code": "malformed.request", "message": "for the next one"}})


@pytest.mark.parametrize(("answer", "whole", "lives"), [
    (DONE, True, True), (DONE + ERROR, True, False), (DONE, False, False),
])
def test_refuses_to_use_a_connection_again_that_holds_more_than_one_answer(
    tmp_path: Path, answer: bytes, whole: bool, lives: bool
) -> None:
    """What an engine sent behind an answer would be the next caller's."""

    async def call() -> bool:
        pool = Pool(lambda *_: None)
        engine = Engine("run_1", 1, os.getuid(), Labels("lab", "rob", "rob", "run_1", "n1", Tier.NONE, "luna"), VERSION)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(tmp_path / "g.sock"))
        listener.listen()
        await pool.open(engine, listener)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
                theirs.connect(str(tmp_path / "g.sock"))
                frames.send(theirs, frames.Hello("run_1", 1, VERSION, "text", 4096, "luna").as_json())
                async with asyncio.timeout(5):
                    while not engine.ready:
                        await asyncio.sleep(0)
                    line = await pool.take(ROW)
                    line.ask(b"")
                    theirs.sendall(answer)
                    await line.activity.wait()
                assert line.next() is not None
                pool.give_back(line, whole=whole)
                return line.ready and not line.busy
        finally:
            pool.close_all()

    assert asyncio.run(call()) is lives
