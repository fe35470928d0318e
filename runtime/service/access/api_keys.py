"""API keys: a TOML file of hashed keys, their rights and their budgets."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import tomllib
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....options import Checked, checked, option
from ....records import dataclass
from ..core.caller import Budgets, Caller

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey(Checked):
    """One entry of the key file.

    Args:
        sha256: the SHA-256 hash of the key, as 64 hexadecimal digits.
        models: the models that the key may use; empty allows all.
        admin: whether the key may load and unload models.
        requests_per_minute: the maximum number of requests in a minute.
        tokens_per_minute: the maximum number of tokens of prompts and answers in a minute.
        tokens_per_day: the maximum number of tokens of prompts and answers in a day.
    """

    sha256: str = option()
    models: tuple[str, ...] = ()
    admin: bool = False
    requests_per_minute: int | None = option(None, least=1)
    tokens_per_minute: int | None = option(None, least=1)
    tokens_per_day: int | None = option(None, least=1)


class ApiKeys:
    """The keys of a TOML file. The file is read again when it changes.

    Each key is a table, named after the key, with the fields of ``ApiKey``. The file holds hashes, not
    keys. Use random keys, for example from ``openssl rand -hex 32``: a hash of a guessable key can be
    guessed too. If a changed file cannot be read, the keys that were read before stay valid.

    Args:
        path: the key file.

    Raises:
        UsageError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._modified()
        self._callers = {digest: _caller(name, key) for digest, (name, key) in _read(path).items()}

    def find(self, key: str | None) -> Caller | None:
        """Return the owner of a key, or None if the key is unknown."""
        if self._modified() != self._stamp:
            self.reload()
        if not key:
            return None
        # HTTP decodes headers as Latin-1, so any text can be encoded here.
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        owner = None
        # Every key is compared, so that the duration reveals nothing.
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                owner = caller
        return owner

    def named(self, name: str) -> Caller | None:
        """Return the owner with a name, or None if its key was removed."""
        return next((caller for caller in self._callers.values() if caller.name == name), None)

    def reload(self) -> None:
        """Read the file again. What a key has used of its limits stays used, also if they change."""
        self._stamp = self._modified()
        try:
            keys = _read(self._path)
        except UsageError as error:  # may be half-written
            _log.warning("the changed API keys are not used: %s", error)
            return
        callers = {}
        for digest, (name, key) in keys.items():
            caller, kept = _caller(name, key), self.named(name)
            if kept is not None:
                kept.budgets.change_to(caller.budgets)  # running requests count for them too
                caller = dataclasses.replace(caller, budgets=kept.budgets)
            callers[digest] = caller
        self._callers = callers

    def _modified(self) -> tuple[int, int]:
        try:
            stat = self._path.stat()
        except OSError:
            return 0, 0
        return stat.st_mtime_ns, stat.st_size


def _caller(name: str, key: ApiKey) -> Caller:
    budgets = Budgets(key.requests_per_minute, key.tokens_per_minute, key.tokens_per_day)
    return Caller(name, key.models, key.admin, budgets)


def _read(path: Path) -> dict[str, tuple[str, ApiKey]]:
    """Return name and entry of each key by its hash."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} with the API keys cannot be read as TOML: {error}") from error
    keys: dict[str, tuple[str, ApiKey]] = {}
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
        if digest in keys:
            raise UsageError(f"{path}: '{keys[digest][0]}' and '{name}' have the same sha256")
        keys[digest] = (name, key)
    if not keys:
        raise UsageError(f"{path} has no keys, so nobody could call the service")
    return keys
