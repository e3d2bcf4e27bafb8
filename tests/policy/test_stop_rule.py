"""Who may stop what, with nothing else loaded."""

import subprocess
import sys

import pytest

from interlock.errors import Denied
from interlock.order import Scope
from policy.stop_rule import may_stop, require_stop

EVERY = ["everything", "tenant:t", "model:m", "run:r", "subject:s", "node:n"]
ON_CALL = frozenset({"on_call"})


@pytest.mark.parametrize("scope", EVERY)
def test_on_call_stops_any_scope(scope: str) -> None:
    assert may_stop(ON_CALL, False, "person", Scope.parse(scope))


@pytest.mark.parametrize("scope", EVERY)
def test_refuses_when_a_stranger_stops(scope: str) -> None:
    everything_else = frozenset({"administrator", "researcher", "safety_officer", "auditor"})
    assert not may_stop(everything_else, False, "person", Scope.parse(scope))
    with pytest.raises(Denied) as caught:
        require_stop(everything_else, False, "person", Scope.parse(scope))
    assert caught.value.code == "denied.stop"
    require_stop(ON_CALL, False, "person", Scope.parse(scope))


@pytest.mark.parametrize("scope", EVERY)
def test_owner_stops_his_own_only(scope: str) -> None:
    assert may_stop(frozenset(), True, "person", Scope.parse(scope)) is (scope in ("run:r", "subject:s"))


@pytest.mark.parametrize("scope", EVERY)
@pytest.mark.parametrize("kind", ["service", "trigger", "", "unknown"])
def test_refuses_when_a_machine_stops_more_than_one(scope: str, kind: str) -> None:
    assert may_stop(ON_CALL, True, kind, Scope.parse(scope)) is (scope in ("run:r", "subject:s"))
    assert not may_stop(frozenset(), False, kind, Scope.parse(scope))


def test_the_rule_loads_nothing_that_can_fail() -> None:
    code = ("import sys; import policy.stop_rule; "
            "print(sorted(m for m in sys.modules if m.split('.')[0] in "
            "('casbin', 'sqlalchemy', 'fastapi', 'audit', 'kms') or m.startswith('policy.')))")
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['policy.stop_rule']"
