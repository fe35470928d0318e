"""Environment variables of LMCache, for those who have them: the tiers of KV that they describe.

Names and defaults: https://docs.lmcache.ai/api_reference/configurations.html
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ..errors import UsageError

_log = logging.getLogger(__name__)

_PREFIX = "LMCACHE_"
_GB = 1 << 30
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
# What carryall does anyway, by value in lower case.
_SAME = {
    "LMCACHE_SAVE_DECODE_CACHE": ("true", "1"),
    "LMCACHE_SAVE_UNFULL_CHUNK": ("false", "0"),
    "LMCACHE_CACHE_POLICY": ("lru",),
    "LMCACHE_REMOTE_SERDE": ("naive",),
    "LMCACHE_CHUNK_SIZE": ("64",),
}


def lmcache_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the engine that LMCache's variables stand for; log variables that have none.

    Raises:
        UsageError: a value is invalid.
    """
    given = {name: value for name, value in environment.items() if name.startswith(_PREFIX) and value}
    options: dict[str, Any] = {}
    cpu = _flag(given.pop("LMCACHE_LOCAL_CPU", None), "LMCACHE_LOCAL_CPU")
    size = _bytes(given.pop("LMCACHE_MAX_LOCAL_CPU_SIZE", None), "LMCACHE_MAX_LOCAL_CPU_SIZE")
    if cpu is False:
        options["swap_bytes"] = 0
    elif cpu or size is not None:
        options["swap_bytes"] = 5 * _GB if size is None else size
    if (folder := given.pop("LMCACHE_LOCAL_DISK", None)) is not None:
        options["prefix_cache_dir"] = _folder(folder)
    if (
        size := _bytes(given.pop("LMCACHE_MAX_LOCAL_DISK_SIZE", None), "LMCACHE_MAX_LOCAL_DISK_SIZE")
    ) is not None:
        options["prefix_cache_bytes"] = size
    if (url := given.pop("LMCACHE_REMOTE_URL", None)) is not None:
        options["prefix_cache_url"] = _store(url)
    ignored = [f"{name}={value}" for name, value in given.items() if value.lower() not in _SAME.get(name, ())]
    if ignored:
        _log.warning(
            "these variables of LMCache have no counterpart in carryall and are ignored: %s",
            ", ".join(ignored),
        )
    return options


def _flag(value: str | None, name: str) -> bool | None:
    if value is None:
        return None
    if value.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{name} is '{value}'; it must be true or false")
    return value.lower() in _TRUE


def _bytes(value: str | None, name: str) -> int | None:
    if value is None:
        return None
    try:
        size = int(float(value) * _GB)
    except (ValueError, OverflowError):
        size = -1
    if size < 0:
        raise UsageError(f"{name} is '{value}'; it must be a number of GB")
    return size


def _folder(value: str) -> str:
    """Return the folder of ``file:///path``, or of a path."""
    parts = urlsplit(value)
    if parts.scheme not in ("", "file") or not parts.path:
        raise UsageError(f"LMCACHE_LOCAL_DISK is '{value}'; it must be file:///FOLDER")
    return parts.path


def _store(value: str) -> str:
    """Return the URL of a store; LMCache's ``fs://host:port/path`` is a folder."""
    parts = urlsplit(value)
    if parts.scheme == "fs":
        return f"file://{parts.path}"
    if parts.scheme in ("lm", "mooncakestore", "infinistore", "redis-sentinel", "blackhole", "audit"):
        raise UsageError(
            f"LMCACHE_REMOTE_URL is '{value}', and carryall has no client for {parts.scheme}://; use "
            "redis://, valkey://, or a folder of fsspec such as s3://bucket/folder"
        )
    return value
