"""Run keys, checkpoints, models and their versions, members of partner programmes.

Written out like every step. "pre": the former program knows none of these tables and is not disturbed.
"""

import sqlalchemy as sa
from alembic import op

revision = "02_01"
down_revision = "01_01"
branch_labels = None
depends_on = None


def _keys() -> None:
    """The wrapped key of each run, and what was committed under it."""
    op.create_table(
        "run_keys", sa.Column("run", sa.String(64), nullable=False),
        sa.Column("provider", sa.String(32), nullable=False), sa.Column("kek", sa.String(64), nullable=False),
        sa.Column("kek_version", sa.Integer(), nullable=False), sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("context", sa.Text(), nullable=False), sa.Column("made_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_run_keys_run_runs"),
        sa.PrimaryKeyConstraint("run", name="pk_run_keys"),
    )
    op.create_table(
        "checkpoints", sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("run", sa.String(64), nullable=False), sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False), sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("items", sa.Integer(), nullable=False), sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.String(80), nullable=False), sa.Column("node", sa.String(64), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("committed_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_checkpoints_run_runs"),
        sa.PrimaryKeyConstraint("digest", name="pk_checkpoints"),
    )
    op.create_index("ix_checkpoints_run", "checkpoints", ["run"])


def _registry() -> None:
    """Models, versions, and who belongs to which partner programme."""
    op.create_table(
        "models", sa.Column("name", sa.String(64), nullable=False), sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False), sa.Column("tier", sa.String(16), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["owner"], ["people.id"], name="fk_models_owner_people"),
        sa.PrimaryKeyConstraint("name", name="pk_models"),
    )
    op.create_table(
        "versions", sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("model", sa.String(64), nullable=False), sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tier", sa.String(16), nullable=False), sa.Column("state", sa.String(16), nullable=False),
        sa.Column("run", sa.String(64), nullable=False), sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("lineage", sa.Text(), nullable=False), sa.Column("request", sa.String(64), nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("moved_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["checkpoints.digest"], name="fk_versions_digest_checkpoints"),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name="fk_versions_model_models"),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_versions_run_runs"),
        sa.PrimaryKeyConstraint("digest", name="pk_versions"),
        sa.UniqueConstraint("model", "number", name="uq_versions_model_number"),
    )
    op.create_table(
        "programme_members", sa.Column("programme", sa.String(64), nullable=False),
        sa.Column("person", sa.String(64), nullable=False),
        sa.Column("organisation", sa.String(128), nullable=False),
        sa.Column("until_us", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.String(64), nullable=False), sa.Column("at_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["person"], ["people.id"], name="fk_programme_members_person_people"),
        sa.PrimaryKeyConstraint("programme", "person", name="pk_programme_members"),
    )


def upgrade() -> None:
    """Make the tables."""
    _keys()
    _registry()


def downgrade() -> None:
    """Drop them, the referring ones first."""
    for table in ("programme_members", "versions", "models", "checkpoints", "run_keys"):
        op.drop_table(table)
