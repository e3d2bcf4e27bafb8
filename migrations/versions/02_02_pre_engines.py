"""Which attempts reported a warm engine, so that a version is shown as serving exactly while one is.

"pre": the former program does not know this table and is not disturbed.
"""

import sqlalchemy as sa
from alembic import op

revision = "02_02"
down_revision = "02_01"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "engines", sa.Column("run", sa.String(64), nullable=False), sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("version", sa.String(80), nullable=False), sa.Column("ready_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name="fk_engines_run_runs"),
        sa.ForeignKeyConstraint(["version"], ["versions.digest"], name="fk_engines_version_versions"),
        sa.PrimaryKeyConstraint("run", "attempt", name="pk_engines"),
    )
    op.create_index("ix_engines_version", "engines", ["version"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("engines")
