"""API keys: a TOML file of hashed keys and their rights."""

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
    """One entry of the key file.

    Args:
        sha256: the SHA-256 hash of the key, as 64 hexadecimal digits.
        models: the models that the key may use; empty allows all.
    """

    sha256: str = option()
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of the API key that a request has.

    Args:
        name: the key's name in the file.
        models: the models that the caller may use; empty allows all.
    """

    name: str
    models: tuple[str, ...] = ()

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return not self.models or model in self.models


class ApiKeys:
    """The keys of a TOML file. The file is read again when it changes.

    Each key is a table, named after the key, with ``sha256`` and optionally ``models``. The file holds
    hashes, not keys. Use random keys, for example from ``openssl rand -hex 32``: a hash of a guessable key
    can be guessed too.

    Args:
        path: the key file.

    Raises:
        UsageError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._modified()
        self._callers = _read(path)

    def find(self, key: str | None) -> Caller | None:
        """Return the owner of a key, or None if the key is unknown.

        If the changed file cannot be read, the keys that were read before stay valid.
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
        for (
            known,
            caller,
        ) in self._callers.items():  # compares with every key, so that the duration reveals nothing
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
