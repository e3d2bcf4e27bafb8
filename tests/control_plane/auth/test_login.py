"""Sign-in, codes, sessions, throttles: the traps I1-I9, I13, I21 of identity.md by name."""

import threading
import time
import unicodedata

import pytest
from sqlalchemy import text

from control_plane.auth import login, passwords, sessions, stepup, throttle, totp
from control_plane.store import people
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action
from interlock.errors import Malformed, StepUpRequired, TooMany, Untrusted
from tests.control_plane.auth.conftest import PASSWORD, REAL, House, at_once

PLAN = "sha256:" + "a" * 64


def _login(house: House, name: str = "ada", code: str | None = None, password: str = PASSWORD, **more: object):
    body = {"name": name, "password": password, **({} if code is None else {"code": code})}
    return house.post("/api/login", body, **more)


def _wrong(house: House, name: str = "ada") -> str:
    """A code that is not valid within ten steps of now."""
    phone, now = house.humans[name].phone, house.clock.timecode
    near = {phone.at(now + n) for n in range(-15, 16)}
    return next(c for c in (f"{n:06d}" for n in range(100)) if c not in near)


def test_signs_in_with_both_factors(house: House) -> None:
    done = _login(house, code=house.code(house.humans["ada"]))
    assert done.status_code == 200
    assert done.json()["factor"] is True
    assert house.get("/api/whoami", done.json()["session"]).json()["name"] == "ada"
    assert [e["facts"]["name"] for e in house.events("identity.signed_in")] == ["ada"]


def test_I1_a_code_is_accepted_once(house: House) -> None:
    code = house.code(house.humans["ada"])
    wrong = _login(house, code=_wrong(house))
    assert _login(house, code=code).status_code == 200
    wide = "".join(chr(ord(c) + 0xFEE0) for c in code)
    for again in (code, " " + code, code[:3] + " " + code[3:], code + "\n", wide):
        replay = _login(house, code=again)
        assert replay.status_code == 401
        assert replay.text == wrong.text  # the same words for wrong and replayed


def test_I1_forms_of_one_code_are_one_code(house: House) -> None:
    code = house.code(house.humans["ada"])
    wide = "".join(chr(ord(c) + 0xFEE0) for c in code)
    assert unicodedata.normalize("NFKC", wide) == code
    assert _login(house, code=f" {wide[:3]} {wide[3:]}").status_code == 200
    assert _login(house, code=code).status_code == 401


def test_I1_a_code_for_sign_in_is_no_step_up(house: House) -> None:
    code = house.code(house.humans["ada"])
    session = _login(house, code=code).json()["session"]
    body = {"action": "launch", "bound": PLAN}
    assert house.post("/api/step-up", {**body, "code": code}, session).status_code == 401
    assert house.post("/api/step-up", {**body, "code": house.code(house.humans["ada"])}, session).status_code == 200


@pytest.mark.parametrize("round_", range(3))
def test_I2_16_threads_with_one_code_are_one_sign_in(house: House, round_: int) -> None:
    """Eight addresses would be needed to pass the throttle with more; ten at most are checked, one wins."""
    code = house.code(house.humans["ada"])
    answers = at_once(16, lambda _: _login(house, code=code))
    assert [a.status_code for a in answers].count(200) == 1
    assert {a.status_code for a in answers} <= {200, 401, 429}


def test_I2_the_timecode_is_advanced_by_one_statement(house: House) -> None:
    """Below throttle and password: 16 transactions, one code, one acceptance."""
    with reading(house.engine) as connection:
        ada = people.by_name(connection, "ada")
    assert ada is not None
    code = house.code(house.humans["ada"])

    def accept(_: int) -> bool:
        try:
            with writing(house.engine) as connection:
                totp.accept(connection, house.site.kek, ada, code)
        except Untrusted:
            return False
        return True

    assert sorted(at_once(16, accept)) == [False] * 15 + [True]


def test_I3_guessing_is_cut_off_and_then_the_right_code_is_refused(house: House) -> None:
    for n in range(10):
        answer = _login(house, code=_wrong(house), headers={"x-forwarded-for": f"10.0.0.{n}"})
        assert answer.status_code == 401
    locked = _login(house, code=_wrong(house), headers={"x-forwarded-for": "192.0.2.9"})
    assert locked.status_code == 429
    assert int(locked.headers["retry-after"]) == locked.json()["error"]["details"]["retry_after_s"] > 800
    assert _login(house, code=house.code(house.humans["ada"])).status_code == 429


def test_I3_a_lock_leaves_existing_sessions_working(house: House) -> None:
    """A storm of guesses must not shut a responder out of what he holds."""
    for _ in range(11):
        last = _login(house, password="wrong " + PASSWORD)
    assert last.status_code == 429
    assert house.get("/api/whoami", house.humans["ada"].session).status_code == 200


def test_I3_a_lock_ends(house: House) -> None:
    for _ in range(11):
        last = _login(house, password="wrong " + PASSWORD)
    assert last.status_code == 429
    with writing(house.engine) as connection:
        connection.execute(text("UPDATE throttles SET locked_us = 1 WHERE locked_us > 0"))
    assert _login(house).status_code == 200


def test_I3_success_clears_the_account(house: House) -> None:
    for _ in range(3):
        for _ in range(8):
            assert _login(house, password="wrong " + PASSWORD).status_code == 401
        assert _login(house).status_code == 200


def test_I5_every_path_of_a_code_shares_one_counter(house: House) -> None:
    """Ten failures at step-up lock sign-in by code, and the other way round."""
    session = house.humans["ada"].session
    for _ in range(10):
        body = {"code": _wrong(house), "action": "launch", "bound": PLAN}
        assert house.post("/api/step-up", body, session).status_code == 401
    assert _login(house, code=house.code(house.humans["ada"])).status_code == 429


def test_I6_a_new_password_asks_the_second_factor_and_ends_sessions(house: House) -> None:
    ada = house.humans["ada"]
    login.change_password(house.site, ada.id, "another long walk there", by=ada.id)
    assert house.get("/api/whoami", ada.session).status_code == 401
    assert _login(house).status_code == 401
    half = _login(house, password="another long walk there").json()
    assert half["factor"] is False
    assert house.get("/api/whoami", half["session"]).status_code == 401


def test_I7_a_half_login_becomes_a_new_full_session(house: House) -> None:
    half = _login(house).json()["session"]
    done = house.post("/api/login", {"code": house.code(house.humans["ada"])}, half)
    assert done.status_code == 200
    assert done.json()["session"] != half
    assert house.get("/api/whoami", done.json()["session"]).status_code == 200
    again = house.post("/api/login", {"code": house.code(house.humans["ada"])}, half)
    assert again.status_code == 401


def test_I7_a_half_login_ends_after_five_wrong_codes(house: House) -> None:
    half = _login(house).json()["session"]
    codes = [house.post("/api/login", {"code": _wrong(house)}, half).status_code for _ in range(6)]
    assert codes == [401] * 5 + [429]
    gone = house.post("/api/login", {"code": house.code(house.humans["ada"])}, half)
    assert gone.json()["error"]["code"] == "untrusted.session"
    assert _login(house, code=house.code(house.humans["ada"])).status_code == 200


@pytest.mark.parametrize("header", ["a", "", "::", "127.0.0.1, 10.0.0.1", ", ".join(["10.0.0.1"] * 1000)])
def test_I8_proxy_headers_change_nothing(house: House, header: str) -> None:
    answer = _login(house, password="wrong " + PASSWORD, headers={"x-forwarded-for": header, "forwarded": header})
    assert answer.status_code == 401
    assert {e["facts"]["source_ip"] for e in house.events("identity.sign_in_refused")} == {"127.0.0.1"}


def test_I9_each_sign_in_makes_a_new_session_id(house: House) -> None:
    planted = "ils_" + "A" * 43
    first = _login(house, code=house.code(house.humans["ada"]), headers={"authorization": f"Bearer {planted}"})
    second = _login(house, code=house.code(house.humans["ada"]))
    assert len({planted, first.json()["session"], second.json()["session"]}) == 3
    assert house.get("/api/whoami", planted).status_code == 401


def test_sign_out_ends_this_session_only(house: House) -> None:
    first = house.humans["ada"].session
    second = _login(house, code=house.code(house.humans["ada"])).json()["session"]
    assert house.post("/api/logout", session=second).status_code == 200
    assert house.get("/api/whoami", second).status_code == 401
    assert house.get("/api/whoami", first).status_code == 200


def test_I10_a_role_taken_away_is_gone_at_the_next_request(lab: House) -> None:
    rob = lab.humans["rob"]
    assert lab.get("/api/whoami", rob.session).json()["roles"] == ["researcher"]
    with writing(lab.engine) as connection:  # as another process would
        people.set_roles(connection, rob.id, "lab", frozenset({"auditor"}))
    assert lab.get("/api/whoami", rob.session).json()["roles"] == ["auditor"]
    login.change_roles(lab.site, rob.id, frozenset({"researcher"}), by="test")
    assert lab.get("/api/whoami", rob.session).status_code == 401


def test_a_disabled_person_is_out_at_once_and_in_the_same_words(lab: House) -> None:
    rob, wrong = lab.humans["rob"], _login(lab, "rob", password="wrong " + PASSWORD)
    login.disable(lab.site, rob.id, by="test")
    assert lab.get("/api/whoami", rob.session).status_code == 401
    assert _login(lab, "rob", code=lab.code(rob)).text == wrong.text


def test_I13_an_unknown_name_costs_one_hash_and_gets_the_same_words(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Counting:
        def verify(self, stored: str, password: bytes) -> bool:
            asked.append(stored)
            return real.verify(stored, password)

    real = passwords._HASHER
    monkeypatch.setattr(passwords, "_HASHER", Counting())
    unknown, wrong = _login(house, "nobody"), _login(house, password="wrong " + PASSWORD)
    assert (unknown.status_code, unknown.text) == (401, wrong.text)
    assert len(asked) == 2
    assert asked[0] == passwords._NOBODY
    assert not REAL.check_needs_rehash(passwords._NOBODY)  # the same cost as a real one
    assert (REAL.time_cost, REAL.memory_cost, REAL.parallelism) == (2, 19456, 1)


def test_hashing_runs_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most, lock = 0, 0, threading.Lock()

    class Slow:
        def hash(self, _: bytes) -> str:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.02)
            with lock:
                now -= 1
            return ""

    monkeypatch.setattr(passwords, "_HASHER", Slow())
    at_once(8, lambda _: passwords.hashed("x"))
    assert most == 2


def test_I21_no_jump_of_the_clock_opens_a_replay(house: House) -> None:
    ada, clock = house.humans["ada"], house.clock
    used = ada.phone.at(clock.next())
    assert _login(house, code=used).status_code == 200
    now = clock.timecode
    for steps in (-20, -10, -1, 0, 1, 10):
        clock.timecode = now + steps
        assert _login(house, code=used).status_code == 401
    clock.timecode = now + 1
    assert _login(house, code=ada.phone.at(now + 1)).status_code == 200


@pytest.mark.parametrize(("steps", "status"), [(-2, 401), (-1, 200), (0, 200), (1, 401)])
def test_current_and_previous_step_count_never_the_next(house: House, steps: int, status: int) -> None:
    house.clock.timecode += 5
    code = house.humans["ada"].phone.at(house.clock.timecode + steps)
    assert _login(house, code=code).status_code == status


def test_a_clock_that_is_off_gets_a_hint(house: House) -> None:
    house.clock.timecode += 20
    ahead = _login(house, code=house.humans["ada"].phone.at(house.clock.timecode + 4))
    assert ahead.json()["error"]["code"] == "untrusted.factor_clock"
    assert "clock of your phone" in ahead.json()["error"]["next_step"]


def test_refuses_when_the_sealed_secret_is_moved_to_another_person(lab: House) -> None:
    """The seal is tied to its person: who can write the table cannot lend a factor."""
    with writing(lab.engine) as connection:
        mine = people.by_name(connection, "rob")
        assert mine is not None
        connection.execute(text("UPDATE people SET totp_sealed=:s, totp_last=-1 WHERE name='ada'"),
                           {"s": mine.totp_sealed})
    refused = _login(lab, code=lab.code(lab.humans["rob"]))
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "untrusted.kek"
    assert _login(lab, "rob", code=lab.code(lab.humans["rob"])).status_code == 200


@pytest.mark.parametrize(("column", "hours", "alive"), [("seen_us", 0.9, True), ("seen_us", 1.1, False),
                                                        ("created_us", 11.9, True), ("created_us", 12.1, False)])
def test_a_session_ends_idle_and_at_its_age(house: House, column: str, hours: float, alive: bool) -> None:
    with writing(house.engine) as connection:
        connection.execute(text(f"UPDATE sessions SET {column} = :t"), {"t": now_us() - int(hours * 3.6e9)})
    assert (house.get("/api/whoami", house.humans["ada"].session).status_code == 200) is alive


def test_credentials_are_kept_as_hashes_only(house: House) -> None:
    with reading(house.engine) as connection:
        rows = repr(connection.execute(text("SELECT * FROM sessions")).all())
        rows += repr(connection.execute(text("SELECT * FROM people")).all())
        rows += repr(connection.execute(text("SELECT body FROM ledger_outbox")).all())
    ada = house.humans["ada"]
    assert ada.session not in rows
    assert sessions.hash_of(ada.session) in rows
    assert ada.phone.totp.secret not in rows
    assert PASSWORD not in rows


def test_failed_sign_ins_carry_the_claimed_name_escaped(house: House) -> None:
    _login(house, "<img src=x onerror=alert(1)>\u202e", password="wrong " + PASSWORD)
    actors = [e["actor"] for e in house.events("identity.sign_in_refused")]
    assert actors == ["<img src=x onerror=alert(1)>\\u202e"]


@pytest.mark.parametrize("password", ["elevenchars", "aaaaaaaaaaaaaa", "abcabcabcabc", "passwordpassword",
                                      "administrator123", "123456789012", "ada123456789", "tab\tin the middle",
                                      "x" * 1025])
def test_refuses_when_a_password_is_weak(password: str) -> None:
    with pytest.raises(Malformed) as caught:
        passwords.check_new(password, "ada")
    assert caught.value.code == "malformed.password"
    assert password not in str(caught.value)
    passwords.check_new(PASSWORD, "ada")


def test_a_proof_serves_one_session_action_digest_and_use(lab: House) -> None:
    """What stepup.shown and stepup.use refuse, one difference at a time."""
    rob = lab.humans["rob"]
    answer = lab.post("/api/step-up", {"code": lab.code(rob), "action": "launch", "bound": PLAN}, rob.session)
    proof, session = answer.json()["step_up"], sessions.hash_of(rob.session)
    other = "sha256:" + "b" * 64
    with writing(lab.engine) as connection:
        for wrong in ((proof, "sha256:x", Action.LAUNCH, PLAN), (proof, session, Action.RESTART, PLAN),
                      (proof, session, Action.LAUNCH, other), ("stp_x", session, Action.LAUNCH, PLAN)):
            with pytest.raises(StepUpRequired):
                stepup.shown(connection, *wrong)
        good = stepup.shown(connection, proof, session, Action.LAUNCH, PLAN)
        stepup.use(connection, good)
        with pytest.raises(StepUpRequired):
            stepup.use(connection, good)
        with pytest.raises(StepUpRequired):
            stepup.shown(connection, proof, session, Action.LAUNCH, PLAN)


@pytest.mark.parametrize(("age_s", "good"), [(299, True), (301, False), (-5, False)])
def test_a_proof_lives_five_minutes(lab: House, age_s: int, good: bool) -> None:
    rob = lab.humans["rob"]
    answer = lab.post("/api/step-up", {"code": lab.code(rob), "action": "launch", "bound": PLAN}, rob.session)
    with writing(lab.engine) as connection:
        connection.execute(text("UPDATE step_ups SET at_us = :t"), {"t": now_us() - age_s * 10**6})
        try:
            stepup.shown(connection, answer.json()["step_up"], sessions.hash_of(rob.session), Action.LAUNCH, PLAN)
        except StepUpRequired:
            assert not good
        else:
            assert good


def test_throttle_charges_before_it_checks(house: House) -> None:
    """40 parallel guesses: at most ten were ever compared."""
    def guess(_: int) -> bool:
        try:
            throttle.charge(house.engine, throttle.for_code("per_x", "192.0.2.1"))
        except TooMany:
            return False
        return True

    assert sum(at_once(40, guess)) == 10


def test_an_attempt_that_waited_for_the_lock_opens_no_new_window(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts reach the counter in another order than they began; an earlier time must not reset it."""
    begun = time.time_ns() // 1000
    times = iter(range(begun, begun - 40, -1))
    monkeypatch.setattr(throttle, "now_us", lambda: next(times))

    def guess() -> bool:
        try:
            throttle.charge(house.engine, (throttle.Limit("code:per_x", 10),))
        except TooMany:
            return False
        return True

    assert sum(guess() for _ in range(40)) == 10
