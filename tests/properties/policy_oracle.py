"""The rules of a policy in plain Python, written from docs/formats/policy-bundle.md and from nothing else."""

from collections.abc import Iterable

Row = tuple[str, str, str, str, str, str, str]
Link = tuple[str, str]


def having(roles: Iterable[str], links: list[Link]) -> set[str]:
    """Return the roles and whatever they inherit; whoever asks is part of everyone."""
    found = {*roles, "everyone"}
    while True:
        more = {parent for role, parent in links if role in found} - found
        if not more:
            return found
        found |= more


def matches(row: Row, roles: set[str], home: str, tenant: str, path: str, action: str, tier: str,
            held: frozenset[str]) -> bool:
    """Return whether one row speaks about the request."""
    role, dom, obj, act, level, cond, _ = row
    kind, _, name = path.partition("/")
    return (
        role in roles
        and (dom == "*" or (dom == "same" and home == tenant) or (dom == home == tenant))
        and obj in ("*/*", f"{kind}/*", f"{kind}/{name}")
        and act in ("*", action)
        and level in ("*", tier)
        and (cond == "-" or set(cond.split("+")) <= held)
    )


def verdict(rows: list[Row], links: list[Link], roles: Iterable[str], home: str, tenant: str, path: str, action: str,
            tier: str, held: frozenset[str]) -> tuple[list[int], list[int]]:
    """Return the indices of the allow and of the deny rows that match."""
    mine = having(roles, links)
    found = [n for n, row in enumerate(rows) if matches(row, mine, home, tenant, path, action, tier, held)]
    return [n for n in found if rows[n][6] == "allow"], [n for n in found if rows[n][6] == "deny"]
