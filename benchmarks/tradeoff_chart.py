"""Size against divergence of quantized models, and speed of decoding, as an SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 860, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 64, 56
_STYLE = """
  text { font: 12px sans-serif; fill: #1c2430 } .soft { fill: #5d6877 }
  .title { font-size: 15px; font-weight: bold }
  .ground { fill: #fff } .line { stroke: #dde1e7 } .dot { stroke: #fff; stroke-width: 1.5 }
  .front { stroke: #5d6877; fill: none; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6eaf0 } .soft { fill: #98a3b3 } .ground { fill: #12161c } .line { stroke: #2c3542 }
    .dot { stroke: #12161c } .front { stroke: #98a3b3 }
  }"""
_SLOW, _FAST = (244, 162, 97), (29, 111, 184)  # colours of the slowest and the fastest decoding
_LEAST_KL = 1e-4  # smaller ones lie on the lower edge


def tradeoffs(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the chart of all methods that were judged and timed.

    Args:
        results: by name: ``bytes``, ``lowered`` with ``kl``, ``decode`` with ``median``.
    """
    points = {
        name: (facts["bytes"] / 1e6, max(facts["lowered"]["kl"], _LEAST_KL), facts["decode"]["median"])
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
            f"colour: {slowest:.0f} tokens/s (orange) to {fastest:.0f} (blue); "
            "dashed: nothing is both smaller and nearer",
            "soft",
        ),
        *axes.grid(),
        axes.front(list(points.values())),
    ]
    taken: list[tuple[float, float]] = []
    for name, (size, kl, speed) in sorted(points.items(), key=lambda item: item[1][1], reverse=True):
        x, y = axes.place(size, kl)
        colour = _mix((speed - slowest) / ((fastest - slowest) or 1))
        parts.append(
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}">'
            f"<title>{escape(name)}: {size:.1f} MB, KL {kl:.2g}, {speed:.0f} tokens/s</title></circle>"
        )
        label = _free(x + 10, y + 4, taken)
        taken.append(label)
        if abs(label[1] - y) > 10:
            parts.append(
                f'<path class="line" d="M{x + 6:.1f} {y:.1f}L{label[0] - 2:.1f} {label[1] - 4:.1f}"/>'
            )
        parts.append(_text(*label, name))
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
    """Both logarithmic."""

    def __init__(self, sizes: list[float], divergences: list[float]) -> None:
        self._x = math.log(min(sizes) * 0.95), math.log(max(sizes) * 1.05)
        self._y = math.log(min(divergences) * 0.8), math.log(max(divergences) * 1.3)

    def place(self, size: float, divergence: float) -> tuple[float, float]:
        """Return where a point lies."""
        across = (math.log(size) - self._x[0]) / (self._x[1] - self._x[0])
        up = (math.log(divergence) - self._y[0]) / (self._y[1] - self._y[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        """Return lines and their values."""
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
        parts.append(_text(_LEFT + 4, _TOP + 12, "mean KL, nats", "soft"))
        return parts

    def front(self, points: list[tuple[float, float, float]]) -> str:
        """Return the line through what nothing else beats in both size and divergence."""
        places, nearest = [], float("inf")
        for size, divergence, _ in sorted(points):
            if divergence < nearest:
                nearest = divergence
                places.append(self.place(size, divergence))
        return f'<path class="front" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'


def _free(x: float, y: float, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Return a place for a label below ``y`` that no other label covers."""
    while any(abs(x - other[0]) < 130 and abs(y - other[1]) < 13 for other in taken):
        y += 3
    return x, y


def _mix(share: float) -> str:
    parts = (round(slow + share * (fast - slow)) for slow, fast in zip(_SLOW, _FAST, strict=True))
    return f"rgb({', '.join(map(str, parts))})"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
