"""audio_processor.json: how sound becomes the input of ``audio.onnx``, with every value written out.

As with image_processor.json, no value is left to the defaults of an installed library.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CheckpointError, PackageError, UnsupportedModelError
from ..records import dataclass
from . import audio
from .config import RawConfig, integer, number, read_json, with_defaults
from .image_processor import PREPROCESSOR_FILE
from .processor_record import ProcessorRecord

AUDIO_PROCESSOR_FILE = "audio_processor.json"
_VERSION = 1
_KIND = "WhisperFeatureExtractor"
_DEFAULTS: RawConfig = {
    "feature_extractor_type": _KIND,
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "dither": 0.0,
}
_RANGES = {
    "mels": (1, 1024),
    "rate": (1000, 192_000),
    "hop": (1, 10_000),
    "size": (2, 100_000),
    "seconds": (1, 3600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioProcessor(ProcessorRecord):
    """The content of audio_processor.json: log-mel spectra of windows.

    Args:
        family: the ``model_type``.
        mels: bands of a spectrum.
        rate: samples of a second.
        hop: samples from one spectrum to the next.
        size: samples of the Fourier transform.
        seconds: of a window.
    """

    version: int = _VERSION
    family: str
    mels: int
    rate: int
    hop: int
    size: int
    seconds: int

    FILE: ClassVar[str] = AUDIO_PROCESSOR_FILE

    @property
    def frames(self) -> int:
        """Spectra of a window."""
        return self.seconds * self.rate // self.hop

    def check(self) -> None:
        """Check the ranges of the values.

        Raises:
            ValueError: a value is out of its range.
        """
        for name, (low, high) in _RANGES.items():
            self.check_range(name, low, high)


def hears(raw: RawConfig) -> bool:
    """Return whether a model of this config.json takes sound."""
    return raw.get("model_type") in {module.name for module in pkgutil.iter_modules(audio.__path__)}


def audio_module(raw: RawConfig) -> Any:
    """Return the module that writes ``audio.onnx`` of a model."""
    return importlib.import_module(f"{audio.__name__}.{raw['model_type']}")


def audio_processor(folder: Path, raw: RawConfig) -> AudioProcessor:
    """Return the processor of a checkpoint; without preprocessor_config.json, that of Whisper.

    Raises:
        CheckpointError: the file is damaged, or does not fit the model.
        UnsupportedModelError: it is of another kind, or has an option that is not supported.
    """
    path = folder / PREPROCESSOR_FILE
    content: Mapping[str, Any] = (
        read_json(path) if path.is_file() else {"feature_size": raw.get("num_mel_bins", 80)}
    )
    content = with_defaults(content, _DEFAULTS)
    if content["feature_extractor_type"] != _KIND:
        raise UnsupportedModelError(
            f"'feature_extractor_type' {content['feature_extractor_type']!r} is not supported; supported: "
            f"{_KIND}"
        )
    for name in ("dither", "padding_value"):
        if number(content, name):
            raise UnsupportedModelError(f"{PREPROCESSOR_FILE}: '{name}' other than 0 is not supported")
    processor = AudioProcessor(
        family=raw["model_type"],
        mels=integer(content, "feature_size"),
        rate=integer(content, "sampling_rate"),
        hop=integer(content, "hop_length"),
        size=integer(content, "n_fft"),
        seconds=integer(content, "chunk_length"),
    )
    try:
        processor.check()
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    audio_module(raw).check_processor(processor, raw)
    return processor


def read_audio_processor(path: Path) -> AudioProcessor:
    """Read audio_processor.json of a package.

    Raises:
        PackageError: it is damaged, or was written by another version.
    """
    try:
        content = read_json(path)
        known = {field.name for field in fields(AudioProcessor)}
        if content.get("version") != _VERSION or set(content) != known:
            raise ValueError(f"it has the fields {sorted(content)} of version {content.get('version')!r}")
        processor = AudioProcessor(**content)
        processor.check()
    except (CheckpointError, ValueError, TypeError) as error:
        raise PackageError(f"{path} is damaged: {error}; export the model again") from error
    return processor
