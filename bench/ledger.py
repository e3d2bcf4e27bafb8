"""What tamper evidence costs: append through the ledger against the same store's plain batched inserts, and
group commit of the spool with 1, 16 and 64 producers. Writes bench/out/ledger.json.

    python bench/ledger.py [--records 4000] [--url postgresql+psycopg://…]

The ratio is what counts; the absolute numbers belong to the machine. Each number is the median of 3 runs.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    insert,
)

from audit.leaf import GENESIS, chain, encode
from audit.ledger import Ledger
from audit.spool import Spool
from audit.tables import define
from interlock.event import Event, EventType

METADATA = MetaData()
TABLES = define(METADATA)
BLOBS = Table("blobs", METADATA, Column("id", Integer, primary_key=True), Column("body", LargeBinary, nullable=False))
# An ordinary audit table: the same columns and indexes as our leaves, without hash, chain, tree or outbox.
PLAIN = Table(
    "plain", METADATA, Column("id", Integer, primary_key=True),
    Column("event_id", String(64), nullable=False, unique=True), Column("body", LargeBinary, nullable=False),
    Column("received_us", BigInteger, nullable=False), Column("type", String(64), nullable=False, index=True),
    Column("actor", String(256), nullable=False), Column("tenant", String(64), nullable=False),
    Column("run", String(64), nullable=False, index=True), Column("node", String(64), nullable=False),
    Column("stream", String(96), nullable=False), Column("seq", BigInteger, nullable=False),
    Column("occurred_us", BigInteger, nullable=False),
)
RUNS = 3


def _event(number: int) -> Event:
    return Event(
        EventType.CALL_DECIDED, "person/ada", tenant="lab", run=f"run_{number % 50:032x}", call=f"call_{number:032x}",
        facts={"action": "infer", "effect": "allow", "code": "allowed", "bundle": "sha256:" + "ab" * 32,
               "rules": ["researchers may infer"], "duration_us": number, "input": "sha256:" + "cd" * 32},
    )


def _shipments(records: int, size: int) -> list[list[tuple[int, bytes]]]:
    rows, prev = [], GENESIS
    for seq in range(records):
        made = _event(seq) if seq else Event(EventType.STREAM_OPENED, "node/n1")
        body = encode("n1", "s", seq, prev, made.canonical())
        rows.append((seq, body))
        prev = chain(body)
    return [rows[i : i + size] for i in range(0, records, size)]


def _engine(url: str, folder: Path) -> Engine:
    if url:
        return create_engine(url)
    engine = create_engine(f"sqlite:///{folder / 'bench.db'}")

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _rate(records: int, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return records / (time.perf_counter() - start)


def _row(body: bytes) -> dict[str, Any]:
    leaf = json.loads(body)
    found = leaf["event"]
    return {
        "event_id": found["id"], "body": body, "received_us": 1, "type": found["type"], "actor": found["actor"],
        "tenant": found.get("tenant", ""), "run": found.get("run", ""), "node": leaf["node"],
        "stream": leaf["stream"], "seq": leaf["seq"], "occurred_us": found["occurred_us"],
    }


def _append(url: str, records: int, size: int) -> dict[str, float]:
    """Return rows a second at one batch size: bare blobs, a plain audit table (the same columns, made from the
    same bytes), and ours: checked intake, outbox, sequencer, tree, a signed head a batch."""
    with tempfile.TemporaryDirectory() as name:
        engine = _engine(url, Path(name))
        METADATA.drop_all(engine)
        METADATA.create_all(engine)
        sent = _shipments(records, size)
        ledger = Ledger(engine, TABLES, Ed25519PrivateKey.generate(), "bench", last_head=Path(name) / "last-head")
        ledger.lead()

        def blobs() -> None:
            for rows in sent:
                with engine.begin() as connection:
                    connection.execute(insert(BLOBS), [{"body": body} for _, body in rows])

        def plain() -> None:
            for rows in sent:
                with engine.begin() as connection:
                    connection.execute(insert(PLAIN), [_row(body) for _, body in rows])

        def whole() -> None:
            for rows in sent:
                ledger.intake("n1", "s", rows)
                ledger.sequence()

        found = {"blobs": _rate(records, blobs), "plain": _rate(records, plain), "ledger": _rate(records, whole)}
        METADATA.drop_all(engine)
        engine.dispose()
    return found


def _spool(producers: int, seconds: float = 1.0) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        spool, times = Spool(Path(name), "n1", "bench"), []
        end = time.perf_counter() + seconds

        def work(number: int) -> None:
            while (start := time.perf_counter()) < end:
                spool.record(_event(number))
                times.append(time.perf_counter() - start)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(producers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spool.close()
    times.sort()
    return {"per_s": round(len(times) / seconds), "p99_ms": round(times[int(len(times) * 0.99)] * 1000, 2)}


def main() -> None:
    """Measure, print and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--url", default="", help="a PostgreSQL database to use (its ledger tables are dropped)")
    args = parser.parse_args()
    result: dict[str, Any] = {"cpus": os.cpu_count(), "store": "postgresql" if args.url else "sqlite", "append": {}}
    for size in (100, 1000):
        runs = [_append(args.url, args.records, size) for _ in range(RUNS)]
        result["append"][f"batch_{size}"] = {
            "blobs_per_s": round(statistics.median(r["blobs"] for r in runs)),
            "plain_per_s": round(statistics.median(r["plain"] for r in runs)),
            "ledger_per_s": round(statistics.median(r["ledger"] for r in runs)),
            "ratio_to_plain": round(statistics.median(r["ledger"] / r["plain"] for r in runs), 3),
            "ratio_to_blobs": round(statistics.median(r["ledger"] / r["blobs"] for r in runs), 3),
        }
    result["spool"] = {f"producers_{n}": _spool(n) for n in (1, 16, 64)}
    out = Path(__file__).parent / "out" / "ledger.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
