"""Open sound from a file, by PyAV, or from an array: one channel of float32 at the rate of a model."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import MissingExtraError, RequestError
from ...options import shown

Samples = npt.NDArray[np.float32]  # [samples], mostly in [-1, 1]

MOST_BYTES = 512 * 2**20  # of a file
MOST_SECONDS = 2 * 3600  # of sound; a file of silence in a few kB may hold days
_RATES = (1_000, 768_000)  # samples of a second


def open_sound(source: Any, rate: int, most_seconds: float = MOST_SECONDS) -> Samples:
    """Return a sound as [samples] at ``rate`` samples of a second, all channels mixed.

    Args:
        source: the path or the bytes of a file of any format that FFmpeg reads (WAV, FLAC, MP3, Ogg, M4A,
            ...); an array float [samples] at ``rate``, or with its own rate as (array, rate).
        rate: samples of a second.
        most_seconds: of the sound.

    Raises:
        RequestError: the file is damaged, holds no sound, or is too long; or the array has no sound.
        MissingExtraError: PyAV is not installed.
    """
    if isinstance(source, str | os.PathLike):
        source = _read(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_file(bytes(source), rate, most_seconds)
    own_rate = rate
    if isinstance(source, tuple) and len(source) == 2:
        source, own_rate = source
    if not isinstance(source, np.ndarray):
        raise RequestError(
            "a sound must be the path or the bytes of a file, an array, or (array, rate), not "
            f"{shown(source)}"
        )
    return _of_array(source, own_rate, rate, most_seconds)


def _read(path: Path) -> bytes:
    try:
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise RequestError(f"{path} has {path.stat().st_size} bytes; the limit is {MOST_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # names with zeros or lone surrogates
        why = error.strerror if isinstance(error, OSError) else "the name is not valid"
        raise RequestError(f"{str(path)!a} cannot be read: {why}") from error


def _of_array(array: npt.NDArray[Any], own_rate: Any, rate: int, most_seconds: float) -> Samples:
    low, high = _RATES
    if (
        isinstance(own_rate, bool)
        or not isinstance(own_rate, int | np.integer)
        or not low <= own_rate <= high
    ):
        raise RequestError(
            f"the rate of a sound must be in [{low}, {high}] samples of a second, not {shown(own_rate)}"
        )
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating) or not array.size:
        raise RequestError(
            f"an array of sound must be floats [samples], at least one, not {array.dtype} {list(array.shape)}"
        )
    _check_length(len(array) / int(own_rate), most_seconds)
    samples = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(samples).all():
        raise RequestError("a sound has samples that are not finite numbers")
    if own_rate == rate:
        return samples
    av = _av()
    frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
    frame.sample_rate = int(own_rate)
    resampler = av.AudioResampler(format="fltp", rate=rate)
    return np.concatenate(
        [_content(part) for part in (*resampler.resample(frame), *resampler.resample(None))]
    )


def _of_file(data: bytes, rate: int, most_seconds: float) -> Samples:
    if len(data) > MOST_BYTES:
        raise RequestError(f"a file of sound has {len(data)} bytes; the limit is {MOST_BYTES}")
    if not data:
        raise RequestError("a file of sound is empty")
    av = _av()
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.audio:
                raise RequestError("a file has no stream of sound")
            if container.duration is not None:
                _check_length(container.duration / av.time_base, most_seconds)
            parts = list(_decoded(av, container, rate, most_seconds))
    except (av.FFmpegError, ValueError, IndexError, EOFError) as error:
        raise RequestError(f"a file of sound is damaged or of no supported format: {error}") from error
    samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
    if not samples.size:
        raise RequestError("a file of sound has no samples")
    return np.nan_to_num(samples, posinf=1.0, neginf=-1.0)


def _decoded(av: Any, container: Any, rate: int, most_seconds: float) -> Iterator[Samples]:
    """Yield the samples of the first stream; the length is checked on what comes, since headers may lie."""
    resampler = av.AudioResampler(format="fltp", rate=rate)
    count = 0
    for frame in container.decode(audio=0):
        frame.pts = None  # gaps in time are no samples
        for part in resampler.resample(frame):
            count += part.samples
            _check_length(count / rate, most_seconds)
            yield _content(part)
    for part in resampler.resample(None):
        yield _content(part)


def _content(frame: Any) -> Samples:
    """Return the mean of the channels: FFmpeg's own mix of floats may be louder than any."""
    return np.asarray(frame.to_ndarray().mean(axis=0), np.float32)


def _check_length(seconds: float, most: float) -> None:
    if seconds > most:
        raise RequestError(
            f"a sound of {seconds:.0f} s is longer than the limit of {most:g} s; send parts of it"
        )


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("files of sound", "av", "video") from error
    return av
