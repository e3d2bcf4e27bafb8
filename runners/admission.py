"""From a launch order to permits: the node's own gate, asked for the launch and for every dataset.

The control plane has asked its gate already; this one asks again with what THIS host knows: its stop page, its
bundle, its snapshot, its spool. Either can say no.
"""

from dataclasses import dataclass

from interlock.call import Action, Call, Resource, Subject
from interlock.order import LaunchOrder
from interlock.permit import Permit
from interlock.touched import action_of, dataset_of, resource_of
from policy.gate import Gate
from runners.station import Station


@dataclass(frozen=True)
class Admitted:
    """The permits of one attempt; `data` maps a dataset's name to its permit."""

    launch: Permit
    data: dict[str, Permit]


def _call(order: LaunchOrder, action: Action, resource: Resource) -> Call:
    labels = order.labels
    subject = Subject(labels.subject, labels.tenant, person=labels.owner)
    return Call(action, subject, resource, run=order.run, bound=order.plan.digest())


def ask(station: Station, order: LaunchOrder) -> Admitted:
    """Return the permits, each with its durable record; raises the first refusal of the gate."""
    gate = Gate(
        decide=station.entitlements.decide, stopped=lambda _: station.page.stopped(order.labels),
        record=station.spool.record, epoch=station.page.epoch,
    )
    facts = station.entitlements.facts(order)
    data = {
        d.name: gate.ask(_call(order, Action.READ_DATA, dataset_of(order.plan, d)), facts)
        for d in order.plan.datasets
    }
    # last, so that the few seconds of its life are not spent on the others
    about = resource_of(order.plan, order.labels.lineage)
    launch = gate.ask(_call(order, action_of(order.plan, order.attempt), about), facts)
    return Admitted(launch, data)
