"""Draw size, divergence and decoding speed of quantized models as an SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _RADIUS = 980, 620, 9
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 345, 74, 56
_STYLE = """
  text { font: 12px sans-serif; fill: #1c2430 } .soft { fill: #5d6877 }
  .number { font-size: 10px; fill: #fff } .title { font-size: 15px; font-weight: bold }
  .ground { fill: #fff } .line { stroke: #dde1e7 } .dot { stroke: #fff; stroke-width: 1.5 }
  .front { stroke: #5d6877; fill: none; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6eaf0 } .soft { fill: #98a3b3 } .ground { fill: #12161c } .line { stroke: #2c3542 }
    .dot { stroke: #12161c } .front { stroke: #98a3b3 }
  }"""
_SLOW, _FAST = (196, 98, 16), (29, 111, 184)  # colours of the slowest and the fastest decoding
_MIN_KL = 1e-4  # smaller ones lie on the lower edge


def tradeoffs(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the chart of all methods that were evaluated and timed.

    Args:
        results: method name -> ``bytes``, ``lowered`` with ``kl``, ``decode`` with ``median``.
    """
    points = {
        name: (facts["bytes"] / 1e6, max(facts["lowered"]["kl"], _MIN_KL), facts["decode"]["median"])
        for name, facts in results.items()
        if "lowered" in facts and "decode" in facts
    }
    axes = _Axes([point[0] for point in points.values()], [point[1] for point in points.values()])
    slowest, fastest = (limit(point[2] for point in points.values()) for limit in (min, max))
    parts = [
        _text(14, 24, "Embedded model: size, divergence from float, speed of decoding", "title"),
        _text(
            14,
            44,
            f"KL: mean, nats; colour: {slowest:.0f} tokens/s (orange) to {fastest:.0f} (blue); "
            "dashed: Pareto front; overlapping dots are moved to the right",
            "soft",
        ),
        *axes.grid(),
        axes.front(list(points.values())),
    ]
    ordered = sorted(points.items(), key=lambda item: -item[1][1])
    rows = ("", "", "MB", "KL", "tokens/s")
    parts += _row(_TOP + 4, rows, "soft")
    taken: list[tuple[float, float]] = []
    for number, (name, (size, kl, speed)) in enumerate(ordered, start=1):
        taken.append(_free(*axes.place(size, kl), taken))
        colour = _mix((speed - slowest) / ((fastest - slowest) or 1))
        title = f"{name}: {size:.1f} MB, KL {kl:.2g}, {speed:.0f} tokens/s"
        x, y = taken[-1]
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" fill="{colour}">'
            f"<title>{escape(title)}</title></circle>"
        )
        parts.append(_text(x, y + 4, str(number), "number", "middle"))
        divergence = f"{kl:.4f}" if kl > _MIN_KL else "< 0.0001"
        cells = (str(number), name, f"{size:.1f}", divergence, f"{speed:.0f}")
        parts += _row(_TOP + 4 + 18 * number, cells, "")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    return "\n".join(
        [
            head,
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


class _Axes:
    """Two logarithmic axes."""

    def __init__(self, sizes: list[float], divergences: list[float]) -> None:
        self._x = math.log(min(sizes) * 0.95), math.log(max(sizes) * 1.15)
        self._y = math.log(min(divergences) * 0.8), math.log(max(divergences) * 1.3)

    def place(self, size: float, divergence: float) -> tuple[float, float]:
        """Return x and y of a point in pixels."""
        across = (math.log(size) - self._x[0]) / (self._x[1] - self._x[0])
        up = (math.log(divergence) - self._y[0]) / (self._y[1] - self._y[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        """Return the grid lines and their labels."""
        parts = []
        for size in (4, 5, 6, 8, 10, 15, 20, 30):
            x, _ = self.place(size, 1)
            if _LEFT <= x <= _WIDTH - _RIGHT:
                parts.append(f'<path class="line" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
                parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{size} MB", "soft", "middle"))
        for divergence in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
            _, y = self.place(1, divergence)
            if _TOP <= y <= _HEIGHT - _BOTTOM:
                parts.append(f'<path class="line" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
                parts.append(_text(_LEFT - 8, y + 4, f"{divergence:g}", "soft", "end"))
        parts.append(_text(_LEFT, _HEIGHT - 12, "weights and graph on disk", "soft"))
        parts.append(_text(_LEFT, _TOP - 10, "mean KL", "soft"))
        return parts

    def front(self, points: list[tuple[float, float, float]]) -> str:
        """Return the Pareto front of size and divergence as a line."""
        places, nearest = [], float("inf")
        for size, divergence, _ in sorted(points):
            if divergence < nearest:
                nearest = divergence
                places.append(self.place(size, divergence))
        return f'<path class="front" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def _free(x: float, y: float, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the nearest position to the right where no other dot overlaps."""
    while any(math.hypot(x - other[0], y - other[1]) < 2 * _RADIUS for other in taken):
        x += 2
    return x, y


def _row(y: float, cells: tuple[str, ...], kind: str) -> list[str]:
    """Return a row of the table beside the chart."""
    left = _WIDTH - _RIGHT + 20
    places = ((22, "end"), (32, "start"), (190, "end"), (245, "end"), (310, "end"))
    return [_text(left + x, y, cell, kind, anchor) for cell, (x, anchor) in zip(cells, places, strict=True)]


def _mix(share: float) -> str:
    parts = (round(slow + share * (fast - slow)) for slow, fast in zip(_SLOW, _FAST, strict=True))
    return f"rgb({', '.join(map(str, parts))})"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
