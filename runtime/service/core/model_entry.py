"""One version of a served model: its state, and how it is loaded and unloaded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal, TypeVar

from ....errors import CarryallError, ServiceUnavailableError, UnknownModelError, UnsupportedTaskError
from ....providers.base import DeviceMemory
from ....records import dataclass
from ...models.model_source import ModelSummary
from ...process.garbage import exclude_newer
from ...process.memory import give_back_freed
from ...process.threads import in_daemon_thread
from .encoder import EncoderHandler
from .fetching import PictureFetcher
from .handler import LLMHandler
from .messages import ModelInfo
from .served_model import ServedModel
from .tensor_model import TensorModel

T = TypeVar("T")

ModelState = Literal["unloaded", "loading", "ready", "unloading", "failed"]
ModelKind = Literal["llm", "tensor", "encoder"]

_WHAT: dict[ModelKind, str] = {
    "llm": "a language model, not a tensor model",
    "tensor": "a tensor model; it runs by /v2/models/NAME/infer or ModelInfer",
    "encoder": "an encoder; it has only embeddings and reranking",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """Public facts of a version of a model.

    Args:
        name: the name in requests.
        version: a number, as text.
        kind: ``llm`` generates text, ``tensor`` maps tensors to tensors, ``encoder`` maps texts to vectors.
        state: the loading state; only ``ready`` models accept requests.
        reason: why the model failed; empty otherwise.
        info: facts of the loaded model; None unless it is a language model that is ready.
        aliases: other names that requests may use.
        only: whether the model has no other version.
        loras: the folders of its LoRA adapters, by name.
        evicted: whether it was unloaded to free memory, and the next request loads it.
        seconds_left: until it is unloaded, if no request comes; infinite if it stays.
        summary: returns what a list of models tells of a loaded language model; None of others.
    """

    name: str
    version: str = "1"
    kind: ModelKind = "llm"
    state: ModelState = "unloaded"
    reason: str = ""
    info: ModelInfo | None = None
    aliases: tuple[str, ...] = ()
    only: bool = True
    loras: Mapping[str, str] = field(default_factory=dict)
    evicted: bool = False
    seconds_left: float = field(default=math.inf, compare=False)
    summary: Callable[[], ModelSummary | None] = field(default=lambda: None, compare=False)

    @property
    def on_request(self) -> bool:
        """Return whether requests may name it: it is ready or loading, or the next request loads it again."""
        return self.state in ("ready", "loading") or self.evicted


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """The function that loads a version of a model, and facts known before loading.

    Args:
        load: returns a ``ServedModel``, ``TensorModel`` or ``TextEncoder``, by ``kind``. It is called in its
            own thread.
        kind: the kind of the model.
        version: a number, as text.
        wanted: whether it is loaded at startup; otherwise on request only.
        weight: its share of the requests that name no version, relative to the other versions.
        stamp: changes when the files of the model change.
        device_memory: returns the memory of the devices; language models know theirs.
    """

    load: Callable[[], Any]
    kind: ModelKind = "llm"
    version: str = "1"
    wanted: bool = True
    weight: float = 1.0
    stamp: str = ""
    device_memory: Callable[[], list[DeviceMemory]] = list


class Entry:
    """A version of a model.

    Each loading makes a new ``handler``, so that a request never runs on a model that was loaded after it.

    Args:
        name: the model's name.
        loader: loads it.
        new_handler: makes a handler of a language model's requests.
        fetcher: fetches pictures for encoders.

    Attributes:
        evicted: whether it is unloaded to free memory; the next request loads it again.
        keep_seconds: how long it stays loaded without a request, if a request has said so; infinite is for
            good, None is the service's own time, which holds again once it was unloaded.
    """

    def __init__(
        self,
        name: str,
        loader: ModelLoader,
        new_handler: Callable[[Entry], LLMHandler],
        fetcher: PictureFetcher,
    ) -> None:
        self.name, self.loader, self._fetcher = name, loader, fetcher
        self.state: ModelState = "unloaded"
        self.reason = ""
        self.model: ServedModel | None = None
        self.tensor: TensorModel | None = None
        self.encoder: EncoderHandler | None = None
        self.evicted = False
        self.keep_seconds: float | None = None
        self._used = 0.0  # when the latest request came, in seconds of ``time.monotonic``
        self._new_handler = new_handler
        self._changing = asyncio.Lock()
        self._queued: asyncio.Event | None = None  # set when the load that ``queue`` announced has ended
        self.handler = new_handler(self)

    @property
    def version(self) -> str:
        """Return the version, as text."""
        return self.loader.version

    @property
    def loras(self) -> dict[str, str]:
        """Return the folders of the LoRA adapters, by name."""
        return {} if self.model is None else self.model.llm.lora_folders

    def device_memory(self) -> list[DeviceMemory]:
        """Return the memory of the devices of the model; empty for the host, or if it is not loaded.

        Raises:
            ProviderUnavailableError: a device does not answer.
        """
        if self.state != "ready":
            return []
        return self.model.device_memory() if self.model is not None else self.loader.device_memory()

    @property
    def active(self) -> int:
        """Return the number of requests in progress; those of tensor models are not counted."""
        return self.handler.active + (self.encoder.active if self.encoder else 0)

    @property
    def last_used(self) -> float:
        """Return when the latest request came or ended, in seconds of ``time.monotonic``."""
        return max(self._used, self.handler.last_ended)

    def kept_for(self, keep_seconds: float | None) -> float:
        """Return how long the model stays loaded without a request, in seconds.

        Args:
            keep_seconds: the service's own time; None is for good.
        """
        own = self.keep_seconds if self.keep_seconds is not None else keep_seconds
        return math.inf if own is None else own

    def use(self) -> Entry:
        """Note that a request uses the model, and return it.

        Raises:
            ServiceUnavailableError: the model is not loaded, or has failed.
        """
        self._used = time.monotonic()
        if self.state == "failed":
            raise ServiceUnavailableError(f"the model '{self.name}' has failed: {self.reason}")
        if self.state == "unloaded":
            raise ServiceUnavailableError(f"the model '{self.name}' is not loaded; load it first")
        if self.state == "unloading":
            raise ServiceUnavailableError(f"the model '{self.name}' is being unloaded; load it first")
        return self

    def language_model(self, adapter: str | None = None) -> LLMHandler:
        """Return the handler of a language model's requests, with one of its adapters.

        Raises:
            UnsupportedTaskError: it is not a language model.
            UnknownModelError: it has no such adapter.
        """
        if self.loader.kind != "llm":
            raise UnsupportedTaskError(f"the model '{self.name}' is {_WHAT[self.loader.kind]}")
        if adapter is None:
            return self.handler
        if adapter not in self.loras:
            names = ", ".join(self.loras) or "none"
            raise UnknownModelError(
                f"the model '{self.name}' has no LoRA adapter '{adapter}'; there are: {names}"
            )
        return self.handler.adapted(adapter)

    def embedder(self, adapter: str | None = None) -> LLMHandler | EncoderHandler:
        """Return the handler of a model that makes embeddings and ranks documents.

        Raises:
            UnsupportedTaskError: it is a tensor model.
            ServiceUnavailableError: it is loading.
        """
        return self.text_encoder() if self.loader.kind == "encoder" else self.language_model(adapter)

    def text_encoder(self) -> EncoderHandler:
        """Return the handler of a text encoder's requests.

        Raises:
            UnsupportedTaskError: it is of another kind.
            ServiceUnavailableError: it is loading.
        """
        return self._loaded("encoder", self.encoder)

    def tensor_model(self) -> TensorModel:
        """Return the tensor model.

        Raises:
            UnsupportedTaskError: it is of another kind.
            ServiceUnavailableError: it is loading.
        """
        return self._loaded("tensor", self.tensor)

    def _loaded(self, kind: ModelKind, model: T | None) -> T:
        """Return what was loaded of a model of this kind."""
        if self.loader.kind != kind:
            raise UnsupportedTaskError(f"the model '{self.name}' is {_WHAT[self.loader.kind]}")
        if model is None:
            raise ServiceUnavailableError(f"the model '{self.name}' is still loading; retry later")
        return model

    async def settled(self) -> None:
        """Wait until the model is neither being loaded nor unloaded, nor queued to be loaded."""
        if self._queued is not None:
            await self._queued.wait()
        async with self._changing:
            return

    def queue(self) -> None:
        """Let requests wait for a load that comes after those of others."""
        if self.state == "unloaded":
            self.state, self._queued = "loading", asyncio.Event()

    def dequeue(self) -> None:
        """End the wait of ``queue``: the load has ended, or does not come."""
        if self._queued is not None:
            self._queued.set()
            self._queued = None
            self.state = "unloaded" if self.state == "loading" else self.state

    async def load(self) -> None:
        """Load the model if it is not loaded.

        Raises:
            CarryallError: it cannot be loaded; see ``load_model``.
        """
        async with self._changing:
            if self.state == "ready":
                return
            if self.state not in ("unloaded", "loading"):
                self.handler = self._new_handler(self)
            self.state, self.reason = "loading", ""
            try:
                loaded = await in_daemon_thread(self.loader.load)
            except CarryallError as error:
                self.state, self.reason = "failed", str(error)
                raise
            if self.loader.kind == "llm":
                self.model = loaded
                self.handler.ready(loaded)
            elif self.loader.kind == "encoder":
                self.encoder = EncoderHandler(self.name, loaded, self._fetcher)
            else:
                self.tensor = loaded
            exclude_newer()
            self.state, self.evicted, self._used = "ready", False, time.monotonic()

    async def unload(self, grace_seconds: float, *, evict: bool = False) -> bool:
        """Refuse new requests, wait for those in progress, and free the model.

        Args:
            grace_seconds: how long running requests may continue.
            evict: the next request loads it again.

        Returns:
            Whether all requests ended within the grace period.
        """
        async with self._changing:
            drained, self.evicted, self.keep_seconds = True, evict, None
            if self.model is not None:
                self.state = "unloading"
                drained = await self.handler.drain(grace_seconds)
                await asyncio.to_thread(self.model.llm.shutdown)
                self.model, self.handler = None, self._new_handler(self)
            if self.encoder is not None:
                self.state = "unloading"
                drained = await self.encoder.drain(grace_seconds)
                self.encoder = None
            if self.tensor is not None:
                # Running requests hold their own reference.
                tensor, self.tensor = self.tensor, None
                await asyncio.to_thread(tensor.close)
            exclude_newer(dropped=True)
            await asyncio.to_thread(give_back_freed)
            self.state, self.reason = "unloaded", ""
            return drained

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests and wait for those in progress; see ``LLMHandler.drain``."""
        drained = await self.handler.drain(grace_seconds)
        return (await self.encoder.drain(grace_seconds) if self.encoder else True) and drained

    def close(self) -> None:
        """Free the model at once."""
        if self.model is not None:
            self.model.llm.shutdown()
        if self.tensor is not None:
            self.tensor.close()
