"""Load a model: resolve, lower and open it, with tokenizer, chat template and proposer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CarryallError, ProviderUnavailableError, UsageError
from ...options import shown
from ...progress import Progress
from ...providers import get_provider
from ...providers.base import Runner, RunnerConfig, RunnerInfo
from ...providers.host import machine
from ...providers.placement import Placement
from ..audio.encoding import AudioEncoder
from ..audio.word_times import Alignment
from ..engine.adapters import AdapterSet
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.speculation.proposer import Proposer
from ..images.encoding import ImageEncoder
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import TOKENIZER_FILE, Tokenizer
from .config import ModelConfig, model_config, split_fields
from .fastest import AUTO, fastest_provider
from .generation_defaults import GenerationDefaults
from .layer_places import names_places, placed_layers
from .loaded import LoadedModel as LoadedModel
from .lowering import image_inputs, is_lowered, lora_branches, lowered_model, with_context
from .model_source import SourceModel, resolve_model
from .sharded import check_ranks, sharded_runner
from .speculative import drafter_folder, make_proposer
from .split import device_memory, first_provider, is_split, name_and_device, split_runner, with_device
from .tower_place import TowerPlace, check_tower, tower_place

THREADS_PER_CORE = 4  # more threads only wait for each other
_MIN_TOKENS = 64  # per slot; KV is allocated in chunks of this many tokens
_FLOAT = 4  # bytes


def check_threads(num_threads: int) -> None:
    """Check the number of threads.

    Raises:
        UsageError: there are more than four threads for each core.
    """
    cores = machine.usable_cores()
    if num_threads > THREADS_PER_CORE * cores:
        raise UsageError(
            f"num_threads is {num_threads}; at most {THREADS_PER_CORE * cores} are allowed, "
            f"{THREADS_PER_CORE} for each of the {cores} cores that this process may use"
        )


def check_memory(source: SourceModel, max_slots: int, context_length: int) -> None:
    """Check that the minimum memory of slots and context is available.

    KV grows with its sequence, so only a minimum is counted: 64 tokens in each slot.

    Raises:
        UsageError: the minimum exceeds the available memory.
    """
    sizes = source.facts.sizes
    if sizes is None:  # not a decoder: the provider reports what is wrong with the graph
        return
    available = machine.memory()[1]
    if (weights := source.unprepared_bytes) > machine.memory()[0]:
        raise UsageError(
            f"{source.name} has {_in_words(weights)} of weights, and this process may use "
            f"{_in_words(machine.memory()[0])} of memory; take a smaller model, or one with fewer bits"
        )
    tokens, token = min(context_length, _MIN_TOKENS), sizes.kv_bytes_per_token
    slot = tokens * token + sizes.vocab_size * _FLOAT
    if max_slots * slot > available:
        raise UsageError(
            f"max_slots {max_slots} x ({tokens} tokens x {token} bytes of KV + {sizes.vocab_size} logits x "
            f"{_FLOAT} bytes) is {_in_words(max_slots * slot)}, and {_in_words(available)} of memory is "
            f"available; lower max_slots to {available // slot} or less"
        )


def check_tables(source: SourceModel, context_length: int) -> None:
    """Check that the memory for rotary tables of all positions is available.

    Raises:
        UsageError: they exceed the available memory.
    """
    sizes = source.facts.sizes
    if sizes is None:
        return
    available, table = machine.memory()[1], sizes.head_dim * _FLOAT
    if context_length * table > available:
        raise UsageError(
            f"context_length {context_length} x {table} bytes of rotary tables is "
            f"{_in_words(context_length * table)}, and {_in_words(available)} of memory is available; "
            f"lower context_length to {available // table} or less"
        )


def check_budgets(config: EngineConfig, info: RunnerInfo) -> None:
    """Check ``swap_bytes`` and ``kv_bytes`` against the memory of the machine.

    Raises:
        UsageError: they exceed the memory that this process may use.
    """
    total = machine.memory()[0]
    budgets = {"swap_bytes": config.swap_bytes}
    if info.kv_layout and not info.on_device:  # KV lies in host memory
        budgets["kv_bytes"] = config.kv_bytes or 0
    asked = sum(budgets.values())
    if asked > total:
        terms = " + ".join(f"{name} {_in_words(size)}" for name, size in budgets.items() if size)
        raise UsageError(f"{terms} is more than the {_in_words(total)} of memory that this process may use")


def _in_words(size: int) -> str:
    for power, unit in ((15, "PB"), (12, "TB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size / 1e9:.3g} GB"


def load_model(
    model: str | Path | ModelConfig,
    *,
    max_slots: int | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> LoadedModel:
    """Load a model; export, quantize and lower it first, unless that is cached.

    Args:
        model: see ``ModelConfig.model``; or a ``ModelConfig`` with all options.
        max_slots: maximum number of sequences computed at once; None takes the default of ``EngineConfig``.
        progress: called for every tensor written, as (done, total, name).
        **fields: fields of ``ModelConfig``.

    Raises:
        UsageError: the model or an option is invalid; see the subclasses.
        ProviderUnavailableError: the provider is not available on this machine.
        CheckpointError: the checkpoint is damaged.
        PackageError: the package is damaged.
    """
    asked = model_config(model, fields)
    slots = (EngineConfig() if max_slots is None else EngineConfig(max_slots=max_slots)).max_slots
    check_threads(asked.num_threads)
    name, device = _where(asked)
    check_available(name)
    if asked.tower_provider is not None:
        check_tower(asked.tower_provider)
    check_ranks(asked.tensor_parallel, name)
    if asked.pipeline is not None:
        from .pipeline import check_stages  # its imports take 20 ms

        check_stages(name)
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function, not {shown(progress)}")
    source = resolve_model(
        asked.model, quantize=asked.quantize, rope_scaling=asked.rope_scaling, progress=progress
    )
    if asked.tower_provider is not None and not (source.sees or source.hears):
        raise UsageError(f"tower_provider has no effect: {source.name} reads text only; omit it")
    _check_adapters(asked, name)
    config = with_context(_runner_config(asked, slots, name, device), source)
    check_memory(source, slots, config.context_length or 0)
    choice = fastest_provider(source, config, progress=progress) if name == AUTO else None
    fallbacks: list[Placement] = []
    if asked.allow_fallback:
        config = dataclasses.replace(config, on_fallback=fallbacks.append)
    where = name if choice is None else choice.provider
    placed = placed_layers(source, where, config) if names_places(where) else None
    if placed is not None:
        where, device = name_and_device(placed.provider)
        config = config if device is None else with_device(config, where, device)
    if not is_split(where):
        provider = get_provider(where)
        config = provider.resolve_options(config)
    if is_split(where) or get_provider(where).holds_angles(config):
        check_tables(source, config.context_length or 0)
    loaded = _opened(source, where, config, asked, progress)
    loaded.choice, loaded.placed, loaded.fallbacks = choice, placed, fallbacks
    if asked.adapters_at_once:
        _load_adapters(loaded, asked, source)
    if asked.speculative is not None:
        draft = {"provider": first_provider(where), "device": device, "num_threads": asked.num_threads}
        head = functools.partial(_open_head, source, where, config, progress)
        drafter = functools.partial(_open_drafter, source, config, progress, loaded)
        loaded.proposer = _proposer(loaded, asked, slots, draft, head, drafter, progress)
    return loaded


def load_for_engine(
    model: str | Path | ModelConfig | LoadedModel,
    engine_config: EngineConfig | None,
    fields: Mapping[str, Any],
    *,
    owner: str,
    progress: Progress | None = None,
) -> tuple[LoadedModel, EngineConfig]:
    """Return a loaded model, and the options of an engine for it.

    Args:
        model: as for ``load_model``, or its result.
        engine_config: options of the engine; None takes the defaults.
        fields: fields of ``ModelConfig`` and ``EngineConfig``; the latter override ``engine_config``.
        owner: the class or function that takes the fields, for messages.
        progress: as for ``load_model``.

    Raises:
        UsageError: a field is unknown or invalid, or cannot be set for a model that is already loaded.
        CarryallError: see ``load_model``.
    """
    if engine_config is not None and not isinstance(engine_config, EngineConfig):
        raise UsageError(f"engine_config of {owner} must be an EngineConfig, not {shown(engine_config)}")
    of_model, of_engine = split_fields(fields, owner)
    config = dataclasses.replace(engine_config or EngineConfig(), **of_engine)
    if isinstance(model, LoadedModel):
        late = [*of_model, *(name for name in of_engine if name == "max_slots")]
        if late:
            raise UsageError(
                f"{model.name} is already loaded, so {late[0]} cannot be set; pass it to load_model"
            )
        loaded = model
    else:
        loaded = load_model(model, max_slots=config.max_slots, progress=progress, **of_model)
    return loaded, config


def open_engine(
    model: str | Path | ModelConfig | LoadedModel,
    engine_config: EngineConfig | None,
    fields: Mapping[str, Any],
    *,
    owner: str,
    progress: Progress | None = None,
) -> tuple[LoadedModel, Engine]:
    """Return a model and its engine; see ``load_for_engine``. On errors, a model loaded here is closed.

    Raises:
        CarryallError: see ``load_for_engine``; or an option of the engine is invalid for the model.
    """
    loaded, config = load_for_engine(model, engine_config, fields, owner=owner, progress=progress)
    try:
        check_budgets(config, loaded.runner.info)
        return loaded, Engine(loaded.runner, config, loaded.proposer, loaded.identity)
    except CarryallError:
        if loaded is not model:
            loaded.close()
        raise


def _where(config: ModelConfig) -> tuple[str, str | None]:
    """Return the provider's name or split, and the device, None for the default."""
    provider = config.provider if config.ep_library is None else f"ep:{config.ep_library}"
    name, device = name_and_device(provider)
    if config.device is None:
        return name, device
    if device is not None or is_split(name) or name == AUTO:
        raise UsageError(
            f"device '{config.device}' cannot be combined with provider '{provider}', which already decides "
            "the device; omit device"
        )
    return name, str(config.device)


def _runner_config(config: ModelConfig, max_slots: int, provider: str, device: str | None) -> RunnerConfig:
    cache = {} if config.kv_cache_dtype is None else {"kv_cache": config.kv_cache_dtype}
    runner_config = RunnerConfig(
        max_slots=max_slots,
        context_length=config.context_length,
        num_threads=config.num_threads,
        max_loras=config.adapters_at_once,
        max_lora_rank=_largest_rank(config),
        options={**config.provider_options, **cache},
    )
    return runner_config if device is None else with_device(runner_config, provider, device)


def _check_adapters(config: ModelConfig, provider: str) -> None:
    """Check that the model can run adapters where it is asked to.

    Raises:
        UsageError: the model is split, or its provider has fixed graphs.
    """
    if config.adapters_at_once and is_split(provider):
        raise UsageError("a split model cannot run LoRA adapters; load it on one provider, or omit loras")
    if config.adapters_at_once and provider != AUTO and not get_provider(provider).takes_loras:
        raise UsageError(f"provider '{provider}' cannot run LoRA adapters; choose cpu, or omit loras")


def _largest_rank(config: ModelConfig) -> int:
    """Return the room for the rank of each adapter."""
    if config.max_lora_rank is not None or not config.loras:
        return config.max_lora_rank or RunnerConfig().max_lora_rank
    from ...exporter.adapter import adapter_rank  # with readers of weights

    ranks = (adapter_rank(Path(folder)) for folder in config.loras.values())
    return max([RunnerConfig().max_lora_rank, *ranks])


def _load_adapters(loaded: LoadedModel, config: ModelConfig, source: SourceModel) -> None:
    """Load the adapters that the options name; on errors, the runner is closed.

    Raises:
        UsageError: the provider cannot run adapters.
        CarryallError: see ``AdapterSet.load``.
    """
    from ...graph_opt.quantize.algorithms.layer_changes import LayerChanges

    try:
        if not loaded.runner.info.max_loras:
            raise UsageError(
                f"provider '{loaded.provider}' cannot run LoRA adapters; choose cpu, or omit loras"
            )
        loaded.adapters = AdapterSet(loaded.runner.info, LayerChanges.of(source.graph.graph).adapted)
        for name, folder in config.loras.items():
            loaded.adapters.load(name, folder)
    except CarryallError:
        loaded.runner.close()
        raise


def _opened(
    source: SourceModel, provider: str, config: RunnerConfig, asked: ModelConfig, progress: Progress | None
) -> LoadedModel:
    """Open a model on a provider, with the tokenizer, template and defaults of its folder."""
    tokenizer = Tokenizer(source.folder) if (source.folder / TOKENIZER_FILE).is_file() else None
    special_tokens = tokenizer.special_tokens if tokenizer else {}
    tool_prompt = asked.tool_prompt
    if asked.chat_template is None:
        chat_template = ChatTemplate.from_folder(source.folder, special_tokens, tool_prompt=tool_prompt)
    else:
        chat_template = ChatTemplate.from_file(asked.chat_template, special_tokens, tool_prompt=tool_prompt)
    defaults = GenerationDefaults.from_folder(source.folder, lambda: source.config)
    place = tower_place(asked.tower_provider, provider, config)
    runner, identity, graphs = _open(source, provider, config, asked, progress)
    if asked.tower_provider is not None:  # KV of pictures depends on what encoded them
        identity = f"{identity} tower {asked.tower_provider}"
    loaded = LoadedModel(source.name, runner, tokenizer, chat_template, defaults, identity, graphs=graphs)
    loaded.provider = provider
    loaded.device_memory = functools.partial(device_memory, provider, config)
    loaded.summary = lambda: source.summary
    if source.sees:
        loaded.open_sight = functools.partial(_sight, source, provider, config, runner.info, place)
    if source.hears:
        loaded.open_hearing = functools.partial(_hearing, source, provider, config, place)
    loaded.open_encoder = functools.partial(_encoder, source, provider, config, asked, progress)
    return loaded


def _sight(
    source: SourceModel, provider: str, config: RunnerConfig, info: RunnerInfo, place: TowerPlace
) -> ImageEncoder:
    from .sight import open_sight  # not at the start of models without pictures: it imports graphs

    return open_sight(source, provider, config, info, place)


def _hearing(
    source: SourceModel, provider: str, config: RunnerConfig, place: TowerPlace
) -> tuple[AudioEncoder, Mapping[str, Any], Alignment]:
    from .hearing import open_hearing  # as above

    return open_hearing(source, provider, config, place)


def _open(
    source: SourceModel,
    provider: str,
    config: RunnerConfig,
    asked: ModelConfig,
    progress: Progress | None,
) -> tuple[Runner, str, Sequence[Path]]:
    """Open a runner; return it, the identity of its model, and its lowered graphs."""
    if is_split(provider):
        runner, graphs = split_runner(source, provider, config, progress)
        return runner, f"{source.content_key} {provider}", graphs
    target = get_provider(provider)
    if (count := asked.tensor_parallel) > 1:
        runner, graphs = sharded_runner(source, target, config, count, progress, numa=asked.numa == "auto")
        return runner, f"{source.content_key} {provider} tensor_parallel {count}", graphs
    if asked.pipeline is not None:
        from .pipeline import pipeline_runner

        stages = asked.pipeline_stages or 2
        runner, graphs = pipeline_runner(source, target, config, asked.pipeline, stages, progress)
        return runner, f"{source.content_key} {provider} pipeline {stages}", graphs
    changes = [lora_branches(source, asked.lora_modules)] if config.max_loras else []
    if not changes and source.sees and target.takes_images(config):
        changes = [image_inputs()]
    if (folder := drafter_folder(asked.speculative)) is not None:
        from .drafters import layer_states

        changes += layer_states(source, folder)
    lowered = lowered_model(source, target, config, progress, changes=changes)
    identity = lowered.parent.name if is_lowered(lowered) else source.content_key
    return target.runner(lowered, config), identity, [lowered]


def _encoder(
    source: SourceModel, provider: str, config: RunnerConfig, asked: ModelConfig, progress: Progress | None
) -> Runner:
    if is_split(provider) or asked.tensor_parallel > 1 or asked.pipeline is not None:
        raise UsageError("a split model cannot compute embeddings; load it on one provider, in one process")
    from ...graph_opt.lower.outputs.hidden_states import HiddenStatesPass

    target = get_provider(provider)
    return target.runner(
        lowered_model(source, target, config, progress, changes=[HiddenStatesPass()]), config
    )


def _open_head(
    source: SourceModel, provider: str, config: RunnerConfig, progress: Progress | None, folder: Path | None
) -> Runner:
    """Open the head of a model, or one with the tensors of a folder, on the model's provider."""
    from .draft_heads import draft_head_of

    if is_split(provider):
        raise UsageError("a split model has no draft head; load it on one provider")
    target, head = get_provider(provider), draft_head_of(source, folder)
    config = dataclasses.replace(config, max_loras=0)
    return target.runner(lowered_model(head, target, config, progress), config)


def _open_drafter(*facts: Any) -> Proposer:
    from .drafters import open_drafter

    return open_drafter(*facts)


def check_available(provider: str) -> None:
    """Check that a provider is available on this machine; for a split, all of its providers.

    Raises:
        UsageError: there is no such provider.
        ProviderUnavailableError: it is not available.
    """
    if is_split(provider):
        for piece in provider.split(","):
            check_available(first_provider(piece.strip()))
        return
    name, _ = name_and_device(provider)
    reason = None if name == AUTO else get_provider(name).available()
    if reason is not None:
        raise ProviderUnavailableError(f"provider '{provider}' is not available: {reason}")


def _proposer(
    model: LoadedModel,
    asked: ModelConfig,
    slots: int,
    draft: Mapping[str, Any],
    open_head: Callable[[Path | None], Runner],
    open_drafter: Callable[[Path, Mapping[str, Any]], Proposer],
    progress: Progress | None,
) -> Proposer:
    """Return the proposer of ``model``; on errors, the model's runner is closed."""
    context_length = model.runner.info.context_length

    def load_draft(name: str) -> LoadedModel:
        known = resolve_model(name, progress=progress).context
        longest = context_length if known is None else min(known.longest, context_length)
        own = ModelConfig(model=name, context_length=longest, **draft)
        return load_model(own, max_slots=slots, progress=progress)

    try:
        return make_proposer(
            asked.speculative or "", asked.num_speculative_tokens, model, load_draft, open_head, open_drafter
        )
    except CarryallError:
        model.runner.close()
        raise
