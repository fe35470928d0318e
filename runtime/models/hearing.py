"""Open ``audio.onnx`` of a package: what turns sound into rows for the decoder's cross-attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import AUDIO_FEATURES, AUDIO_STATES
from ...errors import ProviderRuntimeError
from ...exporter.audio_processor import AUDIO_PROCESSOR_FILE, read_audio_processor
from ...exporter.config import read_generation_config
from ...exporter.package import AUDIO_FILE
from ...graph_opt.graph.graph_facts import has_quantized_weights
from ...providers.base import RunnerConfig
from ..audio.encoding import AudioEncoder
from ..audio.word_times import Alignment
from ..process.threads import at_lower_priority
from .alignment import open_alignment
from .model_source import SourceModel
from .tower_place import TowerPlace


def open_hearing(
    source: SourceModel, provider: str, config: RunnerConfig, place: TowerPlace
) -> tuple[AudioEncoder, Mapping[str, Any], Alignment]:
    """Return what turns sound into rows, the content of generation_config.json, and what aligns tokens.

    The last opens its graph when it is first called.

    Args:
        source: a model that hears.
        provider: the provider that runs its decoder.
        config: options of the decoder's runner.
        place: what runs its encoder.

    Raises:
        PackageError: the package is damaged.
        CheckpointError: as ``sight_folder``.
        UnsupportedModelError: as ``sight_folder``.
    """
    folder = source.sight_folder()
    processor = read_audio_processor(folder / AUDIO_PROCESSOR_FILE)
    session = place.session(folder / AUDIO_FILE, quantized=has_quantized_weights(source.graph.graph))

    def run(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        try:
            # Requests that decode meanwhile go first.
            states = at_lower_priority(lambda: session.run([AUDIO_STATES], {AUDIO_FEATURES: features})[0])
        except Exception as error:  # onnxruntime raises errors of many types
            raise ProviderRuntimeError(f"{AUDIO_FILE} failed: {error}") from error
        return np.asarray(states, np.float32)

    generation = read_generation_config(source.folder)
    opened = functools.cache(lambda: open_alignment(source, provider, config, generation))
    return AudioEncoder(processor, run), generation, lambda tokens, rows: opened()(tokens, rows)
