"""The ledger on SQLite and PostgreSQL: durability, sequencing, fences, forks, intake, marks."""

import shutil
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine, delete, select, text, update

from audit import marks, merkle
from audit.leaf import GENESIS, chain, decode, encode
from audit.ledger import Ledger
from audit.spool import Spool, unshipped
from audit.treehead import open_head
from interlock.errors import Conflict, Malformed, NotFound, NotRecorded, Unavailable, Untrusted
from interlock.event import Event, EventType
from tests.audit.conftest import KEY, ORIGIN, TABLES, sqlite_engine, step

NODE_KEY = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest) -> Engine:
    """Each kind of database in turn."""
    name = "engine" if request.param == "sqlite" else "postgres_engine"
    found: Engine = request.getfixturevalue(name)
    return found


@pytest.fixture
def log(store: Engine, folder: Path) -> Ledger:
    """A ledger on it."""
    return Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "last-head")


def drain(log: Ledger) -> int:
    """Sequence until nothing is left."""
    total = 0
    while moved := log.sequence():
        total += moved
    return total


def shipment(events: list[Event], node: str = "n1", stream: str = "s-00000000-00000000") -> list[tuple[int, bytes]]:
    """Return what an honest node would send, opened first."""
    prev, made = GENESIS, []
    for seq, event in enumerate([Event(EventType.STREAM_OPENED, f"node/{node}"), *events]):
        body = encode(node, stream, seq, prev, event.canonical())
        made.append((seq, body))
        prev = chain(body)
    return made


S = "s-00000000-00000000"


def test_records_are_sequenced_signed_and_proven(log: Ledger) -> None:
    for n in range(23):
        log.record(step(n))
    assert drain(log) == 23
    head = log.head()
    assert open_head(head.note, ORIGIN, [log.signer.public]).size == 23
    rows = log.rows(limit=1000)
    assert [r.index for r in rows] == list(range(23))
    assert head.root == merkle.root([merkle.leaf_hash(r.body) for r in rows])
    for row in rows:
        merkle.verify_inclusion(row.index, 23, merkle.leaf_hash(row.body), log.proof(row.index), head.root)
    assert [r.event["facts"]["n"] for r in log.rows(run="run_1", limit=3)] == [1, 4, 7]
    assert log.rows(after=20, below=22)[0].index == 21
    with pytest.raises(Malformed):
        log.rows(body="x")
    with pytest.raises(NotFound):
        log.proof(0, 24)


def test_batches_are_consistent_with_each_other(log: Ledger) -> None:
    heads = []
    for count in (1, 3, 4, 11):
        for n in range(count):
            log.record(step(n))
        drain(log)
        heads.append(log.head())
    for old in heads:
        for new in heads:
            if old.size <= new.size:
                merkle.verify_consistency(old.size, new.size, old.root, new.root, log.consistency(old.size, new.size))


def test_a_record_in_a_transaction_lives_and_dies_with_it(log: Ledger, store: Engine) -> None:
    with store.begin() as connection:
        kept = log.record(step(1), connection)
    with store.connect() as connection, connection.begin() as undone:
        log.record(step(2), connection)
        undone.rollback()
    assert drain(log) == 1
    assert log.index_of(kept.event_id) == 0


def test_the_same_event_twice_is_one_record(log: Ledger) -> None:
    event = step(1)
    assert log.record(event) == log.record(event)
    with pytest.raises(NotRecorded) as refused:
        log.record(Event(event.type, "person/eve", id=event.id))
    assert refused.value.code == "not_recorded.twice"
    drain(log)
    log.record(event)  # its commit was answered too late the first time, say
    drain(log)
    assert len(log.rows()) == 1
    log.record(step(2))
    drain(log)
    assert [decode(r.body).seq for r in log.rows()] == [0, 1]


@pytest.mark.postgres
def test_a_lower_outbox_id_that_commits_later_is_not_lost(postgres_engine: Engine, folder: Path) -> None:
    """Only there: SQLite has one writer, so ids commit in order."""
    log = Ledger(postgres_engine, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    with postgres_engine.connect() as slow:
        slow.begin()
        early = log.record(step(1), slow)
        late = log.record(step(2))
        assert late.seq > early.seq
        assert drain(log) == 1
        slow.commit()
    assert drain(log) == 1
    assert [r.event["facts"]["n"] for r in log.rows()] == [2, 1]


def test_refuses_when_a_record_has_a_float_or_is_too_large(log: Ledger) -> None:
    for bad in (step(1, odd=0.5), step(1, big="x" * 70_000)):
        with pytest.raises(Malformed):
            log.record(bad)
    log.record(step(1, big="x" * 60_000))
    assert drain(log) == 1


def test_refuses_when_the_database_is_away(engine: Engine, folder: Path) -> None:
    log = Ledger(engine, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    log.record(step(1))
    drain(log)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE ledger_outbox"))
    with pytest.raises(NotRecorded) as refused:
        log.record(step(2))
    assert refused.value.code == "not_recorded.database"
    assert "DROP" not in str(refused.value)
    with pytest.raises(Unavailable):
        log.sequence()


# --- one sequencer ------------------------------------------------------------------------------------
def test_refuses_when_another_sequencer_has_taken_over(log: Ledger, store: Engine, folder: Path) -> None:
    log.record(step(1))
    assert log.sequence() == 1
    other = Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    assert other.lead() == 2
    log.record(step(2))
    with pytest.raises(Conflict) as refused:
        log.sequence()  # it was paused and still believes that it leads
    assert refused.value.code == "conflict.fenced"
    assert len(log.rows()) == 1
    assert other.sequence() == 1
    with pytest.raises(Conflict):
        log.sequence()
    assert other.head().size == 2


def test_refuses_when_the_database_was_restored_from_a_backup(engine: Engine, folder: Path) -> None:
    log = Ledger(engine, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    log.record(step(1))
    drain(log)
    engine.dispose()
    for name in ("control.db", "control.db-wal"):
        if (folder / name).exists():
            shutil.copy(folder / name, folder / f"old-{name}")
    log.record(step(2))
    drain(log)
    backup = sqlite_engine(folder / "old-control.db")
    restored = Ledger(backup, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    restored.record(step(3))
    with pytest.raises(Conflict) as refused:
        restored.sequence()
    assert refused.value.code == "conflict.fork"
    assert len(restored.rows()) == 1, "it must not even grow"
    backup.dispose()
    again = Ledger(engine, TABLES, KEY, ORIGIN, last_head=folder / "last-head")
    again.record(step(3))
    assert drain(again) == 1


def test_refuses_when_history_was_rewritten_under_the_signer(log: Ledger, store: Engine, folder: Path) -> None:
    for n in range(4):
        log.record(step(n))
    drain(log)
    forged = merkle.leaf_hash(b"forged")
    with store.begin() as connection:
        connection.execute(update(TABLES.leaves).where(TABLES.leaves.c.log_index == 3).values(leaf_hash=forged))
        connection.execute(delete(TABLES.nodes))
    log.record(step(5))
    with pytest.raises(Conflict) as refused:
        log.sequence()
    assert refused.value.code == "conflict.fork"
    with pytest.raises(Conflict):
        Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "last-head").lead()


def test_refuses_when_a_signed_root_is_contradicted(log: Ledger, store: Engine, folder: Path) -> None:
    """A wholly rebuilt database of the same length with other contents gets no signature."""
    for n in range(4):
        log.record(step(n))
    drain(log)
    with store.begin() as connection:
        for table in (TABLES.leaves, TABLES.nodes, TABLES.heads, TABLES.streams):
            connection.execute(delete(table))
    other = Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "elsewhere")
    for n in range(6):
        other.record(step(n + 100))
    drain(other)
    with pytest.raises(Conflict) as refused:
        Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "last-head").lead()
    assert refused.value.code == "conflict.fork"
    Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "elsewhere").lead()


def test_refuses_when_the_signers_memory_is_gone_or_of_another_key(log: Ledger, store: Engine, folder: Path) -> None:
    log.record(step(1))
    drain(log)
    with pytest.raises(Conflict) as refused:
        Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "missing").lead()
    assert refused.value.code == "conflict.last_head"
    other = Ed25519PrivateKey.generate()
    with pytest.raises(Conflict) as refused:
        Ledger(store, TABLES, other, ORIGIN, last_head=folder / "last-head").lead()
    assert refused.value.code == "conflict.last_head"
    Ledger(store, TABLES, KEY, ORIGIN, last_head=folder / "last-head").lead()


def test_a_crash_between_signing_and_storing_the_head_heals(log: Ledger, store: Engine) -> None:
    log.record(step(1))
    drain(log)
    with store.begin() as connection:
        connection.execute(delete(TABLES.heads))
    assert log.sequence() == 0
    assert log.head().size == 1


def test_many_writers_and_a_sequencer(log: Ledger) -> None:
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                log.record(step(number * 100 + i))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    moved = 0
    while any(t.is_alive() for t in threads):
        moved += log.sequence()
    moved += drain(log)
    assert (errors, moved) == ([], 40)
    rows = log.rows(limit=100)
    assert [decode(r.body).seq for r in rows] == list(range(40))


# --- records of nodes -----------------------------------------------------------------------------------
def test_a_spool_arrives_whole_and_twice_is_once(log: Ledger, folder: Path) -> None:
    spool = Spool(folder / "spool", "n1", "launcher")
    for n in range(5):
        spool.record(step(n))
    spool.close()
    [sent] = unshipped(folder / "spool")
    assert log.intake("n1", sent.stream, sent.records[:3]) == 3
    assert log.intake("n1", sent.stream, sent.records[:3]) == 3
    assert log.intake("n1", sent.stream, sent.records[1:]) == 7
    assert log.intake("n1", sent.stream, sent.records) == 7
    assert drain(log) == 7
    assert [r.body for r in log.rows()] == list(sent.bodies)


def _incidents(log: Ledger) -> list[str]:
    drain(log)
    return [r.event["facts"]["code"] for r in log.rows(type="incident.raised")]


def test_refuses_when_a_record_names_another_node_than_the_certificate(log: Ledger) -> None:
    rows = shipment([step(1)])
    with pytest.raises(Untrusted) as refused:
        log.intake("n2", S, rows)
    assert refused.value.code == "untrusted.node_id"
    mixed = [*rows, (2, encode("n2", S, 2, chain(rows[-1][1]), step(2).canonical()))]
    with pytest.raises(Untrusted):
        log.intake("n1", S, mixed)  # whole: also the good ones before it
    assert _incidents(log) == ["untrusted.node_id"] * 2
    assert log.rows(node="n1") == []
    assert log.intake("n1", S, rows) == 2


@pytest.mark.parametrize("harm", ["gap", "order", "chain", "stream", "float", "fields", "opened", "empty", "closed"])
def test_refuses_when_a_shipment_does_not_continue_its_stream(ledger: Ledger, harm: str) -> None:
    rows = shipment([step(1), step(2), step(3)])
    assert ledger.intake("n1", S, rows[:2]) == 2
    end = Event(EventType.STREAM_CLOSED, "node/n1")
    closed = encode("n1", S, 2, chain(rows[1][1]), end.canonical())
    opened = encode("n1", S, 2, chain(rows[1][1]), Event(EventType.STREAM_OPENED, "node/n1").canonical())
    bad = {
        "gap": rows[3:], "order": [rows[3], rows[2]], "empty": [],
        "chain": [(2, encode("n1", S, 2, GENESIS, step(2).canonical()))],
        "stream": [(2, encode("n1", "t", 2, chain(rows[1][1]), step(2).canonical()))],
        "float": [(2, rows[2][1].replace(b'"seq":2', b'"seq":2.0'))],
        "fields": [(2, rows[2][1].replace(b'"prev"', b'"pre"'))],
        "opened": [(2, opened)],
        "closed": [(2, closed), (3, encode("n1", S, 3, chain(closed), step(3).canonical()))],
    }[harm]
    with pytest.raises((Untrusted, Malformed, Conflict)) as refused:
        ledger.intake("n1", S, bad)
    if harm == "gap":
        assert refused.value.details == {"next_seq": 2}
    assert ledger.intake("n1", S, rows[2:]) == 4


def test_refuses_when_a_record_follows_the_closing_one(ledger: Ledger) -> None:
    rows = shipment([step(1), Event(EventType.STREAM_CLOSED, "node/n1")])
    assert ledger.intake("n1", S, rows) == 3
    more = encode("n1", S, 3, chain(rows[-1][1]), step(2).canonical())
    with pytest.raises(Untrusted) as refused:
        ledger.intake("n1", S, [(3, more)])
    assert refused.value.code == "untrusted.closed"


def test_refuses_when_a_node_uses_the_id_of_another_event(log: Ledger) -> None:
    ours = step(1)
    log.record(ours)
    for sequenced in (False, True):
        with pytest.raises(Untrusted) as refused:
            log.intake("n1", S, shipment([Event(EventType.RUN_STEP, "person/eve", id=ours.id)]))
        assert refused.value.code == "untrusted.event_id"
        if not sequenced:
            drain(log)
    assert log.intake("n1", S, shipment([step(2)])) == 2
    assert drain(log) > 0


def test_refuses_when_a_node_calls_itself_control(ledger: Ledger) -> None:
    with pytest.raises(Untrusted):
        ledger.intake("control", S, shipment([step(1)], node="control"))
    ledger.intake("n1", S, shipment([step(1)]))


def test_no_node_can_occupy_the_stream_of_another(log: Ledger) -> None:
    assert log.intake("n2", S, shipment([step(1)], node="n2")) == 2
    assert log.intake("n1", S, shipment([step(2), step(3)])) == 3


def test_clocks_of_nodes_decide_nothing(log: Ledger) -> None:
    times = [2_000_000_000_000_000, 1, 1_700_000_000_000_000]
    rows = shipment([Event(EventType.RUN_STEP, "person/ada", occurred_us=t) for t in times])
    assert log.intake("n1", S, rows) == 4
    drain(log)
    assert [r.event["occurred_us"] for r in log.rows()][1:] == times


# --- marks -----------------------------------------------------------------------------------------------
def _mark(log: Ledger, rows: list[tuple[str, int, str]], key: ec.EllipticCurvePrivateKey = NODE_KEY) -> None:
    body = marks.body(rows, "boot-1", 1)
    log.mark("n1", NODE_KEY.public_key(), body, marks.sign(key, body))


def test_a_stream_below_its_mark_is_lost_with_a_count(log: Ledger) -> None:
    rows = shipment([step(1), step(2), step(3)])
    log.intake("n1", S, rows[:2])
    _mark(log, [(S, 3, chain(rows[3][1])), ("never-00000000-00000000", 6, GENESIS)])
    pending = log.watch_streams(grace_us=60_000_000)
    assert [(g.stream, g.lost) for g in pending] == [("never-00000000-00000000", 7), (S, 2)]
    assert {g.state for g in pending} == {"pending"}
    lost = log.watch_streams(grace_us=-1)
    assert {g.state for g in lost} == {"lost"}
    log.watch_streams(grace_us=-1)
    drain(log)
    assert sorted(r.event["facts"]["lost"] for r in log.rows(type="stream.lost")) == [2, 7]
    log.intake("n1", S, rows[2:])  # late, but there
    assert [g.stream for g in log.gaps()] == ["never-00000000-00000000"]


def test_refuses_when_marks_are_not_signed_by_the_node(ledger: Ledger) -> None:
    rows = shipment([step(1)])
    ledger.intake("n1", S, rows)
    with pytest.raises(Untrusted):
        _mark(ledger, [(S, 99, GENESIS)], ec.generate_private_key(ec.SECP256R1()))
    assert ledger.gaps() == []
    _mark(ledger, [(S, 1, chain(rows[1][1]))])
    with pytest.raises(Untrusted):  # another record at that seq
        _mark(ledger, [(S, 1, GENESIS)])
    drain(ledger)
    assert len(ledger.rows(type="incident.raised")) == 1


def test_the_next_stream_tells_what_its_predecessor_lost(log: Ledger) -> None:
    rows = shipment([step(1), step(2)])
    log.intake("n1", S, rows[:2])
    before = {"predecessor": {"stream": S, "next_seq": 3, "hash": chain(rows[2][1]), "torn_bytes": 0}}
    second = "s-00000001-00000000"
    opened = encode("n1", second, 0, GENESIS, Event(EventType.STREAM_OPENED, "node/n1", facts=before).canonical())
    log.intake("n1", second, [(0, opened)])
    assert [(g.stream, g.lost) for g in log.gaps()] == [(S, 1)]
    log.intake("n1", S, rows[2:])
    assert log.gaps() == []


def test_marks_do_not_move_the_outbox(log: Ledger, store: Engine) -> None:
    _mark(log, [(S, 1, GENESIS)])
    with store.connect() as connection:
        assert connection.execute(select(TABLES.outbox)).all() == []
