"""Tables of the ledger, defined on the caller's MetaData so that one alembic history covers all."""

from dataclasses import dataclass

from sqlalchemy import BigInteger, Column, Integer, LargeBinary, MetaData, String, Table


@dataclass(frozen=True)
class LedgerTables:
    """The six tables that `audit/ledger.py` works on."""

    fence: Table
    outbox: Table
    leaves: Table
    nodes: Table
    heads: Table
    streams: Table


def define(metadata: MetaData) -> LedgerTables:
    """Add the ledger's tables to `metadata` and return them."""
    key = BigInteger().with_variant(Integer, "sqlite")
    return LedgerTables(
        # One row. Whoever sequences raises `epoch` once and names it in every transaction after.
        fence=Table(
            "ledger_fence", metadata, Column("id", Integer, primary_key=True, autoincrement=False),
            Column("epoch", BigInteger, nullable=False),
        ),
        # Claimed by presence, never by watermark: a lower id may commit later. `node` is
        # "control" for an event of ours (the sequencer makes the leaf), else `body` is the node's leaf.
        outbox=Table(
            "ledger_outbox", metadata, Column("id", key, primary_key=True, autoincrement=True),
            Column("event_id", String(64), nullable=False, unique=True), Column("body", LargeBinary, nullable=False),
            Column("received_us", BigInteger, nullable=False), Column("node", String(64), nullable=False),
        ),
        # `body` are the exact hashed bytes; the other columns are a projection that can be rebuilt.
        leaves=Table(
            "ledger_leaves", metadata, Column("log_index", key, primary_key=True, autoincrement=False),
            Column("event_id", String(64), nullable=False, unique=True), Column("body", LargeBinary, nullable=False),
            Column("leaf_hash", LargeBinary, nullable=False), Column("received_us", BigInteger, nullable=False),
            Column("type", String(64), nullable=False, index=True), Column("actor", String(256), nullable=False),
            Column("tenant", String(64), nullable=False), Column("run", String(64), nullable=False, index=True),
            Column("node", String(64), nullable=False), Column("stream", String(96), nullable=False),
            Column("seq", BigInteger, nullable=False), Column("occurred_us", BigInteger, nullable=False),
        ),
        # Complete subtrees only: (level, position) -> hash, enough for any proof in O(log n) reads.
        nodes=Table(
            "ledger_nodes", metadata, Column("level", Integer, primary_key=True),
            Column("position", BigInteger, primary_key=True), Column("hash", LargeBinary, nullable=False),
        ),
        heads=Table(
            "ledger_heads", metadata, Column("size", key, primary_key=True, autoincrement=False),
            Column("root", LargeBinary, nullable=False), Column("note", String, nullable=False),
            Column("signed_us", BigInteger, nullable=False), Column("epoch", BigInteger, nullable=False),
        ),
        # What each writing process claims (mark) and what has arrived; a difference is `lost`. The node is
        # part of the key, so that no node can occupy the name of another's stream. `mark_seq` is the
        # highest seq claimed (-1 none), `mark_us` since when the claim is ahead of what arrived.
        streams=Table(
            "ledger_streams", metadata, Column("node", String(64), primary_key=True),
            Column("stream", String(96), primary_key=True), Column("next_seq", BigInteger, nullable=False),
            Column("last_hash", String(80), nullable=False), Column("mark_seq", BigInteger, nullable=False),
            Column("mark_us", BigInteger, nullable=False), Column("closed", Integer, nullable=False),
            Column("state", String(16), nullable=False),
        ),
    )
