"""The supervisor's own channel, over real mutual TLS; no node program is there at all."""

import time
from collections.abc import Iterator

import pytest

from interlock.tier import Tier
from tests.killswitch.conftest import need_root
from tests.killswitch.host import Host, wait_for
from tests.killswitch.plane import Authority, Plane

pytestmark = pytest.mark.root


@pytest.fixture
def linked() -> Iterator[tuple[Host, Plane]]:
    need_root()
    host = Host()
    plane = Plane(host.site, host.folder)
    plane.join(host.state)
    host.watch()
    try:
        yield host, plane
    finally:
        host.clean()
        plane.close()


def test_heartbeats_and_orders_flow_without_a_node_program(linked: tuple[Host, Plane]) -> None:
    host, plane = linked
    wait_for(lambda: host.ask("status")["complete"])
    started = host.spawn(host.admit())
    wait_for(lambda: host.row()["state"] == "live", 3)
    deadline = host.row()["deadline_ms"]
    wait_for(lambda: host.row()["deadline_ms"] > deadline, 4)
    assert set(plane.seen[0]) == {
        "boot_id", "nonce", "digest", "floor", "trust_version", "beats", "orders", "receipts"
    }
    stop = host.site.stop_order("run:run_1")
    begin = time.monotonic()
    plane.order(stop.as_json())
    wait_for(lambda: not started.alive(), 2)
    assert time.monotonic() - begin < 2
    id_ = str(stop.body()["id"])
    wait_for(lambda: host.ask("receipts", order=id_)["result"] == "confirmed")
    wait_for(lambda: any(s["receipts"] for s in plane.seen))
    plane.order(host.site.resume([id_]).as_json())
    wait_for(lambda: host.ask("status")["stops"] == [])


def test_an_absent_control_plane_is_bridged_to_its_limit_and_not_for_critical(linked: tuple[Host, Plane]) -> None:
    host, plane = linked
    plane.lease_ms = 900
    wait_for(lambda: host.ask("status")["complete"])
    critical = host.spawn(host.admit("run_1", lease_ms=900, absent_ms=900))
    labels = host.site.labels("run_2", tier=Tier.NONE)
    none = host.spawn(host.admit("run_2", lease_ms=900, absent_ms=3_000, labels=labels))
    wait_for(lambda: {host.row("run_1")["state"], host.row("run_2")["state"]} == {"live"}, 3)
    plane.status = 503
    begin = time.monotonic()
    wait_for(lambda: not critical.alive(), 0.9 + 2)
    assert none.alive()
    wait_for(lambda: not none.alive(), 5)
    assert 2.0 < time.monotonic() - begin <= 3.0 + 2
    wait_for(lambda: {host.row("run_1")["state"], host.row("run_2")["state"]} == {"gone"})
    assert (host.row("run_1")["why"], host.row("run_2")["why"]) == ("lease", "lease")
    assert host.ask("status")["link"]["connected"] is False


def test_a_node_that_is_turned_away_is_not_bridged(linked: tuple[Host, Plane]) -> None:
    host, plane = linked
    plane.lease_ms = 900
    wait_for(lambda: host.ask("status")["complete"])
    labels = host.site.labels(tier=Tier.NONE)
    started = host.spawn(host.admit(lease_ms=900, absent_ms=60_000, labels=labels))
    wait_for(lambda: host.row()["state"] == "live", 3)
    plane.status = 403
    assert wait_for(lambda: not started.alive(), 0.9 + 2) < 2.9
    assert host.ask("status")["link"]["error"] == "bent.403"


def test_refuses_when_the_control_plane_is_of_another_site(linked: tuple[Host, Plane]) -> None:
    host, plane = linked
    wait_for(lambda: host.ask("status")["link"]["connected"])
    Authority().ca_file(host.state / "node" / "ca.pem")
    wait_for(lambda: not host.ask("status")["link"]["connected"], 4)
    plane.authority.ca_file(host.state / "node" / "ca.pem")
    wait_for(lambda: host.ask("status")["link"]["connected"], 4)
