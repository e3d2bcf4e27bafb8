"""Every table of the foundation: people, approvals, nodes, runs, orders, policy, ledger.

Written out, not derived from today's metadata, so that this step stays what it was. "pre": it may run while
the former program still serves.
"""

import sqlalchemy as sa
from alembic import op

revision = "01_01"
down_revision = None
branch_labels = None
depends_on = None

# SQLite gives row numbers only to INTEGER keys.
_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _people() -> None:
    """People, their links, sessions, proofs and keys; the site's one-line facts."""
    op.create_table(
        "site", sa.Column("key", sa.String(64), nullable=False), sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_site"),
    )
    op.create_table(
        "people", sa.Column("id", sa.String(64), nullable=False), sa.Column("name", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False), sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False), sa.Column("password_hash", sa.String(256), nullable=False),
        sa.Column("totp_sealed", sa.LargeBinary(), nullable=True),
        sa.Column("totp_last", sa.BigInteger(), nullable=False),
        sa.Column("totp_active", sa.Boolean(), nullable=False),
        sa.Column("person_key", sa.String(64), nullable=False), sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_people"),
        sa.UniqueConstraint("name", name="uq_people_name"),
    )
    op.create_table(
        "roles", sa.Column("person", sa.String(64), nullable=False), sa.Column("role", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_roles_person_people"),
        sa.PrimaryKeyConstraint("person", "role", "tenant", name="pk_roles"),
    )
    op.create_table(
        "links", sa.Column("hash", sa.String(80), nullable=False), sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(64), nullable=False), sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("role_names", sa.Text(), nullable=False), sa.Column("made_by", sa.String(64), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=False), sa.Column("person", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_links"),
    )
    op.create_table(
        "sessions", sa.Column("hash", sa.String(80), nullable=False),
        sa.Column("person", sa.String(64), nullable=False), sa.Column("client", sa.String(16), nullable=False),
        sa.Column("factor", sa.Boolean(), nullable=False), sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("seen_us", sa.BigInteger(), nullable=False), sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_sessions_person_people"),
        sa.PrimaryKeyConstraint("hash", name="pk_sessions"),
    )
    op.create_index("ix_sessions_person", "sessions", ["person"])
    op.create_table(
        "step_ups", sa.Column("id", sa.String(64), nullable=False),
        sa.Column("session", sa.String(80), nullable=False), sa.Column("action", sa.String(32), nullable=False),
        sa.Column("bound", sa.String(80), nullable=False), sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_step_ups"),
    )
    op.create_index("ix_step_ups_session", "step_ups", ["session"])
    op.create_table(
        "api_keys", sa.Column("id", sa.String(32), nullable=False), sa.Column("hash", sa.String(80), nullable=False),
        sa.Column("person", sa.String(64), nullable=False), sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False), sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=False),
        sa.Column("revoked_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_api_keys_person_people"),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_table(
        "throttles", sa.Column("key", sa.String(160), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False), sa.Column("window_us", sa.BigInteger(), nullable=False),
        sa.Column("locked_us", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("key", name="pk_throttles"),
    )


def _approvals() -> None:
    """Requests and the votes on them."""
    op.create_table(
        "approval_requests", sa.Column("id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False), sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("body", sa.Text(), nullable=False), sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("asked_by", sa.String(64), nullable=False), sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False), sa.Column("needed", sa.Integer(), nullable=False),
        sa.Column("asked_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False), sa.Column("state", sa.String(16), nullable=False),
        sa.Column("head", sa.String(128), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_approval_requests"),
    )
    op.create_index("ix_approval_requests_digest", "approval_requests", ["digest"])
    op.create_table(
        "approval_votes", sa.Column("id", _KEY, autoincrement=True, nullable=False),
        sa.Column("request", sa.String(64), nullable=False), sa.Column("person", sa.String(64), nullable=False),
        sa.Column("approve", sa.Boolean(), nullable=False), sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("signed", sa.Text(), nullable=False), sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_approval_votes_person_people"),
        sa.ForeignKeyConstraint(["request"], ["approval_requests.id"],
            name="fk_approval_votes_request_approval_requests"),
        sa.PrimaryKeyConstraint("id", name="pk_approval_votes"),
        sa.UniqueConstraint("request", "person", name="uq_approval_votes_request_person"),
    )


def _nodes() -> None:
    """Join secrets and nodes."""
    op.create_table(
        "join_secrets", sa.Column("hash", sa.String(80), nullable=False),
        sa.Column("node", sa.String(64), nullable=False), sa.Column("made_by", sa.String(64), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.Column("used_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_join_secrets"),
    )
    op.create_table(
        "nodes", sa.Column("id", sa.String(64), nullable=False),
        sa.Column("supervisor_key", sa.String(64), nullable=False), sa.Column("state", sa.String(16), nullable=False),
        sa.Column("joined_us", sa.BigInteger(), nullable=False),
        sa.Column("seen_us", sa.BigInteger(), nullable=False),
        sa.Column("supervisor_seen_us", sa.BigInteger(), nullable=False),
        sa.Column("boot_id", sa.String(64), nullable=False), sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("echo_us", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_nodes"),
    )


def _runs() -> None:
    """Runs, their attempts, uploaded code."""
    op.create_table(
        "runs", sa.Column("id", sa.String(64), nullable=False), sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False), sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False), sa.Column("model", sa.String(256), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False), sa.Column("plan_digest", sa.String(80), nullable=False),
        sa.Column("approval", sa.String(64), nullable=False), sa.Column("state", sa.String(24), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False), sa.Column("node", sa.String(64), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False), sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_plan_digest", "runs", ["plan_digest"])
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_table(
        "attempts", sa.Column("run", sa.String(64), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.String(64), nullable=False), sa.Column("launch", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False), sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(24), nullable=False), sa.Column("granted_us", sa.BigInteger(), nullable=False),
        sa.Column("live_us", sa.BigInteger(), nullable=False), sa.Column("lease_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False), sa.Column("outcome", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_attempts_run_runs"),
        sa.PrimaryKeyConstraint("run", "attempt", name="pk_attempts"),
    )
    op.create_index("ix_attempts_node", "attempts", ["node"])
    op.create_table(
        "code_files", sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False), sa.Column("by", sa.String(64), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("digest", name="pk_code_files"),
    )


def _orders() -> None:
    """The copy of the order log, and receipts."""
    op.create_table(
        "orders", sa.Column("id", sa.String(64), nullable=False), sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False), sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("scope_kind", sa.String(16), nullable=False), sa.Column("scope_id", sa.String(256), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False), sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False), sa.Column("signed", sa.Text(), nullable=False),
        sa.Column("accepted_us", sa.BigInteger(), nullable=False),
        sa.Column("cleared_by", sa.String(64), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_orders"),
    )
    op.create_table(
        "receipts", sa.Column("order", sa.String(64), nullable=False),
        sa.Column("node", sa.String(64), nullable=False), sa.Column("result", sa.String(16), nullable=False),
        sa.Column("signed", sa.Text(), nullable=False), sa.Column("received_us", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False), sa.PrimaryKeyConstraint("order", "node", name="pk_receipts"),
    )


def _policy() -> None:
    """Bundles and versions of trust.json."""
    op.create_table(
        "bundles", sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(80), nullable=False), sa.Column("archive", sa.LargeBinary(), nullable=False),
        sa.Column("published_by", sa.String(64), nullable=False),
        sa.Column("published_us", sa.BigInteger(), nullable=False), sa.Column("active", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_bundles"),
        sa.UniqueConstraint("digest", name="uq_bundles_digest"),
    )
    op.create_table(
        "trust_versions", sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("body", sa.Text(), nullable=False), sa.Column("approvals", sa.Text(), nullable=False),
        sa.Column("made_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_trust_versions"),
    )


def _ledger() -> None:
    """Outbox, leaves, complete subtrees, heads, streams and the fence."""
    op.create_table(
        "ledger_outbox", sa.Column("id", _KEY, autoincrement=True, nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False), sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("received_us", sa.BigInteger(), nullable=False), sa.Column("node", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_outbox"),
        sa.UniqueConstraint("event_id", name="uq_ledger_outbox_event_id"),
    )
    op.create_table(
        "ledger_leaves", sa.Column("log_index", _KEY, autoincrement=False, nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False), sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary(), nullable=False),
        sa.Column("received_us", sa.BigInteger(), nullable=False), sa.Column("type", sa.String(64), nullable=False),
        sa.Column("actor", sa.String(256), nullable=False), sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False), sa.Column("node", sa.String(64), nullable=False),
        sa.Column("stream", sa.String(96), nullable=False), sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("occurred_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("log_index", name="pk_ledger_leaves"),
        sa.UniqueConstraint("event_id", name="uq_ledger_leaves_event_id"),
    )
    op.create_index("ix_ledger_leaves_run", "ledger_leaves", ["run"])
    op.create_index("ix_ledger_leaves_type", "ledger_leaves", ["type"])
    op.create_table(
        "ledger_nodes", sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("level", "position", name="pk_ledger_nodes"),
    )
    op.create_table(
        "ledger_heads", sa.Column("size", _KEY, autoincrement=False, nullable=False),
        sa.Column("root", sa.LargeBinary(), nullable=False), sa.Column("note", sa.String(), nullable=False),
        sa.Column("signed_us", sa.BigInteger(), nullable=False), sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("size", name="pk_ledger_heads"),
    )
    op.create_table(
        "ledger_streams", sa.Column("node", sa.String(64), nullable=False),
        sa.Column("stream", sa.String(96), nullable=False), sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.Column("last_hash", sa.String(80), nullable=False), sa.Column("mark_seq", sa.BigInteger(), nullable=False),
        sa.Column("mark_us", sa.BigInteger(), nullable=False), sa.Column("closed", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("node", "stream", name="pk_ledger_streams"),
    )
    op.create_table(
        "ledger_fence", sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False), sa.PrimaryKeyConstraint("id", name="pk_ledger_fence"),
    )


def upgrade() -> None:
    """Make every table."""
    _people()
    _approvals()
    _nodes()
    _runs()
    _orders()
    _policy()
    _ledger()


def downgrade() -> None:
    """Drop every table, the referring ones first."""
    for table in (
        "ledger_fence", "ledger_streams", "ledger_heads", "ledger_nodes", "ledger_leaves", "ledger_outbox",
        "trust_versions", "bundles", "receipts", "orders", "code_files", "attempts", "runs", "nodes", "join_secrets",
        "approval_votes", "approval_requests", "throttles", "api_keys", "step_ups", "sessions", "links", "roles",
        "people", "site",
    ):
        op.drop_table(table)
