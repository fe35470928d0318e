"""What a check of kernels found on a kind of device, kept in the cache: it is made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...storage.cache import cache_key, cached_folder

_FILE = "verdict.json"


def stored_verdict(facts: Mapping[str, Any], check: Callable[[], str | None]) -> str | None:
    """Return what a check found before with the same facts and libraries, else make it.

    Args:
        facts: what it depends on, as JSON values.
        check: returns what is wrong, None if nothing is; what it raises is not kept.

    Raises:
        UsageError: the cache folder cannot be used.
    """

    def build(folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(check()), encoding="utf-8")

    folder = cached_folder("device-checks", cache_key(**facts), build, facts)
    verdict: str | None = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    return verdict
