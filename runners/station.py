"""The parts of a node that every attempt needs, joined once by runners/node.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from audit.spool import Spool
from interlock.event import Event, EventType, Written
from interlock.order import LaunchOrder
from killswitch.client import Supervisor
from killswitch.page import StopPage
from runners.broker_line import BrokerLine
from runners.deadline import Watcher
from runners.entitlements import Entitlements
from runners.folders import Folders
from runners.gateway_line import GatewayLine
from runners.survey import Survey
from runners.upstream import Upstream
from sandbox.profile import Environment, Host
from sandbox.uids import Pool


@dataclass(frozen=True)
class Station:
    """`roots` are the data roots; `survey` proves sandbox profiles and refuses those that are not; `broker` and
    `gateway` return the live program or raise Unavailable; `environments` are those that this node offers."""

    folders: Folders
    node: str
    upstream: Upstream
    supervisor: Supervisor
    page: StopPage
    spool: Spool
    entitlements: Entitlements
    pool: Pool
    host: Host
    roots: tuple[Path, ...]
    watcher: Watcher
    broker: Callable[[], BrokerLine]
    survey: Survey
    environments: Mapping[str, Environment]
    gateway: Callable[[], GatewayLine]

    def record(self, kind: EventType, order: LaunchOrder, facts: dict[str, Any]) -> Written:
        """Make one event of an attempt durable. Raises NotRecorded."""
        labels = order.labels
        told = {"attempt": order.attempt, "node": self.node, **facts}
        return self.spool.record(Event(kind, labels.subject, labels.tenant, order.run, facts=told))
