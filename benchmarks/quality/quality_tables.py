"""Format the results of ``quality.py`` as a Markdown table, grouped by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quality_methods import Method

_HEAD = "| stored as | tool | method | MB | perplexity ratio | KL | seconds | processor s | peak MB |"


def table(methods: Sequence[Method], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table; each kind is sorted by KL divergence."""
    lines = [_HEAD, "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for kind in dict.fromkeys(method.kind for method in methods):
        members = [method for method in methods if method.kind == kind]
        members.sort(key=lambda method: _judged(results[method.key]).get("kl", float("inf")))
        lines += [_row(method, results[method.key]) for method in members]
    return "\n".join([*lines, ""])


def _judged(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures of a graph without lowering, or after lowering if it does not run without."""
    found: Mapping[str, Any] = facts if "kl" in facts else facts.get("lowered", {})
    return found


def _row(method: Method, facts: Mapping[str, Any]) -> str:
    judged = _judged(facts)
    cells = [
        method.kind,
        method.tool,
        method.name,
        f"{facts['bytes'] / 1e6:.1f}",
        f"{judged['ratio']:.4f}" if judged else "",
        f"{judged['kl']:.2g}" if judged else "",
        f"{facts['seconds']:.1f}",
        f"{facts['processor_seconds']:.1f}",
        str(facts["peak_mb"]),
    ]
    return f"| {' | '.join(cells)} |"
