"""Line and area charts as inline SVG, coloured by CSS variables to follow a page's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 40
MAX_POINTS = 300  # more than the plot has room for; longer series are averaged in bins
_MAX_MARKERS = 50  # more would run into each other
_SMOOTH_FROM = 12  # points from which a moving mean is drawn over a noisy series


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]  # (x, y), x ascending; a y that is not finite breaks the line
    colour: int  # 1 .. 6, the CSS variable `--c1` .. `--c6`
    markers: bool = False  # draw every point (sparse series); smoothed instead above `_MAX_MARKERS` points
    smooth: bool = False  # draw points faintly under a moving mean, from `_SMOOTH_FROM` points


def line_chart(series: Sequence[Series], x_label: str = "step", zero: bool = False, percent: bool = False) -> str:
    """Return an SVG with one line per series, or a placeholder if there is no finite point.

    `zero` starts the y axis at 0; `percent` shows a fraction y on an axis of 0 to 100 %.
    """
    binned = [Series(s.name, _binned(s.points), s.colour, s.markers, s.smooth) for s in series]
    finite = [point for s in binned for point in s.points if math.isfinite(point[1])]
    if not finite:
        return '<p class="empty">no data</p>'
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    frame = _Frame.around([x for x, _ in finite], (0.0, 1.0) if percent else (min(0.0, low) if zero else low, high))
    parts = [frame.axes(x_label, percent)]
    for s in binned:
        count = sum(math.isfinite(y) for _, y in s.points)
        markers = s.markers and count <= _MAX_MARKERS
        smoothed = (s.smooth and count >= _SMOOTH_FROM) or (s.markers and not markers)
        parts.append(frame.path(s.points, s.colour, faint=smoothed))
        if smoothed:
            parts.append(frame.path(_moving_mean(s.points), s.colour))
        parts += frame.dots(s.points, s.colour, lonely_only=not markers)
    parts += frame.hover(binned, x_label, percent)
    return _svg(parts, ", ".join(s.name for s in series))


def area_chart(series: Sequence[Series], x_label: str = "step") -> str:
    """Return a stacked SVG of non-negative series with the same x; NaN counts as 0."""
    binned = [Series(s.name, _binned(s.points), s.colour) for s in series if s.points]
    if not binned or not any(math.isfinite(y) for s in binned for _, y in s.points):
        return '<p class="empty">no data</p>'
    if len(binned[0].points) == 1:  # an area of one step has no width
        return line_chart([Series(s.name, s.points, s.colour, markers=True) for s in binned], x_label, zero=True)
    xs = [x for x, _ in binned[0].points]
    stacks, base = [], [0.0] * len(xs)
    for s in binned:
        top = [b + (max(0.0, y) if math.isfinite(y) else 0.0) for b, (_, y) in zip(base, s.points, strict=True)]
        stacks.append((s, base, top))
        base = top
    frame = _Frame.around(xs, (0.0, max(base)))
    parts = [frame.axes(x_label, percent=False)]
    parts += [frame.band(xs, bottom, top, s.colour) for s, bottom, top in stacks]
    parts += frame.hover(binned, x_label, percent=False)
    return _svg(parts, ", ".join(s.name for s in series))


def legend(series: Sequence[Series]) -> str:
    """Return an HTML legend of the series that have a finite point."""
    items = [
        f'<li><i style="background:var(--c{s.colour})"></i>{escape(s.name)}</li>'
        for s in series
        if any(math.isfinite(y) for _, y in s.points)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


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


@dataclass(frozen=True)
class _Frame:
    x_ticks: list[float]
    y_ticks: list[float]
    x_range: tuple[float, float]

    @classmethod
    def around(cls, xs: Sequence[float], y_range: tuple[float, float]) -> _Frame:
        low, high = min(xs), max(xs)
        if low == high:
            return cls([low], ticks(*y_range), (low - 1, high + 1))
        inside = [tick for tick in ticks(low, high, 7, whole=True) if low <= tick <= high]
        return cls(inside, ticks(*y_range), (low, high))

    def x(self, value: float) -> float:
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, x_label: str, percent: bool) -> str:
        step = self.y_ticks[1] - self.y_ticks[0]
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            text = f"{tick:.0%}" if percent else label(tick, step)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for tick in self.x_ticks:
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:.0f}</text>')
        middle = (_LEFT + right) / 2
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
        return "".join(parts)

    def path(self, points: Sequence[tuple[float, float]], colour: int, faint: bool = False) -> str:
        commands, pen_down = [], False
        for x, y in points:
            if math.isfinite(y):
                commands.append(f"{'L' if pen_down else 'M'}{self.x(x):.1f} {self.y(y):.1f}")
            pen_down = math.isfinite(y)
        look = 'opacity="0.35" stroke-width="1.2"' if faint else 'stroke-width="2"'
        return f'<path class="line" d="{"".join(commands)}" style="stroke:var(--c{colour})" {look}/>'

    def dots(self, points: Sequence[tuple[float, float]], colour: int, lonely_only: bool) -> list[str]:
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
        for s in series:
            for x, y in s.points:
                if math.isfinite(y):
                    texts.setdefault(x, []).append(f"{s.name}: {f'{y:.1%}' if percent else f'{y:.4g}'}")
        xs = sorted(texts)
        columns = []
        for index, x in enumerate(xs):
            left = (self.x(xs[index - 1]) + self.x(x)) / 2 if index else _LEFT
            right = (self.x(x) + self.x(xs[index + 1])) / 2 if index + 1 < len(xs) else WIDTH - _RIGHT
            title = escape("\n".join([f"{x_label} {x:g}", *texts[x]]))
            columns.append(
                f'<g class="hover"><title>{title}</title>'
                f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{HEIGHT - _TOP - _BOTTOM}"/>'
                f'<line x1="{self.x(x):.1f}" x2="{self.x(x):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></g>'
            )
        return columns


def _svg(parts: Sequence[str], description: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">{"".join(parts)}</svg>'


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average runs of points down to `MAX_POINTS`; each keeps the x of its last point."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    bins = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        finite = [y for _, y in chunk if math.isfinite(y)]
        bins.append((chunk[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return bins


def _moving_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average each y over the finite ones in a window of a twentieth of the points (at least 5)."""
    half = max(2, len(points) // 40)
    means = []
    for index, (x, y) in enumerate(points):
        near = [v for _, v in points[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        means.append((x, sum(near) / len(near) if math.isfinite(y) else math.nan))
    return means
