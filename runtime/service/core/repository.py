"""The models of a service, with their states and handlers. Use it in one event loop only."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ....errors import (
    CarryallError,
    CheckpointError,
    RequestError,
    ServiceUnavailableError,
    UnknownModelError,
)
from ....options import shown
from ....records import dataclass
from .fetching import PictureFetcher
from .handler import LLMHandler, Observers
from .model_entry import Entry, ModelLoader, ModelStatus
from .served_model import ServedModel
from .tensor_model import TensorModel

_log = logging.getLogger(__name__)

Loaders = Callable[[], ServedModel] | ModelLoader | Sequence[ModelLoader]


def public_name(model: str | Path) -> str:
    """Return a model's name for clients: the folder's name of a path, or the hub id."""
    path = Path(model).expanduser()
    return str(model) if not path.exists() else path.resolve().name.removesuffix(".onnx")


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


class ModelRepository:
    """Models by name, each in one or several versions.

    A request that names no version goes to a ready version with a weight, by chance in proportion to the
    weights, else to the newest ready version. ``NAME:VERSION`` names a version. A version that was unloaded
    to free memory counts as ready: a request that it gets loads it again.

    Args:
        loaders: the loaders of each model, by name. A plain function loads a language model.
        aliases: model names by alias, in which ``*`` stands for any text.
        default: the model of requests without a model name; see ``Catalog``.
        grace_seconds: how long running requests may continue when their model is unloaded.
        keep_seconds: how long a model stays loaded without a request; None is for good.
    """

    def __init__(
        self,
        loaders: Mapping[str, Loaders],
        *,
        aliases: Mapping[str, str] | None = None,
        default: str | None = None,
        grace_seconds: float = 30.0,
        keep_seconds: float | None = None,
    ) -> None:
        self.keep_seconds = keep_seconds
        self.all_lost = asyncio.Event()  # set when the last working engine has failed
        self.observers = Observers()  # of all requests
        self.fetcher = PictureFetcher()  # of all requests
        self._grace_seconds = grace_seconds
        self._started = False
        self._loading_again: dict[Entry, asyncio.Task[None]] = {}
        self._versions = {name: self._made(name, _listed(given)) for name, given in loaders.items()}
        self._aliases = dict(aliases or {})
        self._given_default = default

    @classmethod
    def of_one(
        cls,
        name: str,
        load: Loaders,
        *,
        aliases: Mapping[str, str] | None = None,
        keep_seconds: float | None = None,
    ) -> ModelRepository:
        """Return a repository with one model."""
        return cls({name: load}, aliases=aliases, default=name, keep_seconds=keep_seconds)

    def models(self) -> list[ModelStatus]:
        """Return the status of all versions of all models, in the order of ``loaders``."""
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
                seconds_left=entry.last_used + entry.kept_for(self.keep_seconds) - time.monotonic(),
                summary=entry.model.summary if entry.model is not None else (lambda: None),
            )
            for versions in self._versions.values()
            for entry in versions
        ]

    @property
    def entries(self) -> list[Entry]:
        """Return all versions of all models."""
        return [entry for versions in self._versions.values() for entry in versions]

    @property
    def adapters(self) -> list[str]:
        """Return the names of the LoRA adapters of all models."""
        return [name for entry in self.entries for name in entry.loras]

    @property
    def ready(self) -> bool:
        """Return whether a model accepts requests, and those of startup are not loading any more."""
        states = [entry.state for entry in self.entries]
        evicted = any(entry.evicted for entry in self.entries)  # the next request loads it
        return ("ready" in states or evicted) and (self._started or "loading" not in states)

    def is_model(self, name: str) -> bool:
        """Return whether a name is that of a model, or an alias."""
        return name in self._versions or self._named(name) in self._versions

    def _named(self, name: str) -> str:
        """Return the model of an alias; other names are returned as they are."""
        if name in self._versions:
            return name
        if name in self._aliases:
            return self._aliases[name]
        return next((own for alias, own in self._aliases.items() if _matches(alias, name)), name)

    def base_of(self, name: str | None) -> Entry | None:
        """Return the model that has a LoRA adapter of this name; None if there is no such adapter."""
        if not name or self.is_model(name):
            return None
        return next((entry for entry in self.entries if entry.state == "ready" and name in entry.loras), None)

    async def load_lora(
        self, name: str, folder: str, *, base: Named | None = None, replace: bool = False
    ) -> None:
        """Load a LoRA adapter of a model.

        Args:
            name: the name in requests.
            folder: the adapter's folder on this machine.
            base: the model; None is the default model.
            replace: replace an adapter of this name.

        Raises:
            RequestError: the name is in use, or the adapter's files are damaged or do not fit.
            UsageError: the adapter cannot be loaded; see ``AdapterSet.load``.
        """
        llm = self.serving(base or self.find(None)).language_model().llm
        other = self.base_of(name)
        taken = other is not None and (other.model is None or other.model.llm is not llm)
        if taken or self.is_model(name):
            raise RequestError(f"the name '{name}' is that of another model; choose another name")
        try:
            await asyncio.to_thread(llm.load_lora, name, folder, replace=replace)
        except CheckpointError as error:
            raise RequestError(str(error)) from error

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter; its requests in progress finish.

        Raises:
            UnknownModelError: there is no adapter of this name.
        """
        entry = self.base_of(name)
        if entry is None or entry.model is None:
            names = ", ".join(self.adapters) or "none"
            raise UnknownModelError(f"there is no LoRA adapter '{name}'; there are: {names}")
        entry.model.llm.unload_lora(name)

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
        names = ", ".join([*self._versions, *self.adapters]) or "none"
        if wanted is None:
            raise RequestError(f"the request names no model; there are: {names}")
        model_name = self._named(wanted)
        if model_name not in self._versions and ":" in model_name:
            model_name, _, version = model_name.rpartition(":")
            model_name = self._named(model_name)
        if model_name not in self._versions:
            model_name = self._in_another_case(model_name)
        if model_name not in self._versions:
            raise UnknownModelError(f"there is no model {shown(wanted)}; there are: {names}")
        entries = [entry for entry in self._versions[model_name] if version in ("", entry.version)]
        if not entries:
            versions = [entry.version for entry in self._versions[model_name]]
            served = f"versions {', '.join(versions)} are" if versions[1:] else f"version {versions[0]} is"
            raise UnknownModelError(f"there is no version {version} of '{model_name}'; {served} served")
        return Named(model_name, entries)

    def _in_another_case(self, name: str) -> str:
        """Return the model or alias that differs from a name in case only; the name if there is not one."""
        known = {*self._versions, *self._aliases}
        same = [other for other in known if other.casefold() == name.casefold()]
        return self._aliases.get(same[0], same[0]) if len(same) == 1 else name

    async def version(self, named: Named) -> Entry:
        """Return the version that answers a request; one that is loading is waited for.

        Raises:
            ServiceUnavailableError: it cannot be loaded, or an operator has unloaded it.
        """
        entry = self._drawn(named)
        if entry.evicted and entry.state in ("unloading", "unloaded"):
            await asyncio.shield(self._loaded_again(entry))
        elif entry.state == "loading":
            await entry.settled()
        return entry.use()

    def serving(self, named: Named) -> Entry:
        """Return the version that answers a request at once.

        Raises:
            ServiceUnavailableError: it is not ready; a model that was evicted is loaded from now on.
        """
        entry = self._drawn(named)
        if entry.evicted and entry.state in ("unloading", "unloaded"):
            self._loaded_again(entry)
            raise ServiceUnavailableError(f"the model '{entry.name}' is loading again; retry later")
        return entry.use()

    def llm(self, name: str | None = None, version: str = "") -> LLMHandler:
        """Return the handler of a language model that is loaded; see ``find`` and ``serving``."""
        named = self.find(name, version)
        return self.serving(named).language_model(named.adapter)

    def tensor(self, name: str, version: str = "") -> TensorModel:
        """Return a tensor model that is loaded; see ``find`` and ``serving``."""
        return self.serving(self.find(name, version)).tensor_model()

    def _drawn(self, named: Named) -> Entry:
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
        for name, versions in self._versions.items():
            names.setdefault(versions[-1].loader.kind, []).append(name)
        candidates = names.get("llm") or names.get("encoder", [])
        return self._given_default or (candidates[0] if len(candidates) == 1 else None)

    async def load_all(self) -> None:
        """Load the models of startup, one after the other; requests of each wait for it.

        A failure is logged if there are other models.

        Raises:
            CarryallError: no model can be loaded.
        """
        wanted = [entry for entry in self.entries if entry.loader.wanted]
        failures: list[CarryallError] = []
        for entry in wanted:
            entry.queue()
        try:
            for entry in wanted:
                try:
                    await entry.load()
                except CarryallError as error:
                    if len(wanted) > 1:
                        _log.warning("the model %a cannot be loaded: %s", entry.name, _encodable(str(error)))
                    failures.append(error)
                entry.dequeue()
        finally:
            for entry in wanted:
                entry.dequeue()
        if failures and len(failures) == len(wanted):
            raise failures[0]
        self._started = True

    async def load(self, name: str, version: str = "") -> None:
        """Load a model, or one version of it, if it is not loaded.

        Raises:
            UnknownModelError: there is no model of that name.
            CarryallError: the model cannot be loaded; see ``load_model``.
        """
        for entry in self.find(name, version).versions:
            await entry.load()

    async def unload(self, name: str, version: str = "") -> bool:
        """Refuse new requests of a model, or of one version, wait for those in progress, and free it.

        Returns:
            Whether all requests ended within the grace period.

        Raises:
            UnknownModelError: there is no model of that name.
        """
        drained = [await entry.unload(self._grace_seconds) for entry in self.find(name, version).versions]
        return all(drained)

    async def update(self, loaders: Mapping[str, Loaders]) -> None:
        """Take over a new set of models, without a gap in service.

        A changed version is loaded beside the old one and replaces it. If it cannot be loaded, the old one
        stays. Versions that are gone are unloaded after the new ones are ready.
        """
        before = self._versions
        after = {name: self._kept_or_made(name, _listed(given)) for name, given in loaders.items()}
        for versions in after.values():
            for position, entry in enumerate(versions):
                same = (other for other in before.get(entry.name, ()) if other.version == entry.version)
                old = next(same, None)
                if entry is old or not entry.loader.wanted:
                    continue
                try:
                    await entry.load()
                except CarryallError as error:
                    _log.warning(
                        "the changed model %a cannot be loaded: %s", entry.name, _encodable(str(error))
                    )
                    if old is not None and old.state == "ready":
                        old.loader = entry.loader  # not tried again until its files change again
                        versions[position] = old
        self._versions = after
        kept = {id(entry) for entry in self.entries}
        gone = [entry for versions in before.values() for entry in versions if id(entry) not in kept]
        for entry in gone:
            await entry.unload(self._grace_seconds)
            _log.info("the model %a version %s is unloaded", entry.name, entry.version)

    async def evict_idle(self) -> bool:
        """Unload the least recently used model without requests in progress; the next request loads it.

        A model with LoRA adapters stays, because those loaded at run time would be lost.

        Returns:
            Whether a model was unloaded. The most recently used one is kept.
        """
        ready = sorted((one for one in self.entries if one.state == "ready"), key=lambda one: one.last_used)
        for entry in ready[:-1]:
            if not entry.active and not entry.loras:
                await entry.unload(self._grace_seconds, evict=True)
                _log.warning("the model %a is unloaded to free memory", entry.name)
                return True
        return False

    def keep(self, named: Named, seconds: float | None) -> None:
        """Set how long a model stays loaded without a request; None is the service's own time."""
        for entry in named.versions:
            entry.keep_seconds = seconds

    async def unload_idle(self) -> None:
        """Unload the models that were not used for their time; the next request loads them again.

        A model with LoRA adapters stays, because those loaded at run time would be lost.
        """
        now = time.monotonic()
        for entry in self.entries:
            # A request that has found its model has a second to begin.
            keep = max(1.0, entry.kept_for(self.keep_seconds))
            idle = entry.state == "ready" and not entry.active and not entry.loras
            if idle and now - entry.last_used >= keep:
                await entry.unload(self._grace_seconds, evict=True)
                _log.info("the model %a is unloaded: no request came for %.0f s", entry.name, keep)

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests of all models and wait for those in progress; see ``LLMHandler.drain``."""
        drained = await asyncio.gather(*[entry.drain(grace_seconds) for entry in self.entries])
        return all(drained)

    def close(self) -> None:
        """Free all models."""
        for entry in self.entries:
            entry.close()

    def _loaded_again(self, entry: Entry) -> asyncio.Task[None]:
        """Return the task that loads an evicted model again."""
        task = self._loading_again.get(entry)
        if task is None:
            task = self._loading_again[entry] = asyncio.create_task(self._load_again(entry))
            task.add_done_callback(lambda _: self._loading_again.pop(entry))
        return task

    async def _load_again(self, entry: Entry) -> None:
        try:
            await entry.load()
        except CarryallError as error:
            entry.evicted = False
            _log.warning("the model %a cannot be loaded again: %s", entry.name, _encodable(str(error)))

    def _made(self, name: str, loaders: Sequence[ModelLoader]) -> list[Entry]:
        return [Entry(name, loader, self._handler, self.fetcher) for loader in loaders]

    def _kept_or_made(self, name: str, loaders: Sequence[ModelLoader]) -> list[Entry]:
        """Return the entries of a model; those whose files have not changed are kept."""
        kept = {entry.version: entry for entry in self._versions.get(name, ())}
        entries = []
        for loader in loaders:
            old = kept.get(loader.version)
            if old is not None and old.loader.stamp == loader.stamp:
                old.loader = loader  # its weight may have changed
                entries.append(old)
            else:
                entries += self._made(name, [loader])
        return entries

    def _handler(self, entry: Entry) -> LLMHandler:
        return LLMHandler(lambda: self._lost(entry), self.observers, self.fetcher)

    def _lost(self, entry: Entry) -> None:
        """Mark a model as failed because its engine is closed."""
        if entry.state != "ready":
            return  # the model is being unloaded
        entry.state, entry.reason = "failed", "its engine stopped working"
        if not any(other.state in ("ready", "loading") for other in self.entries):
            self.all_lost.set()


def _listed(given: Loaders) -> Sequence[ModelLoader]:
    if isinstance(given, ModelLoader):
        return [given]
    return given if isinstance(given, Sequence) else [ModelLoader(given)]


def _encodable(text: str) -> str:
    """Return a text with escapes for characters that UTF-8 cannot encode; file names may have them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _matches(alias: str, name: str) -> bool:
    """Return whether an alias with ``*`` stands for a name, whatever the case."""
    pattern = ".*".join(map(re.escape, alias.split("*")))
    return "*" in alias and re.fullmatch(pattern, name, re.IGNORECASE | re.DOTALL) is not None
