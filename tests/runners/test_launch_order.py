"""A launch order: who signed it, for whom, how generous, once; and the permit right before the effect."""

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import Action
from interlock.errors import Conflict, Denied, Halted, Malformed, NotFound, Untrusted
from interlock.order import Dataset, LaunchOrder
from interlock.permit import boottime_ms, issue
from interlock.signed import GRANT, LEASE, key_id, sign
from interlock.tier import Tier
from interlock.touched import action_of, dataset_of, resource_of
from runners import dataset, launch, launch_order
from runners.admission import Admitted
from runners.launch_order import UsedOrders
from tests.runners.programs import order
from tests.runners.simulator import Site

KEY = Ed25519PrivateKey.generate()
KEYS = {key_id(KEY.public_key()): KEY.public_key()}


@pytest.fixture
def made(short) -> LaunchOrder:
    return order(Site(short / "site"), "true", datasets=(Dataset("d", "/srv/d"),), restarts=1)


def test_refuses_when_the_key_is_not_pinned(made):
    other = Ed25519PrivateKey.generate()
    with pytest.raises(Untrusted):
        launch_order.read(sign(GRANT, made.as_json(), other), KEYS, "node-1")
    with pytest.raises(Untrusted):
        launch_order.read(sign(LEASE, made.as_json(), KEY), KEYS, "node-1")
    assert launch_order.read(sign(GRANT, made.as_json(), KEY), KEYS, "node-1") == made


def test_refuses_when_it_is_for_another_node(made):
    with pytest.raises(Untrusted) as refusal:
        launch_order.read(sign(GRANT, made.as_json(), KEY), KEYS, "node-2")
    assert refusal.value.code == "untrusted.node"


@pytest.mark.parametrize("change", [
    {"lease_ms": 60_001}, {"absent_ms": 600_001}, {"attempt": 3}, {"id": "../../etc/passwd"}, {"id": "a/b/c/d/e"},
])
def test_refuses_when_it_is_more_generous_than_its_tier_or_plan(made, change):
    with pytest.raises(Malformed):
        launch_order.read(sign(GRANT, replace(made, **change).as_json(), KEY), KEYS, "node-1")
    launch_order.read(sign(GRANT, replace(made, attempt=2).as_json(), KEY), KEYS, "node-1")


def test_refuses_when_labels_and_plan_differ(made):
    for labels in (replace(made.labels, tier=Tier.HIGH), replace(made.labels, tenant="other")):
        with pytest.raises(Malformed):
            launch_order.read(sign(GRANT, replace(made, labels=labels).as_json(), KEY), KEYS, "node-1")


def test_refuses_when_the_id_was_used(short):
    (short / "u").mkdir()
    used = UsedOrders(short / "u", "boot-1")
    made = order(Site(short / "site"), "true")
    used.use(made)
    with pytest.raises(Conflict) as refusal:
        UsedOrders(short / "u", "boot-1").use(made)  # another process, later
    assert refusal.value.code == "conflict.launch_order_used"
    used.use(replace(made, id="launch_12345679"))


def test_refuses_when_a_used_order_comes_back_whose_attempt_is_on_no_book(short):
    used_folder, books = short / "u", short / "b"
    used_folder.mkdir()
    books.mkdir()
    plain = order(Site(short / "site"), "true")
    admitted, refused, torn = (replace(plain, id=f"launch_1234567{n}", run=f"run_{n}") for n in range(3))
    used = UsedOrders(used_folder, "boot-1")
    for made in (admitted, refused, torn):
        used.use(made)
    (used_folder / torn.id).write_text("")
    (books / "run_0.1.json").write_text("{}")
    (books / "run_2.1.json").write_text("{}")
    assert UsedOrders(used_folder, "boot-1").forget(books) == 0  # this boot: all stay
    later = UsedOrders(used_folder, "boot-2")
    assert later.forget(books) == 1  # the supervisor refuses that attempt by itself
    for made in (refused, torn):
        with pytest.raises(Conflict):
            later.use(made)


def _permits(made: LaunchOrder, **change: object) -> Admitted:
    def one(action: Action, resource: str, **more: object):
        fields = {"call": "c", "run": made.run, "expires_ms": boottime_ms() + 5000, "epoch": 7, "record": "r", **more}
        return issue(action=action, resource=resource, **fields)  # type: ignore[arg-type]

    data = one(Action.READ_DATA, dataset_of(made.plan, made.plan.datasets[0]).path)
    return Admitted(one(action_of(made.plan, made.attempt), resource_of(made.plan).path, **change), {"d": data})


def test_refuses_when_the_permit_is_off_right_before_the_effect(made):
    launch.check(_permits(made), made, 7)  # control
    with pytest.raises(Halted):
        launch.check(_permits(made), made, 8)  # a stop in between
    with pytest.raises(Untrusted):
        launch.check(_permits(made, expires_ms=boottime_ms() - 1), made, 7)
    with pytest.raises(Untrusted):
        launch.check(_permits(made), replace(made, attempt=2), 7)  # launch is not restart
    with pytest.raises(Untrusted):
        launch.check(Admitted(_permits(made).launch, {}), made, 7)
    swapped = Admitted(_permits(made).launch, {"d": _permits(made).launch})
    with pytest.raises(Untrusted):
        launch.check(swapped, made, 7)


def test_refuses_when_a_dataset_leaves_the_roots(short):
    root, outside = short / "root", short / "outside"
    for folder in (root, outside, short / "root2"):
        folder.mkdir()
    (root / "link").symlink_to(outside)
    roots = dataset.data_roots([str(root)])
    with pytest.raises(NotFound) as missing:
        dataset.within(str(root / "set"), roots)
    assert missing.value.code == "not_found.data"
    (root / "set").mkdir()
    assert dataset.within(str(root / "set"), roots) == root.resolve() / "set"
    for path in (outside, root / "link", root / ".." / "outside", short / "root2", "/"):
        with pytest.raises(Denied):
            dataset.within(str(path), roots)
    with pytest.raises(Denied):
        dataset.within(str(root), ())
