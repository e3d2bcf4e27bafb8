"""The broker's process: `python -I -m runners broker`, started by `runners serve` through sandbox/drop.py.

Its own uid, no root, no network. What it inherits: the control socket of the launcher and, in a pipe, the permit key.
"""

import json
import os
import resource
import signal
from collections.abc import Mapping
from typing import Any

from audit.spool import Spool
from interlock.event import EventType
from killswitch.page import StopPage
from runners import deadline
from runners.broker import Broker, event_of
from runners.broker_gate import BrokerGate
from runners.checkpoints import Checkpoints
from runners.folders import folders
from runners.guest import Guest, leash
from runners.inherited import close_memory, open_control, read_key
from runners.room import Room
from runners.shared_view import SharedView
from runners.store import Store
from runners.vault import Vault


def serve(state: str, runtime: str, node: str, control_fd: int, key_fd: int) -> None:
    """Serve until the launcher goes. Raises Untrusted (root, no key), NotRecorded (no spool), Unavailable."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the kernel says when root opens a file that we have a lease on
    close_memory()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every file that a guest may write is held open
    control, key = open_control(control_fd, "broker"), read_key(key_fd)
    found = folders(state, runtime)
    spool = Spool(found.broker_spool, node, "broker")
    page = StopPage(found.page, found.stop_state)

    def lease_over(run: str, attempt: int) -> bool:
        return deadline.passed(found.deadline(run, attempt))

    def record(kind: EventType, guest: Guest, facts: Mapping[str, Any]) -> object:
        return spool.record(event_of(kind, guest, facts))

    gate = BrokerGate(SharedView(found), page.stopped, spool.record, page.epoch)
    room = Room(Store(found.store.parent), Vault(), gate, leash(page.stopped, lease_over), record)
    broker = Broker(control, key, page.stopped, page.epoch, lease_over, spool.record, Checkpoints(room))
    signal.signal(signal.SIGTERM, lambda *_: broker.end())
    try:
        control.send(json.dumps({"ok": True, "pid": os.getpid()}).encode())
        broker.serve()
    finally:
        broker.close()
        spool.close()
