"""Run checks one after the other and print their results as JSON; used by the scripts beside it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check."""
    CHECKS.append(function)
    return function


def main() -> None:
    """Run all checks and print the errors by name; an empty text is success."""
    results = {}
    for function in CHECKS:
        try:
            function()
            results[function.__name__] = ""
        except Exception:  # noqa: BLE001 -- every failure is reported
            results[function.__name__] = traceback.format_exc()[-1500:]
    print(json.dumps(results))
