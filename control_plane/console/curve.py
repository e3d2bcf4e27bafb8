"""The curve of one metric of a run as coordinates: data in, numbers out, no drawing.

Metrics travel as integers. A name that ends in ``_micro`` is shown without that ending, divided by a million.
"""

from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 260, 64, 30, 12, 12
MAX_DRAWN, MAX_ROWS, TICKS = 300, 24, 4
_MICRO = "_micro"


@dataclass(frozen=True)
class Curve:
    """What a page draws: `lines` one text of SVG points for each attempt; `dots` single points; ticks as (place,
    label); `marks` as (x, step) of checkpoints; `rows` as (step, value, attempt) for the table."""

    name: str
    lines: tuple[str, ...]
    dots: tuple[tuple[str, str], ...]
    across: tuple[tuple[str, str], ...]
    up: tuple[tuple[str, str], ...]
    marks: tuple[tuple[str, int], ...]
    rows: tuple[tuple[int, str, int], ...]
    first: str
    last: str
    last_step: int


def choose(points: list[dict[str, Any]]) -> str:
    """Return the metric to draw: a loss when there is one, else the first by name; empty when there is none."""
    names = sorted({name for p in points for name in p["metrics"]})
    return next((n for n in names if n.startswith("loss")), names[0] if names else "")


def curve(points: list[dict[str, Any]], steps: list[int]) -> Curve | None:
    """Return the curve of a run's recorded steps, None when they carry no metric.

    Args: `points` as ``{n, attempt, metrics}`` in the order of their records; `steps` at which it has checkpoints.
    """
    metric = choose(points)
    if not metric:
        return None
    scale = 1e6 if metric.endswith(_MICRO) else 1.0
    found = [(p["n"], p["metrics"][metric] / scale, p["attempt"]) for p in points if metric in p["metrics"]]
    low_n, high_n = min(p[0] for p in found), max(p[0] for p in found)
    low, high = min(p[1] for p in found), max(p[1] for p in found)
    if low == high:
        low, high = low - 0.5, high + 0.5

    def x(n: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * ((n - low_n) / (high_n - low_n) if high_n > low_n else 0.5):.1f}"

    def y(value: float) -> str:
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low):.1f}"

    drawn = [[(x(n), y(v)) for n, v, _ in thin(part, MAX_DRAWN)] for part in _attempts(found)]
    return Curve(
        name=metric.removesuffix(_MICRO),
        lines=tuple(" ".join(f"{a},{b}" for a, b in part) for part in drawn if len(part) > 1),
        dots=tuple(part[0] for part in drawn if len(part) == 1),
        across=tuple((x(n), f"{n}") for n in sorted({round(low_n + (high_n - low_n) * i / TICKS)
                                                     for i in range(TICKS + 1)})),
        up=tuple((y(v), number(v)) for v in (low + (high - low) * i / TICKS for i in range(TICKS + 1))),
        marks=tuple((x(s), s) for s in sorted(set(steps)) if low_n <= s <= high_n),
        rows=tuple((n, number(v), a) for n, v, a in thin(found, MAX_ROWS)),
        first=number(found[0][1]), last=number(found[-1][1]), last_step=found[-1][0],
    )


def _attempts(found: list[tuple[int, float, int]]) -> list[list[tuple[int, float, int]]]:
    """Return one list for each attempt: a restart goes back to a checkpoint, and no line leads back with it."""
    parts: dict[int, list[tuple[int, float, int]]] = {}
    for point in found:
        parts.setdefault(point[2], []).append(point)
    return [parts[a] for a in sorted(parts)]


def thin(found: list[tuple[int, float, int]], most: int) -> list[tuple[int, float, int]]:
    """Return at most `most` points, evenly taken, the first and the last among them."""
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def number(value: float) -> str:
    """Return a number in few digits."""
    return f"{value:.4g}"


def size(count: int) -> str:
    """Return a count of bytes as a reader says it."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.1f} {unit}"
    return f"{count} B"
