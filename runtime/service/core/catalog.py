"""What the names in requests mean: models, their versions, aliases and LoRA adapters."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....errors import RequestError, UnknownModelError
from ....options import shown
from .model_entry import Entry, ModelStatus


@dataclass(frozen=True, slots=True)
class Named:
    """What a name in a request means.

    Args:
        name: the own name of the model.
        versions: the versions that may answer, the newest last.
        adapter: the LoRA adapter that is named; None is the model itself.
    """

    name: str
    versions: Sequence[Entry]
    adapter: str | None = None


class Catalog:
    """The versions of the models of a service, by name.

    Args:
        versions: the versions of each model, the newest last.
        aliases: model names by alias, in which ``*`` stands for any text.
        default: the model of requests without a model name; None takes the only language model, or
            without one the only encoder, if any.
    """

    def __init__(
        self, versions: Mapping[str, Sequence[Entry]], aliases: Mapping[str, str], default: str | None
    ) -> None:
        self.versions = versions
        self._aliases = aliases
        self._given_default = default

    @property
    def entries(self) -> list[Entry]:
        """Return all versions of all models."""
        return [entry for versions in self.versions.values() for entry in versions]

    @property
    def adapters(self) -> list[str]:
        """Return the names of the LoRA adapters of all models."""
        return [name for entry in self.entries for name in entry.loras]

    def statuses(self, keep_seconds: float | None = None) -> list[ModelStatus]:
        """Return the status of all versions of all models; see ``Entry.kept_for``."""
        return [
            ModelStatus(
                name=entry.name,
                version=entry.version,
                kind=entry.loader.kind,
                state=entry.state,
                reason=entry.reason,
                info=entry.model.info if entry.model is not None else None,
                aliases=tuple(
                    alias for alias, name in self._aliases.items() if name == entry.name and "*" not in alias
                ),
                only=len(versions) == 1,
                loras=entry.loras,
                evicted=entry.evicted,
                seconds_left=entry.last_used + entry.kept_for(keep_seconds) - time.monotonic(),
                summary=entry.model.summary if entry.model is not None else (lambda: None),
            )
            for versions in self.versions.values()
            for entry in versions
        ]

    def is_model(self, name: str) -> bool:
        """Return whether a name is that of a model, or an alias."""
        return name in self.versions or self._named(name) in self.versions

    def _named(self, name: str) -> str:
        """Return the model of an alias; other names are returned as they are."""
        if name in self.versions:
            return name
        if name in self._aliases:
            return self._aliases[name]
        return next((own for alias, own in self._aliases.items() if _matches(alias, name)), name)

    def base_of(self, name: str | None) -> Entry | None:
        """Return the model that has a LoRA adapter of this name; None if there is no such adapter."""
        if not name or self.is_model(name):
            return None
        return next((entry for entry in self.entries if entry.state == "ready" and name in entry.loras), None)

    def find(self, name: str | None, version: str = "") -> Named:
        """Return what a request names.

        Args:
            name: a name, an alias, a LoRA adapter, or one of these with ``:VERSION``; None or an empty text
                is the default.
            version: a version, as text; empty names none.

        Raises:
            UnknownModelError: there is no model of that name and version.
            RequestError: no name is given, and there is no default.
        """
        wanted = name or self._default
        base = self.base_of(wanted)
        if base is not None:
            return Named(base.name, [base], wanted)
        names = ", ".join([*self.versions, *self.adapters]) or "none"
        if wanted is None:
            raise RequestError(f"the request names no model; there are: {names}")
        own = self._named(wanted)
        if own not in self.versions and ":" in own:
            own, _, version = own.rpartition(":")
            own = self._named(own)
        if own not in self.versions:
            own = self._in_another_case(own)
        if own not in self.versions:
            raise UnknownModelError(f"there is no model {shown(wanted)}; there are: {names}")
        entries = [entry for entry in self.versions[own] if version in ("", entry.version)]
        if not entries:
            versions = [entry.version for entry in self.versions[own]]
            served = f"versions {', '.join(versions)} are" if versions[1:] else f"version {versions[0]} is"
            raise UnknownModelError(f"there is no version {version} of '{own}'; {served} served")
        return Named(own, entries)

    def _in_another_case(self, name: str) -> str:
        """Return the model or alias that differs from a name in case only; the name if there is not one."""
        known = {*self.versions, *self._aliases}
        same = [other for other in known if other.casefold() == name.casefold()]
        return self._aliases.get(same[0], same[0]) if len(same) == 1 else name

    def drawn(self, named: Named) -> Entry:
        """Return the version that answers a request, by weight among those that are ready.

        A version that was unloaded to free memory counts as ready. Without a ready one, it is the newest.
        """
        versions = named.versions
        ready = [entry for entry in versions if entry.state == "ready" or entry.evicted]
        weighted = [entry for entry in ready if entry.loader.weight > 0]
        weights = [entry.loader.weight for entry in weighted] or None
        (entry,) = random.choices(weighted or ready[-1:] or versions[-1:], weights)  # noqa: S311 -- no secret
        return entry

    @property
    def _default(self) -> str | None:
        names: dict[str, list[str]] = {}
        for name, versions in self.versions.items():
            names.setdefault(versions[-1].loader.kind, []).append(name)
        candidates = names.get("llm") or names.get("encoder", [])
        return self._given_default or (candidates[0] if len(candidates) == 1 else None)


def _matches(alias: str, name: str) -> bool:
    """Return whether an alias with ``*`` stands for a name, whatever the case."""
    pattern = ".*".join(map(re.escape, alias.split("*")))
    return "*" in alias and re.fullmatch(pattern, name, re.IGNORECASE | re.DOTALL) is not None
