"""Access control: the models that a caller may use, and limits of its requests."""

from __future__ import annotations

import dataclasses

from ....errors import AccessError, InvalidSamplingError, UnknownModelError
from ...types.sampling_params import SamplingParams
from ..core.caller import CALLER
from ..core.encoder import EncoderHandler
from ..core.handler import LLMHandler
from ..core.messages import GenerationRequest
from ..core.model_entry import Entry, ModelStatus
from ..core.repository import ModelRepository, Named
from .policy import Policy


class Admission:
    """The model repository, restricted to the models that the current caller may use.

    A model that the caller may not use is reported as unknown.

    Args:
        models: the repository.
        policy: the request limits, and whether unknown names select the default model.
    """

    def __init__(self, models: ModelRepository, policy: Policy) -> None:
        self._models, self.policy = models, policy

    @property
    def ready(self) -> bool:
        """Return whether the service accepts requests; see ``ModelRepository.ready``."""
        return self._models.ready

    def models(self) -> list[ModelStatus]:
        """Return the models that the caller may use."""
        caller = CALLER.get()
        return [one for one in self._models.models() if caller is None or caller.may_use(one.name)]

    def find(self, name: str, version: str = "") -> ModelStatus:
        """Return the status of the model with this name or alias, and this version if one is given.

        Raises:
            UnknownModelError: there is no such model, or the caller may not use it.
        """
        statuses = self.models()
        for status in reversed(statuses):  # the newest version first
            if name in (status.name, *status.aliases) and version in ("", status.version):
                return status
        there_are = ", ".join(dict.fromkeys(status.name for status in statuses)) or "none"
        versions = [status.version for status in statuses if name in (status.name, *status.aliases)]
        if versions:
            raise UnknownModelError(
                f"there is no model '{name}' version {version}; there are: {', '.join(versions)}"
            )
        raise UnknownModelError(f"there is no model '{name}'; there are: {there_are}")

    def keep(self, name: str | None, seconds: float | None) -> bool:
        """Set how long a model stays loaded without a request; see ``ModelRepository.keep``.

        Returns:
            Whether the caller may do that: with API keys, ``admin`` may.
        """
        caller = CALLER.get()
        if caller is not None and not caller.admin:
            return False
        self._models.keep(self._allowed(name, ""), seconds)
        return True

    async def version(self, name: str | None = None, version: str = "") -> tuple[Entry, str | None]:
        """Return the version of a model that answers a request, and the LoRA adapter that the name is.

        A version that is loading is waited for.

        Raises:
            UnknownModelError: there is no model of that name, or the caller may not use it.
            ServiceUnavailableError: it cannot be loaded.
        """
        named = self._allowed(name, version)
        return await self._models.version(named), named.adapter

    async def llm(self, name: str | None = None, *, adapter: str | None = None) -> LLMHandler:
        """Return the handler of a language model's requests; see ``version``.

        Args:
            name: the name of a model or of a LoRA adapter.
            adapter: the name of an adapter of this model, for APIs that name both.

        Raises:
            UnknownModelError: the model has no such adapter.
            UnsupportedTaskError: it is not a language model.
        """
        entry, own = await self.version(name)
        return entry.language_model(adapter or own)

    async def embedder(self, name: str | None = None) -> LLMHandler | EncoderHandler:
        """Return the handler of a model that makes embeddings; see ``version``."""
        entry, adapter = await self.version(name)
        return entry.embedder(adapter)

    def serving(self, name: str | None = None, version: str = "") -> Entry:
        """Return the version of a model that is loaded now; see ``ModelRepository.serving``."""
        return self._models.serving(self._allowed(name, version))

    def _allowed(self, name: str | None, version: str) -> Named:
        """Return what a request names, if the caller may use it."""
        try:
            named = self._models.find(name, version)
        except UnknownModelError:
            if not self.policy.config.any_model_name:
                raise
            named = self._models.find(None)
        caller = CALLER.get()
        if caller is not None and not caller.may_use(named.name):
            raise UnknownModelError(f"there is no model '{name or ''}' that this API key may use")
        return named

    async def load(self, name: str) -> ModelStatus:
        """Load a model; see ``ModelRepository.load``.

        Raises:
            AccessError: the caller's key has no ``admin`` right.
        """
        own = self._administered(name)
        await self._models.load(own)
        return self.find(own)

    async def unload(self, name: str) -> None:
        """Unload a model; see ``ModelRepository.unload``.

        Raises:
            AccessError: the caller's key has no ``admin`` right.
        """
        await self._models.unload(self._administered(name))

    async def load_lora(
        self, name: str, folder: str, *, base: str | None = None, replace: bool = False
    ) -> None:
        """Load a LoRA adapter; see ``ModelRepository.load_lora``.

        Raises:
            AccessError: the caller's key has no ``admin`` right.
        """
        _check_admin()
        await self._models.load_lora(name, folder, base=self._allowed(base, ""), replace=replace)

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter; see ``ModelRepository.unload_lora``.

        Raises:
            AccessError: the caller's key has no ``admin`` right.
        """
        _check_admin()
        if self._models.base_of(name) is not None:
            self._allowed(name, "")
        self._models.unload_lora(name)

    def _administered(self, name: str) -> str:
        """Return the own name of a model that the caller may load and unload."""
        own = self.find(name).name
        _check_admin()
        return own

    def admitted(self, asked: GenerationRequest) -> GenerationRequest:
        """Check a request's sampling options, and return the request with the caller as its tenant.

        Raises:
            InvalidSamplingError: an option is above the service's limit.
        """
        self.check(asked.params)
        budget = self.policy.config.reasoning_budget
        if budget is not None and asked.params.reasoning_budget is None:
            asked = dataclasses.replace(
                asked, params=dataclasses.replace(asked.params, reasoning_budget=budget)
            )
        caller, interval = CALLER.get(), self.policy.config.stream_interval
        if caller is None and interval == asked.stream_interval:
            return asked
        tenant = asked.tenant if caller is None else caller.name
        return dataclasses.replace(asked, tenant=tenant, stream_interval=interval)

    def check(self, params: SamplingParams) -> None:
        """Check that sampling options are within the service's limits.

        Raises:
            InvalidSamplingError: an option is above its limit.
        """
        limits = {
            "n": (params.num_samples, self.policy.config.max_choices),
            "logprobs": (params.logprobs, self.policy.config.max_logprobs),
            "prompt_logprobs": (params.prompt_logprobs, self.policy.config.max_logprobs),
        }
        for name, (value, most) in limits.items():
            if value is not None and value > most:
                raise InvalidSamplingError(f"{name} is {value}, but this service allows at most {most}")


def _check_admin() -> None:
    """Check that the caller may load and unload models.

    Raises:
        AccessError: its key has no ``admin`` right.
    """
    caller = CALLER.get()
    if caller is not None and not caller.admin:
        raise AccessError("this API key may not load or unload models; set admin = true in the key file")
