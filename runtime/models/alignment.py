"""The weights with which a decoder attends to an encoder's rows, by a graph of its first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import (
    ALIGNMENT,
    ATTENTION_MASK,
    ENCODER_MASK,
    ENCODER_STATES,
    INPUT_IDS,
    POSITION_IDS,
)
from ...errors import PackageError, ProviderRuntimeError
from ...exporter.package import MODEL_FILE
from ...providers import get_provider
from ...providers.base import RunnerConfig
from ...storage.cache import cache_key, cached_folder
from ..audio.word_times import Alignment
from ..process.threads import at_lower_priority
from .model_source import SourceModel


def open_alignment(
    source: SourceModel, provider: str, config: RunnerConfig, generation: Mapping[str, Any]
) -> Alignment:
    """Return what computes the weights of the heads that ``alignment_heads`` names.

    Args:
        source: a model that hears.
        provider: the provider that runs its decoder.
        config: options of the runner.
        generation: the content of generation_config.json.

    Raises:
        PackageError: ``alignment_heads`` is damaged.
        GraphError: the decoder has no such heads.
    """
    heads, target = _heads(generation), get_provider(provider)
    key = cache_key(alignment=source.content_key, heads=heads)

    def build(folder: Path) -> None:
        from ...graph_opt.graph.saving import save_model
        from ...graph_opt.lower.outputs.alignment import AlignmentPass
        from ...graph_opt.passes.remove_unused import RemoveUnusedNodesPass
        from ...graph_opt.pipeline.pipeline import run

        lowered, _ = run(source.load(), [AlignmentPass(heads), RemoveUnusedNodesPass()])
        for value in list(lowered.graph.inputs):
            if not value.uses():
                lowered.graph.inputs.remove(value)
        save_model(lowered, folder / MODEL_FILE)

    graph = cached_folder("lowered", key, build, {"model": source.name, "provider": provider}) / MODEL_FILE
    session: Any = at_lower_priority(lambda: target.session(graph, config))
    inputs = {value.name: value.shape for value in session.get_inputs()}

    def align(tokens: Sequence[int], states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        count = len(tokens)
        feeds: dict[str, npt.NDArray[Any]] = {
            INPUT_IDS: np.array([tokens], np.int64),
            POSITION_IDS: np.arange(count)[None],
            ATTENTION_MASK: np.ones((1, count), np.int64),
            ENCODER_STATES: states[None],
            ENCODER_MASK: np.ones((1, len(states)), np.int64),
        }
        for name, shape in inputs.items():
            if name not in feeds:  # a cache, which is empty
                feeds[name] = np.empty((1, shape[1], 0, shape[3]), np.float32)
        feeds = {name: array for name, array in feeds.items() if name in inputs}
        try:
            weights = at_lower_priority(lambda: session.run([ALIGNMENT], feeds)[0])
        except Exception as error:  # onnxruntime raises errors of many types
            raise ProviderRuntimeError(f"the times of words were not computed: {error}") from error
        return np.asarray(weights, np.float32)

    return align


def _heads(generation: Mapping[str, Any]) -> list[tuple[int, int]]:
    heads = generation.get("alignment_heads") or []
    if not isinstance(heads, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(type(number) is int for number in each)
        for each in heads
    ):
        raise PackageError(
            f"'alignment_heads' of generation_config.json must be a list of [layer, head], not {heads!r}"
        )
    return [(layer, head) for layer, head in heads]
