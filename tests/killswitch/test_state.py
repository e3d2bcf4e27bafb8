"""The stop set as a pure value."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.order import Mode, ResumeOrder, Scope, StopOrder
from killswitch.state import StopState, digest_of
from tests.killswitch.site import Site

LABELS = Site().labels()


def stop(id_: str, epoch: int = 1, scope: str = "everything") -> StopOrder:
    return StopOrder(id_, Scope.parse(scope), Mode.KILL, epoch, "otto", "")


def resume(*clears: str, epoch: int = 9) -> ResumeOrder:
    return ResumeOrder("resume_1", epoch, tuple(sorted(clears)), "h", ())


def test_G1_an_older_epoch_is_still_applied() -> None:
    state = StopState()
    assert state.apply_stop(stop("b", epoch=50))
    assert state.apply_stop(stop("a", epoch=1, scope="tenant:acme"))
    assert set(state.stops) == {"a", "b"}
    state.apply_resume(resume("b", epoch=51))
    assert state.stopped(LABELS) == stop("a", 1, "tenant:acme")


def test_the_same_stop_twice_changes_nothing() -> None:
    state = StopState()
    assert state.apply_stop(stop("a"))
    epoch = state.epoch
    assert not state.apply_stop(stop("a"))
    assert state.epoch == epoch


def test_G2_a_resume_lifts_only_what_it_names() -> None:
    state = StopState()
    state.apply_stop(stop("a"))
    state.apply_stop(stop("b", scope="tenant:acme"))
    assert [s.id for s in state.apply_resume(resume("a"))] == ["a"]
    assert set(state.stops) == {"b"}
    assert state.stopped(LABELS) is not None


def test_a_cleared_stop_that_arrives_late_is_a_no_op() -> None:
    state = StopState()
    state.apply_resume(resume("a"))
    assert not state.apply_stop(stop("a"))
    assert state.apply_stop(stop("b"))


def test_scopes_match_labels() -> None:
    labels = replace(LABELS, model="m3", lineage=("m1", "m2"))
    hits = ["everything", "tenant:acme", "model:m3", "model:m1", "run:run_1", "subject:svc", "subject:olga"]
    hits.append("node:node-a")
    misses = ["tenant:other", "model:m9", "run:run_2", "subject:x", "node:node-b"]
    for scope in hits + misses:
        state = StopState()
        state.apply_stop(stop("a", scope=scope))
        assert (state.stopped(labels) is not None) == (scope in hits), scope


def test_floor_rises_by_scope_and_by_the_resume() -> None:
    state = StopState()
    state.apply_stop(stop("a", epoch=7, scope="tenant:other"))
    assert state.floor(LABELS) == 0
    state.apply_stop(stop("b", epoch=5, scope="run:run_1"))
    assert state.floor(LABELS) == 5
    state.apply_resume(resume("b", epoch=8))
    assert state.floor(LABELS) == 8
    assert state.floor(replace(LABELS, run="run_2")) == 0
    assert state.top == 8


@settings(deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from("sr"), st.sampled_from(["a", "b", "c", "d"])), max_size=20))
def test_order_of_arrival_does_not_matter(steps: list[tuple[str, str]]) -> None:
    forward, backward = StopState(), StopState()
    for state, order in ((forward, steps), (backward, steps[::-1])):
        for kind, id_ in order:
            if kind == "s":
                state.apply_stop(stop(id_))
            else:
                state.apply_resume(resume(id_))
    assert set(forward.stops) == set(backward.stops)
    assert forward.cleared == backward.cleared
    assert forward.digest() == digest_of(backward.stops, backward.cleared)
