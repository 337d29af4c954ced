"""Line and area charts as inline SVG, coloured by CSS variables to follow a page's light or dark theme."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

Points = Sequence[tuple[float, float]]  # (x, y), x ascending; a y that is not finite is missing
WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
MAX_POINTS = 300  # more than the plot has room for; longer series are averaged in bins
_MAX_MARKERS = 50  # more would run into each other
_SMOOTH_FROM = 12  # points from which a moving mean is drawn over a noisy series
_NO_DATA = Markup('<p class="empty">no data</p>')


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Points
    colour: int  # 1 .. 6, the CSS variable `--c1` .. `--c6`
    markers: bool = False  # draw every point (sparse series); smoothed instead above `_MAX_MARKERS` points
    smooth: bool = False  # draw points faintly under a moving mean, from `_SMOOTH_FROM` points

    @property
    def count(self) -> int:
        """Number of finite points."""
        return len(_finite(self.points))


def line_chart(series: Sequence[Series], x_label: str = "step", zero: bool = False, percent: bool = False) -> Markup:
    """Return an SVG with one line per series, or a placeholder if there is no finite point.

    `zero` starts the y axis at 0; `percent` shows a fraction y on an axis of 0 to 100 %.
    """
    binned = [replace(s, points=_binned(s.points)) for s in series]
    ys = [y for s in binned for y in _finite(s.points)]
    if not ys:
        return _NO_DATA
    xs = [x for s in binned for x, y in s.points if math.isfinite(y)]
    frame = _Frame(xs, (0.0, 1.0) if percent else (min(0.0, *ys) if zero else min(ys), max(ys)))
    parts = []
    for s in binned:
        markers = s.markers and s.count <= _MAX_MARKERS
        smoothed = (s.smooth and s.count >= _SMOOTH_FROM) or (s.markers and not markers)
        parts.append(frame.path(s.points, s.colour, faint=smoothed))
        if smoothed:
            parts.append(frame.path(_moving_mean(s.points), s.colour))
        parts += frame.dots(s.points, s.colour, lonely_only=not markers)
    return frame.svg(parts, binned, x_label, percent)


def area_chart(series: Sequence[Series], x_label: str = "step") -> Markup:
    """Return a stacked SVG of non-negative series with the same x; NaN counts as 0."""
    binned = [replace(s, points=_binned(s.points)) for s in series if s.points]
    if not any(s.count for s in binned):
        return _NO_DATA
    if len(binned[0].points) == 1:  # an area of one step has no width
        return line_chart([replace(s, markers=True) for s in binned], x_label, zero=True)
    xs = [x for x, _ in binned[0].points]
    edges = [[0.0] * len(xs)]
    for s in binned:
        heights = [max(0.0, y) if math.isfinite(y) else 0.0 for _, y in s.points]
        edges.append([base + height for base, height in zip(edges[-1], heights, strict=True)])
    frame = _Frame(xs, (0.0, max(edges[-1])))
    bands = [frame.band(xs, edges[index], edges[index + 1], s.colour) for index, s in enumerate(binned)]
    return frame.svg(bands, binned, x_label)


def legend(series: Sequence[Series]) -> Markup:
    """Return an HTML legend of the series that have a finite point."""
    items = [f'<li><i style="background:var(--c{s.colour})"></i>{escape(s.name)}</li>' for s in series if s.count]
    return Markup(f'<ul class="legend">{"".join(items)}</ul>' if items else "")


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Return about `count` round numbers covering [low, high], 1, 2 or 5 times a power of ten apart.

    `low` and `high` are finite and in order; `whole` allows no fractions.
    """
    span, scale = high - low, max(abs(low), abs(high))
    if span <= scale * 1e-9 or span < 1e-30:  # one value, or so little between them that labels could not tell
        span = scale * 0.2 if scale > 1e-20 else 1.0
        low, high = (low + high - span) / 2, (low + high + span) / 2
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
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


class _Frame:
    def __init__(self, xs: Sequence[float], y_range: tuple[float, float]):
        low, high = min(xs), max(xs)
        self.x_range, self.x_ticks, self.y_ticks = (low - 1, high + 1), [low], ticks(*y_range)
        if low < high:
            inside = [tick for tick in ticks(low, high, 7, whole=True) if low <= tick <= high]
            self.x_range, self.x_ticks = (low, high), inside

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def svg(self, parts: Sequence[str], series: Sequence[Series], x_label: str, percent: bool = False) -> Markup:
        inside = "".join([self.axes(x_label, percent), *parts, *self.hover(series, x_label, percent)])
        names = escape(", ".join(s.name for s in series))
        return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{names}">{inside}</svg>')

    def axes(self, x_label: str, percent: bool) -> str:
        step, bottom, right = self.y_ticks[1] - self.y_ticks[0], HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for y, tick in zip(map(self.y, self.y_ticks), self.y_ticks, strict=True):
            text = f"{tick:.0%}" if percent else label(tick, step)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for x, tick in zip(map(self.x, self.x_ticks), self.x_ticks, strict=True):
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:.0f}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        at = f'x="{(_LEFT + right) / 2:.0f}" y="{HEIGHT - 4}"'
        return "".join([*parts, f'<text {at} text-anchor="middle">{escape(x_label)}</text>'])

    def path(self, points: Points, colour: int, faint: bool = False) -> str:
        commands, pen = [], "M"
        for x, y in points:
            if math.isfinite(y):
                commands.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}")
            pen = "L" if math.isfinite(y) else "M"
        look = 'opacity="0.35" stroke-width="1.2"' if faint else 'stroke-width="2"'
        return f'<path class="line" d="{"".join(commands)}" style="stroke:var(--c{colour})" {look}/>'

    def dots(self, points: Points, colour: int, lonely_only: bool) -> list[str]:
        # lonely_only: only points that no line reaches, as both neighbours are missing
        finite = [False, *(math.isfinite(y) for _, y in points), False]
        return [
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.2" style="fill:var(--c{colour})"/>'
            for index, (x, y) in enumerate(points, 1)
            if finite[index] and not (lonely_only and (finite[index - 1] or finite[index + 1]))
        ]

    def band(self, xs: Sequence[float], bottom: Sequence[float], top: Sequence[float], colour: int) -> str:
        there = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, top, strict=True)]
        back = [f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, bottom, strict=True)]
        return f'<path d="M{"L".join([*there, *reversed(back)])}Z" style="fill:var(--c{colour})" opacity="0.85"/>'

    def hover(self, series: Sequence[Series], x_label: str, percent: bool) -> list[str]:
        texts: dict[float, list[str]] = {}
        for name, x, y in ((s.name, *point) for s in series for point in s.points):
            if math.isfinite(y):
                texts.setdefault(x, []).append(f"{name}: {f'{y:.1%}' if percent else f'{y:.4g}'}")
        values, top, height = sorted(texts), _TOP, HEIGHT - _TOP - _BOTTOM
        xs = [self.x(value) for value in values]
        edges = [_LEFT, *((left + right) / 2 for left, right in itertools.pairwise(xs)), WIDTH - _RIGHT]
        columns = []
        for value, x, (left, right) in zip(values, xs, itertools.pairwise(edges), strict=True):
            title = escape("\n".join([f"{x_label} {value:g}", *texts[value]]))
            columns.append(
                f'<g class="hover"><title>{title}</title>'
                f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{height}"/>'
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}"/></g>'
            )
        return columns


def _finite(points: Points) -> list[float]:
    return [y for _, y in points if math.isfinite(y)]


def _mean(points: Points) -> float:
    finite = _finite(points)
    return sum(finite) / len(finite) if finite else math.nan


def _binned(points: Points) -> Points:
    """Average runs of points down to `MAX_POINTS`; each keeps the x of its last point."""
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    if size == 1:
        return points
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(chunk[-1][0], _mean(chunk)) for chunk in chunks]


def _moving_mean(points: Points) -> Points:
    """Average each y over the finite ones in a window of a twentieth of the points (at least 5)."""
    half = max(2, len(points) // 40)
    return [
        (x, _mean(points[max(0, index - half) : index + half + 1]) if math.isfinite(y) else math.nan)
        for index, (x, y) in enumerate(points)
    ]
