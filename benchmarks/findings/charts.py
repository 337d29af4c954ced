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
FLOOR = HEIGHT - BOTTOM  # of the plot


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
    width = 2 * WIDTH
    height = rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, sans-serif" font-size="11" fill="#1b2230">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        x = index % 2 * WIDTH
        y = index // 2 * HEIGHT
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(panel)
        parts.append("</g>")
    parts.append("</svg>\n")
    return "\n".join(parts)


@dataclass(frozen=True)
class Axis:
    """From values to pixels; `start` and `end` are the pixels of `low` and `high`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _panel(panel: Panel) -> list[str]:
    points = [point for curve in panel.curves for point in curve.points]
    low = min(point.x - point.x_error for point in points)
    high = max(point.x + point.x_error for point in points)
    x_ticks = [tick for tick in ticks(low, high) if low <= tick <= high]
    bottom = min(point.y - point.y_error for point in points)
    top = max(point.y + point.y_error for point in points)
    y_ticks = ticks(bottom, top)
    x = Axis(low, high, LEFT, WIDTH - RIGHT)
    y = Axis(y_ticks[0], y_ticks[-1], FLOOR, TOP)
    title = escape(panel.title)
    parts = [f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{title}</text>']
    y_step = y_ticks[1] - y_ticks[0]
    for tick in y_ticks:
        height = y(tick)
        text = label(tick, y_step)
        parts.append(f'<path d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke="#e3e6eb"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4}" text-anchor="end">{text}</text>')
    for tick in x_ticks:
        text = label(tick, x_ticks[1] - x_ticks[0])
        parts.append(f'<text x="{x(tick)}" y="{FLOOR + 15}" text-anchor="middle">{text}</text>')
    text = escape(panel.x_label)
    parts.append(f'<text x="{WIDTH / 2}" y="{FLOOR + 32}" text-anchor="middle">{text}</text>')
    for number, curve in enumerate(panel.curves[: len(COLOURS)]):
        colour = COLOURS[number]
        if panel.bands:
            parts.append(_band(curve, colour, x, y))
        stroke = 1.8 if panel.bands else 0.6
        line = "L".join(f"{x(point.x)} {y(point.y)}" for point in curve.points)
        path = f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>'
        parts.append(path)
        if not panel.bands:
            parts += _crosses(curve, colour, x, y)
        left = LEFT + number % 2 * WIDTH // 2
        row = FLOOR + 42 + 15 * (number // 2)
        name = escape(curve.name)
        parts.append(f'<rect x="{left}" y="{row}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 15}" y="{row + 9}">{name}</text>')
    return parts


def _band(curve: Curve, colour: str, x: Axis, y: Axis) -> str:
    """An area one standard error wide on both sides of the line."""
    corners = [f"{x(point.x)} {y(point.y + point.y_error)}" for point in curve.points]
    for point in reversed(curve.points):
        corners.append(f"{x(point.x)} {y(point.y - point.y_error)}")
    outline = "L".join(corners)
    return f'<path d="M{outline}Z" fill="{colour}" opacity="0.18"/>'


def _crosses(curve: Curve, colour: str, x: Axis, y: Axis) -> list[str]:
    """The standard errors of each point in both directions."""
    paths = []
    for point in curve.points:
        left = x(point.x - point.x_error)
        right = x(point.x + point.x_error)
        lower = y(point.y - point.y_error)
        upper = y(point.y + point.y_error)
        cross = f"M{left} {y(point.y)}H{right}M{x(point.x)} {lower}V{upper}"
        paths.append(f'<path d="{cross}" stroke="{colour}" stroke-width="2.2"/>')
    return paths


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about `count` round numbers that cover [low, high].

    They are 1, 2 or 5 times a power of ten apart. `low` and `high` are finite and in order;
    `whole` allows no fractions.
    """
    span = high - low
    scale = max(abs(low), abs(high))
    if span <= scale * 1e-9 or span < 1e-30:
        # A single value, or values so close that labels could not tell them apart.
        span = scale * 0.2 if scale > 1e-20 else 1.0
        both = low + high
        low = (both - span) / 2
        high = (both + span) / 2
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = next(step for step in steps if step >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """Format a tick with as many decimals as `step`, the distance between ticks, needs."""
    if abs(value) < step / 2:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    decimals = 0
    if step > 0:
        magnitude = math.floor(math.log10(step) + 1e-9)
        decimals = max(0, -magnitude)
    return f"{value:.{decimals}f}"
