"""The control plane as a program, with a node that speaks mutual TLS: a stop outlives SIGKILL and a restored backup.

The kernel side of a stop is the other stories' matter; here nothing but HTTP goes over the wire.
"""

import contextlib
import json
import shutil
import signal
import socket
import sqlite3
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from control_plane.certificates import key_pem
from interlock.call import new_id
from tests.control_plane.conftest import Host, House, state, template  # noqa: F401
from tests.control_plane.conftest import house as empty_house  # noqa: F401
from tests.control_plane.test_programs import served


class Site:
    """A state on disk with people and one node; each start of the program serves it anew."""

    def __init__(self, house: House) -> None:
        house.staff()
        self.host: Host = house.host()
        self.people, self.folder = house.people, house.state
        self._ports(house)
        pem = self.folder / "node.pem"
        pem.write_bytes(self.host.certificate.encode() + key_pem(self.host.key))
        self.context = ssl.create_default_context(cafile=str(self.folder / "trust" / "ca.pem"))
        self.context.load_cert_chain(pem)
        house.parts.engine.dispose()

    def _ports(self, house: House) -> None:
        path = house.state / "site.json"
        value = json.loads(path.read_text())
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            b.bind(("127.0.0.1", 0))
            value["people_port"], value["nodes_port"] = a.getsockname()[1], b.getsockname()[1]
        path.write_text(json.dumps(value))
        self.people_url = f"http://localhost:{value['people_port']}"
        self.nodes_url = f"https://localhost:{value['nodes_port']}"

    def person(self, name: str, method: str, path: str, **more: Any) -> httpx.Response:
        with httpx.Client(base_url=self.people_url, trust_env=False, timeout=30) as client:
            return client.request(method, path, headers=self.people[name].headers, **more)

    def node(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        with httpx.Client(base_url=self.nodes_url, verify=self.context, trust_env=False, timeout=30) as client:
            answer = client.request(method, path, **more)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def beat(self, *runs: str, **more: Any) -> dict[str, Any]:
        rows = [{"nonce": new_id("beat"), "run": r, "attempt": 1, "epoch": 0} for r in runs]
        return self.node("POST", "/node/heartbeat", json={
            "boot_id": "b", "nonce": new_id("snap"), "digest": "", "floor": 0, "trust_version": 3, "orders": [],
            "receipts": [], "beats": rows, **more})

    def launch(self) -> str:
        answer = self.person("rob", "POST", "/api/runs", json={"plan": {
            "argv": ["true"], "tier": "none", "tenant": "lab", "restarts": 1}})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run"])


def backup(folder: Path) -> Path:
    copy = folder / "backup.db"
    with (contextlib.closing(sqlite3.connect(folder / "control" / "control.db")) as source,
          contextlib.closing(sqlite3.connect(copy)) as target):
        source.backup(target)
    return copy


def test_a_stop_outlives_sigkill_and_a_restored_backup(empty_house: House) -> None:  # noqa: F811
    site = Site(empty_house)
    with served(site.folder) as (program, _):
        stopped, other = site.launch(), site.launch()
        assert len(site.node("GET", "/node/work?wait=5")["launches"]) == 2
        assert len(site.beat(stopped, other)["leases"]) == 2
        copy = backup(site.folder)
        heard: list[dict[str, Any]] = []
        poll = threading.Thread(target=lambda: heard.append(site.node("GET", "/node/orders?after=0&wait=20")))
        poll.start()
        order = site.person("cora", "POST", "/api/stop", json={"scope": f"run:{stopped}", "reason": "story"}).json()
        program.send_signal(signal.SIGKILL)  # right after the acknowledgement, nothing is flushed any more
        program.wait()
        poll.join()
    assert [o["order"]["format"] for o in heard[0]["orders"]] == ["interlock/stop/v1"]
    control = site.folder / "control"
    for name in ("control.db-wal", "control.db-shm"):
        (control / name).unlink(missing_ok=True)
    shutil.copyfile(copy, control / "control.db")
    with served(site.folder):
        answer = site.beat(stopped, other)
        assert [r["code"] for r in answer["refused"]] == ["stopped.order"]
        assert len(answer["leases"]) == 1
        assert len(answer["orders"]) == 1  # a node that missed the push gets the order with its beat
        again = site.person("rob", "POST", f"/api/runs/{stopped}/restart", json={})
        assert again.status_code in (409, 423)
        shown = site.person("cora", "GET", f"/api/stops/{order['order']}").json()
        assert shown["state"] != "confirmed"
        receipt = site.host.receipt(order["order"], runs=[{"run": stopped, "attempt": 1}])
        assert site.beat(receipts=[receipt.as_json()])["receipts_acked"] == [order["order"]]
        shown = site.person("cora", "GET", f"/api/stops/{order['order']}?wait=5").json()
        assert shown["state"] == "confirmed"
        status = site.person("cora", "GET", "/api/status").json()
        assert (status["grants"]["ok"], [s["order"] for s in status["stops"]]) == (True, [order["order"]])
        assert recovery_is_told(site)


def recovery_is_told(site: Site) -> bool:
    """Either the record is in the log, or the log itself refuses to go on: more records were signed than came back."""
    for _ in range(40):
        found = site.person("olga", "GET", "/api/audit/records?limit=500").json()["records"]
        faults = site.person("olga", "GET", "/api/status").json()["faults"]
        if any(r["event"]["type"] == "control.recovering" for r in found) or faults.get("tree") == "conflict.fork":
            return True
        time.sleep(0.25)
    return False
