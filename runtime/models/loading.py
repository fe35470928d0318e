"""From a MODEL to something an engine can run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from ...errors import CarryallError, ProviderUnavailableError, UsageError
from ...exporter.package import Progress
from ...graph_opt.lower.outputs.hidden_states import HiddenStatesPass
from ...providers import get_provider
from ...providers.base import Runner, RunnerConfig
from ...providers.placement import Placement
from ..engine.speculation.proposer import Proposer
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer
from .fastest import AUTO, Choice, fastest_provider
from .generation_defaults import GenerationDefaults
from .lowering import lowered_model, with_context
from .model_source import ModelFiles, resolve_model
from .speculative import make_proposer
from .split import first_provider, is_split, name_and_device, split_runner, with_device


@dataclass(slots=True)
class LoadedModel:
    """A runner, and what turns text into its tokens and back.

    Args:
        name: as the user called the model.
        runner: holds the model; whoever makes an engine of it closes it.
        tokenizer: None where the model came without; prompts must be token ids then.
        chat_template: the checkpoint's own.
        defaults: end tokens and sampling options.
        identity: changes whenever the model or its lowering does; empty if unknown.
        open_encoder: opens another runner of the same model, with hidden states in place of logits.
        proposer: proposes tokens for the model to check several at a time; the engine closes it too.
        provider: where it runs.
        choice: why there, if the provider was to be chosen.
        fallbacks: where the nodes of each session lie that was allowed, and had, to fall back to the CPU.
        graphs: the lowered graph that runs; of a split model, one a part.
    """

    name: str
    runner: Runner
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate = field(default_factory=lambda: ChatTemplate({}, {}))
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    identity: str = ""
    proposer: Proposer | None = None
    open_encoder: Callable[[], Runner] | None = None
    provider: str = ""
    choice: Choice | None = None
    fallbacks: list[Placement] = field(default_factory=list)
    graphs: Sequence[Path] = ()


class LoadOptions(TypedDict, total=False):
    """The keyword arguments of ``load_model``."""

    provider: str
    quantize: str | None
    max_slots: int
    context_length: int | None
    num_threads: int
    kv_cache: str | None
    speculative: str | None
    num_speculative_tokens: int | None
    provider_options: Mapping[str, Any] | None
    ep_library: str | None
    allow_fallback: bool
    progress: Progress | None


def load_model(
    model: str | Path,
    *,
    provider: str = "cpu",
    quantize: str | None = None,
    max_slots: int = 32,
    context_length: int | None = None,
    num_threads: int = 0,
    kv_cache: str | None = None,
    speculative: str | None = None,
    num_speculative_tokens: int | None = None,
    provider_options: Mapping[str, Any] | None = None,
    ep_library: str | None = None,
    allow_fallback: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Export, quantize and lower a model as far as that is not in the cache yet, and load it.

    Args:
        model: ``demo``, a package, a Hugging Face folder or hub id, or an ONNX file beside its tokenizer.
        provider: where it runs, see ``carryall doctor``; ``auto`` tries the model on all that can run and
            takes the fastest, which the cache remembers; ``cuda:1`` takes one of a provider's devices;
            ``cpu:0-11,openvino:12-27`` splits the layers.
        quantize: how to quantize the weights first, such as ``int4``; None takes them as they are.
        max_slots: sequences that may run at once.
        context_length: most tokens of a sequence; None takes the model's own.
        num_threads: 0 lets the provider choose.
        kv_cache: ``int8`` or ``float32``; None is int8 where the model has scales for it.
        speculative: what proposes tokens to check several at a time: ``prompt-lookup``, ``draft:MODEL`` with
            a smaller model of the same tokenizer, or None. It changes the speed, never the result.
        num_speculative_tokens: most tokens proposed at a time; None leaves it to the method.
        provider_options: settings of the provider's own; ``kv_cache`` is one of them.
        ep_library: a plugin library of ONNX Runtime to run on; ``provider="ep:PATH"`` in short.
        allow_fallback: let nodes that the provider cannot run lie on the CPU; see ``LoadedModel.fallbacks``.
        progress: told about every tensor written, as (done, total, name).

    Raises:
        UsageError: the model or an option cannot be; see its subclasses.
        ProviderUnavailableError: the provider cannot run here.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
    """
    if ep_library is not None:
        provider = f"ep:{ep_library}"
    check_available(provider)
    name, device = name_and_device(provider)
    fallbacks: list[Placement] = []
    files = resolve_model(model, quantize=quantize, progress=progress)
    config = with_context(
        RunnerConfig(
            max_slots=max_slots,
            context_length=context_length,
            num_threads=num_threads,
            options={**(provider_options or {}), **({"kv_cache": kv_cache} if kv_cache else {})},
        ),
        files,
    )
    if device is not None:
        config = with_device(config, name, device)
    choice = fastest_provider(files, config, progress=progress) if provider == AUTO else None
    if allow_fallback:
        config = dataclasses.replace(config, on_fallback=fallbacks.append)
    where = name if choice is None else choice.provider
    if not is_split(where):
        config = get_provider(where).settle(config, files.load)
    loaded = _opened(files, where, config, progress)
    loaded.choice, loaded.fallbacks = choice, fallbacks
    if speculative is not None:
        options = LoadOptions(
            provider=provider if device else first_provider(where),
            max_slots=max_slots,
            num_threads=num_threads,
            progress=progress,
        )
        loaded.proposer = _proposer(loaded, speculative, num_speculative_tokens, options)
    return loaded


def _opened(files: ModelFiles, provider: str, config: RunnerConfig, progress: Progress | None) -> LoadedModel:
    """The model with all that its folder says of it, open on a provider."""
    tokenizer = Tokenizer(files.folder) if (files.folder / TOKENIZER_FILE).is_file() else None
    special_tokens = tokenizer.special_tokens if tokenizer else {}
    chat_template = ChatTemplate.from_folder(files.folder, special_tokens)
    defaults = GenerationDefaults.from_folder(files.folder)
    runner, identity, graphs = _open(files, provider, config, progress)
    loaded = LoadedModel(files.name, runner, tokenizer, chat_template, defaults, identity, graphs=graphs)
    loaded.provider = provider
    loaded.open_encoder = functools.partial(_encoder, files, provider, config, progress)
    return loaded


def _open(
    files: ModelFiles, provider: str, config: RunnerConfig, progress: Progress | None
) -> tuple[Runner, str, Sequence[Path]]:
    """A runner, what identifies the model it runs, and its lowered graphs."""
    if is_split(provider):
        runner, graphs = split_runner(files, provider, config, progress)
        return runner, f"{files.content_key} {provider}", graphs
    target = get_provider(provider)
    lowered = lowered_model(files, target, config, progress)
    identity = files.content_key if lowered == files.model_path else lowered.parent.name
    return target.runner(lowered, config), identity, [lowered]


def _encoder(files: ModelFiles, provider: str, config: RunnerConfig, progress: Progress | None) -> Runner:
    if is_split(provider):
        raise UsageError("a split model gives no embeddings; load it on one provider")
    target = get_provider(provider)
    return target.runner(lowered_model(files, target, config, progress, change=HiddenStatesPass()), config)


def check_available(provider: str) -> None:
    """Make sure that a provider can run here; of a split, each of them.

    Raises:
        UsageError: no such provider.
        ProviderUnavailableError: it cannot run here.
    """
    if is_split(provider):
        for piece in provider.split(","):
            check_available(first_provider(piece.strip()))
        return
    name, _ = name_and_device(provider)
    reason = None if name == AUTO else get_provider(name).available()
    if reason is not None:
        raise ProviderUnavailableError(f"provider '{provider}' cannot run here: {reason}")


def _proposer(model: LoadedModel, method: str, max_tokens: int | None, options: LoadOptions) -> Proposer:
    """What proposes tokens for ``model``, which is closed if that cannot be."""
    context_length = model.runner.info.context_length

    def load_draft(name: str) -> LoadedModel:
        longest = resolve_model(name, progress=options["progress"]).context_length
        own = LoadOptions(context_length=min(longest, context_length), **options)
        return load_model(name, **own)

    try:
        return make_proposer(method, max_tokens, model, load_draft)
    except CarryallError:
        model.runner.close()
        raise
