"""Work beside the loop: fair between runs, and every job ends in an answer."""

import select
import threading
from collections import defaultdict

import pytest

from interlock.errors import Denied, Unavailable
from runners.jobs import Job, Jobs


@pytest.fixture
def jobs():
    found = Jobs()
    yield found
    found.close()


def _await(jobs, count):
    done = []
    while len(done) < count:
        assert select.select([jobs.fd], [], [], 5)[0]
        done += jobs.done()
    return done


def test_the_jobs_of_one_run_do_not_hold_up_another(jobs):
    gates, order = defaultdict(threading.Event), []
    busy = threading.Semaphore(0)

    def work(name):
        order.append(name)
        busy.release()
        gates[name].wait(5)
        return name

    for n in range(4):
        gates[f"greedy{n}"].clear()
        jobs.begin(Job("greedy", n, lambda n=n: work(f"greedy{n}")))
    for _ in range(2):
        assert busy.acquire(timeout=5)  # both threads are at work for one run
    jobs.begin(Job("modest", "m", lambda: work("modest")))
    gates[order[0]].set()
    assert busy.acquire(timeout=5)
    assert order[2:] == ["modest"]  # the thread that is free takes it before the others of the greedy run
    for name in ("greedy0", "greedy1", "greedy2", "greedy3", "modest"):
        gates[name].set()
    done = _await(jobs, 5)
    assert sorted(str(d.mark) for d in done) == ["0", "1", "2", "3", "m"]


@pytest.mark.parametrize(("raised", "code"), [
    (Denied("no", code="x"), "denied.x"), (OSError(28, "No space left on device"), "unavailable.disk"),
])
def test_what_a_job_raises_is_its_answer(jobs, raised, code):
    def fail():
        raise raised

    jobs.begin(Job("a", "mark", fail))
    (done,) = _await(jobs, 1)
    assert (done.mark, done.result, done.refusal.code) == ("mark", None, code)


def test_a_fault_of_ours_is_printed_and_answered(jobs, capsys):
    jobs.begin(Job("a", 1, lambda: 1 // 0))
    jobs.begin(Job("a", 2, lambda: "fine"))
    found = {d.mark: d for d in _await(jobs, 2)}
    assert isinstance(found[1].refusal, Unavailable)
    assert found[2].result == "fine"
    assert "ZeroDivisionError" in capsys.readouterr().err
