"""All tables on one page. Times: integer microseconds since the epoch, for people and for order of
display only; no deadline of a run is ever computed from them. Only `control_plane.store.*` imports this.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

from audit.tables import define

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s", "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s", "pk": "pk_%(table_name)s",
    }
)
_KEY = BigInteger().with_variant(Integer, "sqlite")

ledger = define(metadata)

# Facts of the site by name: administrator_enrolled, recovery_us, recovered_us.
site = Table(
    "site", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False),
)

# --- people -----------------------------------------------------------------------------------------
people = Table(
    "people", metadata, Column("id", String(64), primary_key=True),
    Column("name", String(64), nullable=False, unique=True), Column("tenant", String(64), nullable=False),
    Column("kind", String(16), nullable=False), Column("owner", String(64), nullable=False),
    Column("password_hash", String(256), nullable=False), Column("totp_sealed", LargeBinary),
    Column("totp_last", BigInteger, nullable=False), Column("totp_active", Boolean, nullable=False),
    Column("person_key", String(64), nullable=False), Column("disabled", Boolean, nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
roles = Table(
    "roles", metadata, Column("person", String(64), ForeignKey("people.id"), primary_key=True),
    Column("role", String(64), primary_key=True), Column("tenant", String(64), primary_key=True),
)
# kind: bootstrap | recovery | invitation. Only the SHA-256 of the secret is kept; used_us is set by one UPDATE.
links = Table(
    "links", metadata, Column("hash", String(80), primary_key=True), Column("kind", String(16), nullable=False),
    Column("name", String(64), nullable=False), Column("tenant", String(64), nullable=False),
    Column("role_names", Text, nullable=False), Column("made_by", String(64), nullable=False),
    Column("expires_us", BigInteger, nullable=False), Column("used_us", BigInteger, nullable=False),
    Column("person", String(64), nullable=False),
)
# A half login is a row with factor = false and serves no route but the second factor.
sessions = Table(
    "sessions", metadata, Column("hash", String(80), primary_key=True),
    Column("person", String(64), ForeignKey("people.id"), nullable=False, index=True),
    Column("client", String(16), nullable=False), Column("factor", Boolean, nullable=False),
    Column("created_us", BigInteger, nullable=False), Column("seen_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
)
# A proof of the second factor, bound to session, action and digest; used once.
step_ups = Table(
    "step_ups", metadata, Column("id", String(64), primary_key=True),
    Column("session", String(80), nullable=False, index=True), Column("action", String(32), nullable=False),
    Column("bound", String(80), nullable=False), Column("at_us", BigInteger, nullable=False),
    Column("used_us", BigInteger, nullable=False),
)
api_keys = Table(
    "api_keys", metadata, Column("id", String(32), primary_key=True), Column("hash", String(80), nullable=False),
    Column("person", String(64), ForeignKey("people.id"), nullable=False),
    Column("name", String(64), nullable=False), Column("scopes", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False), Column("expires_us", BigInteger, nullable=False),
    Column("used_us", BigInteger, nullable=False), Column("revoked_us", BigInteger, nullable=False),
)
throttles = Table(
    "throttles", metadata, Column("key", String(160), primary_key=True),
    Column("failures", Integer, nullable=False), Column("window_us", BigInteger, nullable=False),
    Column("locked_us", BigInteger, nullable=False),
)

# --- approvals --------------------------------------------------------------------------------------
# kind: launch | resume | trust | version. `digest` is what each vote is bound to; `body` the canonical JSON.
approval_requests = Table(
    "approval_requests", metadata, Column("id", String(64), primary_key=True),
    Column("kind", String(16), nullable=False), Column("digest", String(80), nullable=False, index=True),
    Column("body", Text, nullable=False), Column("tenant", String(64), nullable=False),
    Column("asked_by", String(64), nullable=False), Column("owner", String(64), nullable=False),
    Column("reason", Text, nullable=False), Column("needed", Integer, nullable=False),
    Column("asked_us", BigInteger, nullable=False), Column("expires_us", BigInteger, nullable=False),
    Column("state", String(16), nullable=False), Column("head", String(128), nullable=False),
)
# UNIQUE(request, person) alone makes two approvers at once and a double click right.
approval_votes = Table(
    "approval_votes", metadata, Column("id", _KEY, primary_key=True, autoincrement=True),
    Column("request", String(64), ForeignKey("approval_requests.id"), nullable=False),
    Column("person", String(64), ForeignKey("people.id"), nullable=False),
    Column("approve", Boolean, nullable=False), Column("reason", Text, nullable=False),
    Column("signed", Text, nullable=False), Column("at_us", BigInteger, nullable=False),
    UniqueConstraint("request", "person", name="uq_approval_votes_request_person"),
)

# --- nodes ------------------------------------------------------------------------------------------
join_secrets = Table(
    "join_secrets", metadata, Column("hash", String(80), primary_key=True),
    Column("node", String(64), nullable=False), Column("made_by", String(64), nullable=False),
    Column("expires_us", BigInteger, nullable=False), Column("used_us", BigInteger, nullable=False),
)
nodes = Table(
    "nodes", metadata, Column("id", String(64), primary_key=True),
    Column("supervisor_key", String(64), nullable=False), Column("state", String(16), nullable=False),
    Column("joined_us", BigInteger, nullable=False), Column("seen_us", BigInteger, nullable=False),
    Column("supervisor_seen_us", BigInteger, nullable=False), Column("boot_id", String(64), nullable=False),
    Column("facts", Text, nullable=False), Column("echo_us", BigInteger, nullable=False),
)

# --- runs -------------------------------------------------------------------------------------------
# state: placed | admitted | live | ended | stopped | refused | lost
runs = Table(
    "runs", metadata, Column("id", String(64), primary_key=True), Column("tenant", String(64), nullable=False),
    Column("subject", String(64), nullable=False), Column("owner", String(64), nullable=False),
    Column("tier", String(16), nullable=False), Column("model", String(256), nullable=False),
    Column("plan", Text, nullable=False), Column("plan_digest", String(80), nullable=False, index=True),
    Column("approval", String(64), nullable=False), Column("state", String(24), nullable=False, index=True),
    Column("attempt", Integer, nullable=False), Column("node", String(64), nullable=False),
    Column("created_us", BigInteger, nullable=False), Column("ended_us", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),
)
# One row an attempt: the signed launch order, and the stop epoch that the permit was given at (G7).
attempts = Table(
    "attempts", metadata, Column("run", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True), Column("node", String(64), nullable=False, index=True),
    Column("launch", Text, nullable=False), Column("labels", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False), Column("state", String(24), nullable=False),
    Column("granted_us", BigInteger, nullable=False), Column("live_us", BigInteger, nullable=False),
    Column("lease_us", BigInteger, nullable=False), Column("ended_us", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),
)
code_files = Table(
    "code_files", metadata, Column("digest", String(80), primary_key=True),
    Column("data", LargeBinary, nullable=False), Column("by", String(64), nullable=False),
    Column("at_us", BigInteger, nullable=False),
)

# --- orders: a copy of the order log, which lies outside the database -------------------------------
# kind: stop | resume. `n` is the position in the order log; -1 while a stop is not yet anchored.
orders = Table(
    "orders", metadata, Column("id", String(64), primary_key=True), Column("n", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False), Column("epoch", BigInteger, nullable=False),
    Column("scope_kind", String(16), nullable=False), Column("scope_id", String(256), nullable=False),
    Column("mode", String(16), nullable=False), Column("actor", String(256), nullable=False),
    Column("reason", Text, nullable=False), Column("signed", Text, nullable=False),
    Column("accepted_us", BigInteger, nullable=False), Column("cleared_by", String(64), nullable=False),
)
receipts = Table(
    "receipts", metadata, Column("order", String(64), primary_key=True), Column("node", String(64), primary_key=True),
    Column("result", String(16), nullable=False), Column("signed", Text, nullable=False),
    Column("received_us", BigInteger, nullable=False), Column("facts", Text, nullable=False),
)

# --- policy -----------------------------------------------------------------------------------------
bundles = Table(
    "bundles", metadata, Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("digest", String(80), nullable=False, unique=True), Column("archive", LargeBinary, nullable=False),
    Column("published_by", String(64), nullable=False), Column("published_us", BigInteger, nullable=False),
    Column("active", Boolean, nullable=False),
)
# Public halves, proposed or pinned; version counts trust.json.
trust_versions = Table(
    "trust_versions", metadata, Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False), Column("approvals", Text, nullable=False),
    Column("made_us", BigInteger, nullable=False),
)

# --- keys and checkpoints ---------------------------------------------------------------------------
# One run key a run, wrapped by the provider under `context` (JSON: tenant, model, run, tier).
run_keys = Table(
    "run_keys", metadata, Column("run", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("provider", String(32), nullable=False), Column("kek", String(64), nullable=False),
    Column("kek_version", Integer, nullable=False), Column("wrapped", LargeBinary, nullable=False),
    Column("context", Text, nullable=False), Column("made_us", BigInteger, nullable=False),
)
# What a node committed. `digest` is that of the manifest's body; the manifest holds wrapped file keys, no key.
checkpoints = Table(
    "checkpoints", metadata, Column("digest", String(80), primary_key=True),
    Column("run", String(64), ForeignKey("runs.id"), nullable=False, index=True),
    Column("step", BigInteger, nullable=False), Column("attempt", Integer, nullable=False),
    Column("kind", String(16), nullable=False), Column("items", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False), Column("parent", String(80), nullable=False),
    Column("node", String(64), nullable=False), Column("manifest", LargeBinary, nullable=False),
    Column("committed_us", BigInteger, nullable=False),
)

# --- registry ---------------------------------------------------------------------------------------
models = Table(
    "models", metadata, Column("name", String(64), primary_key=True), Column("tenant", String(64), nullable=False),
    Column("owner", String(64), ForeignKey("people.id"), nullable=False), Column("tier", String(16), nullable=False),
    Column("created_us", BigInteger, nullable=False),
)
# state: draft | approved | serving | retired. `lineage` is JSON {parents, models, datasets, code}.
versions = Table(
    "versions", metadata,
    Column("digest", String(80), ForeignKey("checkpoints.digest"), primary_key=True),
    Column("model", String(64), ForeignKey("models.name"), nullable=False),
    Column("number", Integer, nullable=False), Column("tier", String(16), nullable=False),
    Column("state", String(16), nullable=False), Column("run", String(64), ForeignKey("runs.id"), nullable=False),
    Column("step", BigInteger, nullable=False), Column("lineage", Text, nullable=False),
    Column("request", String(64), nullable=False), Column("created_by", String(64), nullable=False),
    Column("created_us", BigInteger, nullable=False), Column("moved_us", BigInteger, nullable=False),
    UniqueConstraint("model", "number", name="uq_versions_model_number"),
)
# One row for each attempt whose engine reported itself warm. Whether it still is says the attempt's own state.
engines = Table(
    "engines", metadata, Column("run", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("version", String(80), ForeignKey("versions.digest"), nullable=False, index=True),
    Column("ready_us", BigInteger, nullable=False),
)
# Live membership of a partner programme: not ended, and `until_us` not passed.
programme_members = Table(
    "programme_members", metadata, Column("programme", String(64), primary_key=True),
    Column("person", String(64), ForeignKey("people.id"), primary_key=True),
    Column("organisation", String(128), nullable=False), Column("until_us", BigInteger, nullable=False),
    Column("by", String(64), nullable=False), Column("at_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
)
