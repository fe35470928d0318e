"""What the names in requests mean: models, their versions, aliases and LoRA adapters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ....errors import RequestError, UnknownModelError
from ....options import shown
from .model_entry import Entry, ModelStatus


class Catalog:
    """The versions of the models of a service, by name.

    Args:
        versions: the versions of each model, the newest last.
        aliases: model names by alias.
        default: the model of requests without a model name; None takes the only language model, if any.
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

    def statuses(self) -> list[ModelStatus]:
        """Return the status of all versions of all models."""
        return [
            ModelStatus(
                name=entry.name,
                version=entry.version,
                kind=entry.loader.kind,
                state=entry.state,
                reason=entry.reason,
                info=entry.model.info if entry.model is not None else None,
                aliases=tuple(alias for alias, name in self._aliases.items() if name == entry.name),
                only=len(versions) == 1,
                loras=entry.loras,
                evicted=entry.evicted,
                summary=entry.model.summary if entry.model is not None else (lambda: None),
            )
            for versions in self.versions.values()
            for entry in versions
        ]

    def is_model(self, name: str) -> bool:
        """Return whether a name is that of a model, or an alias."""
        return name in self.versions or name in self._aliases

    def base_of(self, name: str | None) -> Entry | None:
        """Return the model that has a LoRA adapter of this name; None if there is no such adapter."""
        if not name or self.is_model(name):
            return None
        return next((entry for entry in self.entries if entry.state == "ready" and name in entry.loras), None)

    def resolved(self, name: str | None, version: str = "") -> tuple[str, str]:
        """Return the own name and the version of what a request names; the version may be empty.

        For the name of a LoRA adapter, these are name and version of its base model.

        Args:
            name: a name, an alias, or one of these with ``:VERSION``; None or an empty text is the default.
            version: a version, as text; empty names none.

        Raises:
            UnknownModelError: there is no model of that name and version.
            RequestError: no name is given, and there is no default.
        """
        wanted = name or self._default
        base = self.base_of(wanted)
        if base is not None:
            return base.name, base.version
        names = ", ".join([*self.versions, *self.adapters]) or "none"
        if wanted is None:
            raise RequestError(f"the request names no model; there are: {names}")
        own = self._aliases.get(wanted, wanted)
        if own not in self.versions and ":" in own:
            own, _, version = own.rpartition(":")
            own = self._aliases.get(own, own)
        if own not in self.versions:
            own = self._in_another_case(own)
        if own not in self.versions:
            raise UnknownModelError(f"there is no model {shown(wanted)}; there are: {names}")
        versions = [entry.version for entry in self.versions[own]]
        if version and version not in versions:
            served = f"versions {', '.join(versions)} are" if versions[1:] else f"version {versions[0]} is"
            raise UnknownModelError(f"there is no version {version} of '{own}'; {served} served")
        return own, version

    def _in_another_case(self, name: str) -> str:
        """Return the model or alias that differs from a name in case only; the name if there is not one."""
        known = {*self.versions, *self._aliases}
        same = [other for other in known if other.casefold() == name.casefold()]
        return self._aliases.get(same[0], same[0]) if len(same) == 1 else name

    def named(self, name: str | None, version: str = "") -> list[Entry]:
        """Return the versions that a request may mean; see ``resolved``."""
        own, version = self.resolved(name, version)
        return [entry for entry in self.versions[own] if version in ("", entry.version)]

    def drawn(self, name: str | None, version: str = "") -> Entry:
        """Return the version that answers a request, by weight among those that are ready.

        A version that was unloaded to free memory counts as ready. Without a ready one, it is the newest.

        Raises:
            UnknownModelError: there is no model of that name and version.
            RequestError: no name is given, and there is no default.
        """
        versions = self.named(name, version)
        ready = [entry for entry in versions if entry.state == "ready" or entry.evicted]
        weighted = [entry for entry in ready if entry.loader.weight > 0]
        weights = [entry.loader.weight for entry in weighted] or None
        (entry,) = random.choices(weighted or ready[-1:] or versions[-1:], weights)  # noqa: S311 -- no secret
        return entry

    @property
    def _default(self) -> str | None:
        llms = [name for name, versions in self.versions.items() if versions[-1].loader.kind == "llm"]
        return self._given_default or (llms[0] if len(llms) == 1 else None)
