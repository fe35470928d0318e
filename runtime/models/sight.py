"""Open ``vision.onnx`` of a package: what turns pictures into rows of the decoder's input."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...contract import DEEP_STATES, ENCODER_STATES, GROUPS, IMAGE_STATES
from ...errors import ProviderRuntimeError, RequestError
from ...exporter.image_processor import IMAGE_PROCESSOR_FILE, read_image_processor
from ...exporter.package import TEXT_ENCODER_FILE, VISION_FILE
from ...graph_opt.graph.graph_facts import has_quantized_weights
from ...graph_opt.quantize.algorithms.layer_changes import LayerChanges
from ...graph_opt.quantize.algorithms.rotation import Rotation
from ...providers.base import RunnerConfig, RunnerInfo
from ..images.encoding import ImageEncoder, States
from ..process.threads import at_lower_priority
from .model_source import SourceModel
from .tower_place import TowerPlace
from .tower_rows import TowerRows

_NONE = np.zeros((0, 0), np.int64)  # groups of towers that have none


def open_sight(
    source: SourceModel, provider: str, config: RunnerConfig, info: RunnerInfo, place: TowerPlace
) -> ImageEncoder:
    """Return what turns pictures into rows of the decoder's input, or into those that it attends to.

    Args:
        source: a model that sees.
        provider: the provider that runs its decoder.
        config: options of the decoder's runner.
        info: of that runner.
        place: what runs its tower.

    Raises:
        RequestError: the decoder runs without the inputs for pictures.
        PackageError: the package is damaged.
        CheckpointError: as ``sight_folder``.
        UnsupportedModelError: as ``sight_folder``.
    """
    width = info.image_width or info.encoder_width
    if not width:
        raise RequestError(
            f"{source.name} reads pictures, but not as it was loaded here: with provider '{provider}'"
            f"{' and LoRA adapters' if config.max_loras else ''}; load it with provider cpu, or cuda and "
            "kv_memory=paged, without adapters"
        )
    folder = source.sight_folder()
    # Quantization may have rotated the stream that the rows enter in place of embeddings.
    rotated = info.image_width > 0 and LayerChanges.of(source.graph.graph).rotates_stream
    parts = 1 + len(json.loads(source.graph.metadata_props.get(DEEP_STATES, "[]")))
    turned = Rotation(width // parts).after if rotated else np.asarray
    opened = functools.partial(place.session, quantized=has_quantized_weights(source.graph.graph))
    reads = (folder / TEXT_ENCODER_FILE).is_file()
    return open_tower(
        folder,
        opened(folder / VISION_FILE),
        lambda states: turned(states.reshape(-1, width // parts)).reshape(states.shape),
        opened(folder / TEXT_ENCODER_FILE) if reads else None,
    )


def open_tower(
    folder: Path,
    session: Any,
    change: Callable[[States], States] = lambda states: states,
    text_session: Any = None,
) -> ImageEncoder:
    """Open ``image_processor.json`` of a folder.

    Args:
        folder: the folder.
        session: runs its ``vision.onnx``; None if only pictures are prepared.
        change: applied to its results.
        text_session: runs its ``text_encoder.onnx``; None if there is none.

    Raises:
        PackageError: the file is damaged.
    """
    processor = read_image_processor(folder / IMAGE_PROCESSOR_FILE)
    rows = None if session is None else TowerRows(session)

    def run(feeds: Mapping[str, npt.NDArray[Any]]) -> States:
        if rows is not None and rows.needed:
            feeds = rows.feeds(feeds)
        elif (feeds.get(GROUPS, _NONE) < 0).any():
            raise ProviderRuntimeError("units of different shapes are in one run of a tower for full groups")
        return change(_result(session, IMAGE_STATES, feeds, VISION_FILE))

    def read(feeds: Mapping[str, npt.NDArray[Any]]) -> States:
        return _result(text_session, ENCODER_STATES, feeds, TEXT_ENCODER_FILE)

    return ImageEncoder(processor, run, read=None if text_session is None else read)


def _result(session: Any, name: str, feeds: Mapping[str, npt.NDArray[Any]], file: str) -> States:
    """Return an output of a session of ``file``, while requests that decode go first."""
    try:
        states: States = at_lower_priority(lambda: session.run([name], dict(feeds))[0])
    except Exception as error:  # onnxruntime raises errors of many types
        raise ProviderRuntimeError(f"{file} failed: {error}") from error
    return states
