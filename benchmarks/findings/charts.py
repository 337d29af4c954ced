"""Reward against samples with error bands, and reward against KL, as one SVG that stands alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2563c9", "#d9730d", "#168a62", "#8a4fc4", "#c2364b", "#7a6a12")
WIDTH = 560
HEIGHT = 390
# the legend is below the x axis
LEFT = 52
RIGHT = 20
TOP = 34
BOTTOM = 100


@dataclass(frozen=True)
class Point:
    """A mean at x with its standard errors."""

    x: float
    y: float
    y_error: float
    x_error: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Points by rising x under one name."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: above it.
        x_label: below it.
        curves: at most as many as there are colours.
        bands: errors as a band around a line; otherwise as bars at each point.
    """

    title: str
    x_label: str
    curves: Sequence[Curve]
    bands: bool = True


def figure(panels: Sequence[Panel]) -> str:
    """All panels in two columns."""
    rows = (len(panels) + 1) // 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {rows * HEIGHT}" '
        'font-family="DejaVu Sans, sans-serif" font-size="11" fill="#1b2230">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        x = index % 2 * WIDTH
        y = index // 2 * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    low, high = min(p.x - p.x_error for p in points), max(p.x + p.x_error for p in points)
    x_ticks = [tick for tick in ticks(low, high) if low <= tick <= high]
    y_ticks = ticks(min(p.y - p.y_error for p in points), max(p.y + p.y_error for p in points))

    def x(value: float) -> float:
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(
            HEIGHT
            - BOTTOM
            - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM),
            1,
        )

    parts = [
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{escape(panel.title)}</text>'
    ]
    for tick in y_ticks:
        parts.append(f'<path d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}" stroke="#e3e6eb"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{label(tick, y_ticks[1] - y_ticks[0])}</text>'
        )
    for tick in x_ticks:
        text = label(tick, x_ticks[1] - x_ticks[0])
        parts.append(
            f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - BOTTOM + 32}" text-anchor="middle">{escape(panel.x_label)}</text>'
    )
    for number, (curve, colour) in enumerate(zip(panel.curves, COLOURS, strict=False)):
        there = [f"{x(p.x)} {y(p.y + p.y_error)}" for p in curve.points]
        back = [f"{x(p.x)} {y(p.y - p.y_error)}" for p in reversed(curve.points)]
        if panel.bands:
            parts.append(
                f'<path d="M{"L".join([*there, *back])}Z" fill="{colour}" opacity="0.18"/>'
            )
        line = "L".join(f"{x(p.x)} {y(p.y)}" for p in curve.points)
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{1.8 if panel.bands else 0.6}"/>'
        )
        for p in curve.points if not panel.bands else ():
            across = f"M{x(p.x - p.x_error)} {y(p.y)}H{x(p.x + p.x_error)}"
            cross = f"{across}M{x(p.x)} {y(p.y - p.y_error)}V{y(p.y + p.y_error)}"
            parts.append(f'<path d="{cross}" stroke="{colour}" stroke-width="2.2"/>')
        left = LEFT + number % 2 * WIDTH // 2
        top = HEIGHT - BOTTOM + 42 + 15 * (number // 2)
        parts.append(f'<rect x="{left}" y="{top}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 15}" y="{top + 9}">{escape(curve.name)}</text>')
    return parts


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about `count` round numbers covering [low, high], 1, 2 or 5 times a power of ten apart.

    `low` and `high` are finite and in order; `whole` allows no fractions.
    """
    span = high - low
    scale = max(abs(low), abs(high))
    if span <= scale * 1e-9 or span < 1e-30:
        # one value, or so little between them that labels could not tell
        span = scale * 0.2 if scale > 1e-20 else 1.0
        low, high = (low + high - span) / 2, (low + high + span) / 2
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """Format a tick with as many decimals as `step`, the distance between ticks, needs."""
    if abs(value) < step / 2:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:.{decimals}f}"
