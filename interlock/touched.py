"""What a launch touches, in the words that policy files use. Both gates ask about exactly these.

The control plane asks before it grants, the node before it starts; were the two words for one thing, a rule
that denies at one of them would say nothing at the other.
"""

from interlock.call import Action, Resource
from interlock.order import Dataset, Plan


def resource_of(plan: Plan, lineage: tuple[str, ...] = ()) -> Resource:
    """Return what a launch is about: the model (with its ancestors) when the plan names one, else the pool."""
    kind, name = ("model", plan.model) if plan.model else ("pool", plan.pool)
    return Resource(kind, name, plan.tenant, plan.tier, lineage)


def dataset_of(plan: Plan, dataset: Dataset) -> Resource:
    """Return a dataset as a resource: policy knows it by its path, the name is the requester's choice."""
    return Resource("dataset", dataset.path.strip("/"), plan.tenant, plan.tier)


def action_of(plan: Plan, attempt: int) -> Action:
    """Return launch (of an engine: serve) for a first attempt, restart for a later one."""
    if attempt > 1:
        return Action.RESTART
    return Action.SERVE if plan.serve else Action.LAUNCH
