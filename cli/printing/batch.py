"""Print the outcome and the state of batch jobs."""

from __future__ import annotations

import time
from typing import Any


def describe(facts: dict[str, Any]) -> str:
    """Return the state of a job as text."""
    counts, usage = facts["request_counts"], facts["usage"]
    answered = counts["completed"] + counts["failed"]
    of = "" if counts["total"] is None else f" of {counts['total']}"
    reasons = ", ".join(f"{count} {code}" for code, count in sorted(facts["errors"].items()))
    lines = [
        f"{facts['status']}: {answered}{of} lines answered, {counts['failed']} failed"
        + (f" ({reasons})" if reasons else ""),
        f"model {facts['model']}, {usage['input_tokens']} prompt tokens "
        f"({usage['input_tokens_details']['cached_tokens']} cached), {usage['output_tokens']} generated",
        f"output {facts['output_file']}",
    ]
    process = facts["process"]
    if process:
        lines.append(f"process {process.get('pid')} on {process.get('host')}")
    if facts["updated_at"]:
        lines.append(f"last answer {time.time() - facts['updated_at']:.0f} s ago")
    return "\n".join(lines)
