"""Tiers high and critical at a control plane with a token: minted and released there, and what a token that is away
does to launch, release and running leases."""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_plane import app as joint
from control_plane import key_release, settings
from control_plane.store import run_keys
from control_plane.store.db import reading
from interlock.errors import Refusal
from kms.pkcs11 import Token
from tests.control_plane.conftest import Host, House
from tests.control_plane.conftest import state as state  # fixtures
from tests.control_plane.conftest import template as template
from tests.control_plane.test_runs import approve, code_of, plan, proof
from tests.kms.conftest import Tokens

SAVING = {"guest": True, "checkpoints": True}


@dataclass
class Site:
    """A staffed control plane with a token and one node."""

    house: House
    host: Host

    def launch(self, tier: str) -> Any:
        house, rob, wanted = self.house, self.house.people["rob"], plan(tier=tier, **SAVING)
        body = {"plan": wanted, "step_up": proof(house, rob, wanted)}
        answer = house.post("/api/runs", rob, body)
        if answer.status_code == 201 or code_of(answer) != "approval_required":
            return answer
        request = answer.json()["error"]["details"]["request"]
        approve(house, request, "olga", "omar")
        return house.post("/api/runs", rob, {**body, "approval": request})

    def key(self, run: str) -> bytes:
        return base64.b64decode(key_release.keys_for(self.house.parts, "n1", run, 1)["run_key"])


@pytest.fixture
def site(state: Path, template: Path, tokens: Tokens, token: Token) -> Iterator[Site]:
    place = {"module": str(tokens.place.module), "token": "cp", "pin_file": str(tokens.place.pin_file),
             "conf": str(tokens.place.conf)}
    shutil.copytree(template, state)
    path = state / "control" / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kms": {"pkcs11": place}}))
    parts = joint.build(replace(settings.load(state), extra_hosts=("testserver",)))
    assert joint.start(parts) == {}
    house = House(state, parts, TestClient(joint.people_app(parts)))
    house.staff()
    yield Site(house, house.host())
    house.client.close()
    parts.desk.close()
    parts.engine.dispose()


@pytest.mark.parametrize("tier", ["high", "critical"])
def test_the_key_of_a_dangerous_run_is_wrapped_by_the_token_and_the_local_provider_refuses_it(
    site: Site, tier: str
) -> None:
    answer = site.launch(tier)
    assert answer.status_code == 201, answer.text
    run = answer.json()["run"]
    with reading(site.house.parts.engine) as connection:
        kept = run_keys.one(connection, run)
    assert kept is not None
    assert (kept.wrapped.provider, kept.context.tier.value) == ("pkcs11", tier)
    local = site.house.parts.keys.named("local")
    for use in (lambda: local.unwrap(kept.wrapped, kept.context), lambda: local.generate(kept.context)):
        with pytest.raises(Refusal) as refused:
            use()
        assert refused.value.code == "denied.provider"
    with pytest.raises(Refusal) as refused:
        site.key(run)
    assert refused.value.code == "denied.lease"
    site.host.beat((run, 1))
    assert len(site.key(run)) == 32


def test_a_token_that_is_away_stops_launch_and_release_and_no_running_lease(site: Site, tokens: Tokens) -> None:
    run = site.launch("high").json()["run"]
    site.host.beat((run, 1))
    key = site.key(run)
    there, away = tokens.folder / "tokens", tokens.folder / "away"
    there.rename(away)
    try:
        assert code_of(site.launch("high")) == "unavailable.provider"
        with pytest.raises(Refusal) as refused:
            site.key(run)
        assert refused.value.code == "unavailable.provider"
        assert len(site.host.beat((run, 1))["leases"]) == 1
        assert site.house.launch(**SAVING)  # tier none needs no token
    finally:
        away.rename(there)
    assert site.key(run) == key
    assert site.launch("high").status_code == 201
