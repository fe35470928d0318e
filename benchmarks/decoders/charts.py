"""Draw bar and line charts as small SVG files, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#b0b8c1", "#8ecae6", "#90be6d", "#f9c74f", "#f8961e", "#c77dff", "#577590", "#e76f51", "#d62828")
_WIDTH, _ROW, _LEFT, _TOP = 760, 17, 150, 52


def bars(
    title: str, groups: Mapping[str, Mapping[str, float]], *, unit: str, notes: Mapping[str, str]
) -> str:
    """Return a chart of horizontal bars: one block per group, one bar per series.

    Args:
        title: text above the chart.
        groups: group -> series -> value.
        unit: unit of the values, for the subtitle.
        notes: "group/series" -> text after the bar's number.
    """
    most = max(value for series in groups.values() for value in series.values())
    names = list(dict.fromkeys(name for series in groups.values() for name in series))
    scale, y, parts = (_WIDTH - _LEFT - 190) / most, _TOP, [_text(10, 22, title, size=15, bold=True)]
    parts.append(_text(10, 40, unit, colour="#666"))
    for group, series in groups.items():
        parts.append(_text(10, y + 13, group, bold=True))
        y += 19
        for name, value in series.items():
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(_text(_LEFT - 8, y + 12, name, anchor="end"))
            size = max(1.0, value * scale)
            parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{size:.1f}" height="13" fill="{colour}"/>')
            label = f"{value:g}  {notes.get(f'{group}/{name}', '')}"
            parts.append(_text(_LEFT + size + 5, y + 12, label))
            y += _ROW
        y += 8
    return _svg(y + 6, parts)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str) -> str:
    """Return a line chart with logarithmic axes and the value of every point.

    Args:
        title: text above the chart.
        series: name -> points.
        x: label of the horizontal axis.
        y: label of the vertical axis.
    """
    points = [point for line in series.values() for point in line]
    bounds = [(math.log2(min(p[i] for p in points)), math.log2(max(p[i] for p in points))) for i in (0, 1)]

    def place(point: tuple[float, float]) -> tuple[float, float]:
        fractions = [
            (math.log2(value) - low) / ((high - low) or 1)
            for value, (low, high) in zip(point, bounds, strict=True)
        ]
        return 70 + fractions[0] * 520, 330 - fractions[1] * 250

    parts = [_text(10, 22, title, size=15, bold=True), _text(10, 40, y, colour="#666")]
    parts.append('<path d="M70 330H600M70 330V70" stroke="#999" fill="none"/>')
    parts.append(_text(330, 372, x, anchor="middle", colour="#666"))
    for value in sorted({point[0] for point in points}):
        parts.append(_text(place((value, points[0][1]))[0], 350, f"{value:g}", anchor="middle"))
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[-1 - index]
        places = [place(point) for point in line]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
        parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        for (px, py), (_, value) in zip(places, line, strict=True):
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>')
            parts.append(_text(px - 4, py - 7, f"{value:.2g}", anchor="end", colour=colour))
        parts.append(_text(places[-1][0] + 8, places[-1][1] + 4, name, colour=colour, bold=True))
    return _svg(385, parts)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    colour: str = "#222",
    bold: bool = False,
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif">', back, *parts, "</svg>", ""])
