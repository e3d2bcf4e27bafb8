"""What a launch touches is one thing for both gates."""

from interlock.call import Action
from interlock.order import Dataset, Plan
from interlock.tier import Tier
from interlock.touched import action_of, dataset_of, resource_of


def test_a_launch_is_about_its_model_else_its_pool() -> None:
    plain = Plan(("x",), Tier.HIGH, "lab", pool="gpu")
    assert resource_of(plain).path == "pool/gpu"
    modelled = Plan(("x",), Tier.CRITICAL, "lab", model="m-1", pool="gpu")
    found = resource_of(modelled, ("m-0",))
    assert (found.path, found.tenant, found.tier, found.ancestors) == ("model/m-1", "lab", Tier.CRITICAL, ("m-0",))


def test_a_dataset_is_known_by_its_path_not_by_the_requesters_name() -> None:
    plan = Plan(("x",), Tier.HIGH, "lab", datasets=(Dataset("harmless", "/srv/data/secret/"),))
    assert dataset_of(plan, plan.datasets[0]).path == "dataset/srv/data/secret"


def test_only_the_first_attempt_is_a_launch() -> None:
    assert [action_of(Plan(("x",), Tier.NONE, "lab"), n) for n in (1, 2, 7)] == [
        Action.LAUNCH, Action.RESTART, Action.RESTART]
    engine = Plan(("x",), Tier.NONE, "lab", model="m", guest=True, weights=("sha256:" + "0" * 64,), serve=True)
    assert [action_of(engine, n) for n in (1, 2)] == [Action.SERVE, Action.RESTART]
