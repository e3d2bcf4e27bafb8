"""The socket, served inside the test's process."""

import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.errors import Conflict, Malformed, Refusal, Usage, from_json
from killswitch.client import SEALS
from killswitch.client import Supervisor as Client
from killswitch.door import hold, listen, serve
from killswitch.supervisor import Supervisor
from tests.killswitch.site import Site, short_folder

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


def test_an_answer_that_names_hundreds_of_stops_arrives(sup: Supervisor, site: Site, path: Path) -> None:
    orders = [site.stop_order("run:run_x", reason="r" * 200).as_json() for _ in range(300)]
    beats = Client(path).ask("beats")
    found = site.answer(beats, stops=site.snapshot(beats["nonce"], orders))
    assert len(json.dumps(found)) > 128 * 1024
    assert Client(path, timeout_s=30).ask("answer", answer=found)["applied"]["snapshot"]
    assert len(sup.state.stops) == 300


def test_refuses_when_a_large_answer_could_change_or_another_request_is_large(path: Path) -> None:
    small = {"op": "answer", "answer": {}}
    for seals in (0, SEALS):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.write(fd, json.dumps(small).encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        try:
            if seals:
                assert Client(path).ask("answer", [fd], memory=True)["applied"]["errors"] == []
            else:
                with pytest.raises(Malformed):
                    Client(path).ask("answer", [fd], memory=True)
        finally:
            os.close(fd)
    reading, writing = os.pipe()  # one that would block for ever
    with pytest.raises(Malformed):
        Client(path).ask("answer", [reading], memory=True)
    os.close(reading)
    os.close(writing)
    with pytest.raises(Malformed):
        Client(path).ask("stop", scope="everything", reason="x" * 200_000)


def test_refuses_when_the_one_that_listens_hangs(tmp_path: Path) -> None:
    path = short_folder() / "s"
    hung = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = []
    try:
        hung.bind(str(path))
        hung.listen(0)
        for _ in range(8):  # nobody accepts: the queue fills up
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(str(path))
        begin = time.monotonic()
        with pytest.raises(Conflict):
            listen(path)
        assert time.monotonic() - begin < 1
        assert path.exists()  # what is not ours stays
    finally:
        for connection in (hung, *waiting):
            connection.close()
        shutil.rmtree(path.parent)


def test_refuses_when_another_program_has_the_runtime_folder(tmp_path: Path) -> None:
    fd = hold(tmp_path)
    with pytest.raises(Conflict) as caught:
        hold(tmp_path)
    assert caught.value.code == "conflict.second_start"
    os.close(fd)
    os.close(hold(tmp_path))  # control: it ends with its holder


def test_descriptors_of_a_refused_request_are_closed(path: Path) -> None:
    reading, writing = os.pipe()
    Client(path).ask("status", [writing])
    for op in ("spawned", "fly"):
        with pytest.raises(Refusal):
            Client(path).ask(op, [writing], run="run_9", attempt=1)
    os.close(writing)
    assert os.read(reading, 1) == b"", "somebody still holds the writing end"
    os.close(reading)
