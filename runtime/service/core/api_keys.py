"""Who may call the service: a file of hashed keys."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....options import Checked, checked, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey(Checked):
    """A key's rights.

    Args:
        sha256: of the key, as 64 hexadecimal digits.
        models: which models it may use; empty is all.
    """

    sha256: str = option()
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request.

    Args:
        name: of the key.
        models: which models the caller may use; empty is all.
    """

    name: str
    models: tuple[str, ...] = ()

    def may_use(self, model: str) -> bool:
        """Whether the caller may use a model."""
        return not self.models or model in self.models


class ApiKeys:
    """The keys of a TOML file, which is read again when it changes.

    Each key is a table: its name, ``sha256``, and optionally ``models``. The file does not hold the keys
    themselves. They should be random, such as from ``openssl rand -hex 32``: a hash of a guessable key can be
    guessed too.

    Args:
        path: of the file.

    Raises:
        UsageError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._modified()
        self._callers = _read(path)

    def find(self, key: str | None) -> Caller | None:
        """Who a key belongs to; None if nobody.

        A file that was changed into something unreadable leaves the keys as they were.
        """
        try:
            if (stamp := self._modified()) != self._stamp:
                self._callers, self._stamp = _read(self._path), stamp
        except UsageError:
            pass
        if not key:
            return None
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = None
        for known, caller in self._callers.items():  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _modified(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise UsageError(f"{self._path} with the API keys cannot be read: {error.strerror}") from error
        return stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> dict[str, Caller]:
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} with the API keys cannot be read as TOML: {error}") from error
    found: dict[str, Caller] = {}
    for name, table in content.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: '{name}' must be a table with the key's sha256")
        table = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        if "sha256" not in table:
            raise UsageError(f"{path}: the key '{name}' has no sha256")
        key = checked(ApiKey, table, f"the key '{name}' of {path}")
        digest = key.sha256.lower()
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise UsageError(f"{path}: sha256 of '{name}' must be 64 hexadecimal digits")
        found[digest] = Caller(name, key.models)
    if not found:
        raise UsageError(f"{path} has no keys, so nobody could call the service")
    return found
