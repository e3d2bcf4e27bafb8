"""The socket, served inside the test's process."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.errors import Conflict, Refusal, Usage, from_json
from killswitch.client import Supervisor as Client
from killswitch.door import listen, serve
from killswitch.supervisor import Supervisor

pytestmark = pytest.mark.root


@pytest.fixture
def path(sup: Supervisor) -> Iterator[Path]:
    found = sup.runtime / "supervisor.sock"
    door = listen(found)
    thread = threading.Thread(target=serve, args=(sup, door), daemon=True)
    thread.start()
    yield found
    door.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    door.close()


def test_refuses_when_the_peer_is_not_root(sup: Supervisor, path: Path) -> None:
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    os.chmod(path, 0o666)  # the kernel's word on the peer must hold by itself
    assert Client(path).ask("status")["node"] == "node-a"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setresuid(60_984, 60_984, 60_984)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(path))
        connection.send(b'{"op": "stop", "scope": "everything", "reason": ""}')
        os.write(writing, connection.recv(65536))
        os._exit(0)
    os.waitpid(pid, 0)
    reply = json.loads(os.read(reading, 65536))
    os.close(reading)
    os.close(writing)
    assert not reply["ok"]
    assert from_json(reply["error"]).code == "untrusted.peer"
    assert not sup.state.stops


def test_refuses_when_the_path_is_long_or_somebody_listens(path: Path) -> None:
    with pytest.raises(Conflict):
        listen(path)
    with pytest.raises(Usage):
        listen(path.parent / ("x" * 100))
    assert Client(path).ask("status")["complete"]


def test_descriptors_of_a_refused_request_are_closed(path: Path) -> None:
    reading, writing = os.pipe()
    Client(path).ask("status", [writing])
    for op in ("spawned", "fly"):
        with pytest.raises(Refusal):
            Client(path).ask(op, [writing], run="run_9", attempt=1)
    os.close(writing)
    assert os.read(reading, 1) == b"", "somebody still holds the writing end"
    os.close(reading)
