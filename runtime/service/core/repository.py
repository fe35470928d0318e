"""The models of a service, with their states and handlers. Use it in one event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ....errors import (
    CarryallError,
    RequestError,
    ServiceUnavailableError,
    UnknownModelError,
    UnsupportedTaskError,
)
from .background import in_daemon_thread
from .handler import LLMHandler
from .messages import ModelInfo
from .observer import Observers
from .served_model import ServedModel

if TYPE_CHECKING:
    from ...api.session import InferenceSession

_log = logging.getLogger(__name__)

ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]
ModelKind = Literal["llm", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """Public facts of a model.

    Args:
        name: the name in requests.
        version: a number, as text.
        kind: ``llm`` generates text, ``tensor`` maps tensors to tensors.
        state: the loading state; only ``ready`` models accept requests.
        reason: why the model failed; empty otherwise.
        info: facts of the loaded model; None unless it is a language model that is ready.
        aliases: other names that requests may use.
    """

    name: str
    version: str = "1"
    kind: ModelKind = "llm"
    state: ModelState = "unloaded"
    reason: str = ""
    info: ModelInfo | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """The function that loads a model, and facts known before loading.

    Args:
        load: returns a ``ServedModel`` for a language model, an ``InferenceSession`` for a tensor model. It
            is called in its own thread.
        kind: the kind of the model.
        version: a number, as text.
        wanted: whether it is loaded at startup; otherwise on request only.
    """

    load: Callable[[], Any]
    kind: ModelKind = "llm"
    version: str = "1"
    wanted: bool = True


@dataclass(slots=True)
class _Entry:
    """A model and its handler.

    Each loading makes a new ``handler``, so that a request never runs on a model that was loaded after it.
    """

    name: str
    loader: ModelLoader
    handler: LLMHandler
    state: ModelState = "unloaded"
    reason: str = ""
    model: ServedModel | None = None
    session: InferenceSession | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


def public_name(model: str | Path) -> str:
    """Return a model's name for clients: the folder's name of a path, or the hub id."""
    path = Path(model).expanduser()
    return str(model) if not path.exists() else path.resolve().name.removesuffix(".onnx")


class ModelRepository:
    """Models by name.

    Args:
        loaders: the loader of each model, by name. A plain function loads a language model.
        aliases: model names by alias.
        default: the model of requests without a model name; None takes the only language model, if any.
        grace_seconds: how long running requests may continue when their model is unloaded.
    """

    def __init__(
        self,
        loaders: Mapping[str, Callable[[], ServedModel] | ModelLoader],
        *,
        aliases: Mapping[str, str] | None = None,
        default: str | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        self.all_lost = asyncio.Event()  # set when the last working engine has failed
        self.observers = Observers()  # of all requests
        self._aliases = dict(aliases or {})
        self._grace_seconds = grace_seconds
        self._entries = {
            name: _Entry(
                name, load if isinstance(load, ModelLoader) else ModelLoader(load), self._handler(name)
            )
            for name, load in loaders.items()
        }
        llms = [entry.name for entry in self._entries.values() if entry.loader.kind == "llm"]
        self._default = default or (llms[0] if len(llms) == 1 else None)

    @classmethod
    def of_one(
        cls, name: str, load: Callable[[], ServedModel], *, aliases: Sequence[str] = ()
    ) -> ModelRepository:
        """Return a repository with one model."""
        return cls({name: load}, aliases=dict.fromkeys(aliases, name), default=name)

    def models(self) -> list[ModelStatus]:
        """Return the status of all models, in the order of ``loaders``."""
        return [
            ModelStatus(
                name=entry.name,
                version=entry.loader.version,
                kind=entry.loader.kind,
                state=entry.state,
                reason=entry.reason,
                info=entry.model.info if entry.model is not None else None,
                aliases=tuple(alias for alias, name in self._aliases.items() if name == entry.name),
            )
            for entry in self._entries.values()
        ]

    @property
    def ready(self) -> bool:
        """Return whether at least one model accepts requests and none is loading."""
        states = [entry.state for entry in self._entries.values()]
        return "ready" in states and "loading" not in states

    def llm(self, name: str | None = None) -> LLMHandler:
        """Return the handler of a language model's requests.

        Args:
            name: the name or an alias of the model; None or an empty text takes the default.

        Raises:
            UnknownModelError: there is no model of that name.
            RequestError: no name is given, and there is no default.
            UnsupportedTaskError: the model is a tensor model.
            ServiceUnavailableError: the model is not loaded.
        """
        entry = self._loaded(self._find(name))
        if entry.loader.kind != "llm":
            raise UnsupportedTaskError(
                f"the model '{entry.name}' is a tensor model; it does not generate text"
            )
        return entry.handler

    def session(self, name: str, version: str | None = None) -> InferenceSession:
        """Return the session of a tensor model.

        Raises:
            UnknownModelError: there is no model of that name and version.
            UnsupportedTaskError: the model is a language model.
            ServiceUnavailableError: the model is not loaded.
        """
        entry = self._find(name)
        if version not in (None, "", entry.loader.version):
            raise UnknownModelError(
                f"there is no version {version} of '{name}'; version {entry.loader.version} is served"
            )
        if entry.loader.kind != "tensor":
            raise UnsupportedTaskError(f"the model '{entry.name}' is a language model, not a tensor model")
        session = self._loaded(entry).session
        if session is None:
            raise ServiceUnavailableError(f"the model '{entry.name}' is still loading; retry later")
        return session

    @staticmethod
    def _loaded(entry: _Entry) -> _Entry:
        if entry.state == "failed":
            raise ServiceUnavailableError(f"the model '{entry.name}' has failed: {entry.reason}")
        if entry.state == "unloaded":
            raise ServiceUnavailableError(f"the model '{entry.name}' is not loaded; load it first")
        return entry

    async def load_all(self) -> None:
        """Load the models of startup, one after the other.

        A failure is logged if another model can be loaded.

        Raises:
            CarryallError: no model can be loaded.
        """
        wanted = [name for name, entry in self._entries.items() if entry.loader.wanted]
        failures: list[CarryallError] = []
        for name in wanted:
            try:
                await self.load(name)
            except CarryallError as error:
                _log.warning("the model %a cannot be loaded: %s", name, _encodable(str(error)))
                failures.append(error)
        if failures and len(failures) == len(wanted):
            raise failures[0]

    async def load(self, name: str) -> None:
        """Load a model if it is not loaded.

        Raises:
            UnknownModelError: there is no model of that name.
            CarryallError: the model cannot be loaded; see ``load_model``.
        """
        entry = self._find(name)
        async with entry.changing:
            if entry.state == "ready":
                return
            if entry.state != "unloaded":
                entry.handler = self._handler(entry.name)
            entry.state, entry.reason = "loading", ""
            try:
                loaded = await in_daemon_thread(entry.loader.load)
            except CarryallError as error:
                entry.state, entry.reason = "failed", str(error)
                raise
            if entry.loader.kind == "llm":
                entry.model = loaded
                entry.handler.ready(loaded)
            else:
                entry.session = loaded
            entry.state = "ready"

    async def unload(self, name: str) -> bool:
        """Refuse the model's new requests, wait for those in progress, and free the model.

        Returns:
            Whether all requests ended within the grace period.

        Raises:
            UnknownModelError: there is no model of that name.
        """
        entry = self._find(name)
        async with entry.changing:
            entry.session = None  # running requests hold their own reference
            if entry.model is None:
                entry.state = "unloaded"
                return True
            entry.state = "unloading"
            drained = await entry.handler.drain(self._grace_seconds)
            await asyncio.to_thread(entry.model.llm.shutdown)
            entry.model, entry.handler = None, self._handler(entry.name)
            entry.state, entry.reason = "unloaded", ""
            return drained

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests of all models and wait for those in progress; see ``LLMHandler.drain``."""
        drained = await asyncio.gather(
            *[entry.handler.drain(grace_seconds) for entry in self._entries.values()]
        )
        return all(drained)

    def close(self) -> None:
        """Free all models."""
        for entry in self._entries.values():
            if entry.model is not None:
                entry.model.llm.shutdown()

    def _find(self, name: str | None) -> _Entry:
        wanted = name or self._default
        names = ", ".join(self._entries) or "none"
        if wanted is None:
            raise RequestError(f"the request names no model; there are: {names}")
        entry = self._entries.get(self._aliases.get(wanted, wanted))
        if entry is None:
            raise UnknownModelError(f"there is no model '{wanted}'; there are: {names}")
        return entry

    def _handler(self, name: str) -> LLMHandler:
        return LLMHandler(lambda: self._lost(name), self.observers)

    def _lost(self, name: str) -> None:
        """Mark a model as failed because its engine is closed."""
        entry = self._entries[name]
        if entry.state != "ready":
            return  # the model is being unloaded
        entry.state, entry.reason = "failed", "its engine stopped working"
        if not any(other.state in ("ready", "loading") for other in self._entries.values()):
            self.all_lost.set()


def _encodable(text: str) -> str:
    """Return a text with escapes for characters that UTF-8 cannot encode; file names may have them."""
    return text.encode("utf-8", "backslashreplace").decode()
