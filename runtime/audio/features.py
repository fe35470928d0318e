"""Log-mel spectra of Whisper (https://arxiv.org/abs/2212.04356, section 2.2), in NumPy.

The results equal those of transformers' WhisperFeatureExtractor up to the rounding of float32.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from ...exporter.audio_processor import AudioProcessor
from .opening import Samples

Spectra = npt.NDArray[np.float32]  # [mels, frames]

_FLOOR = 1e-10  # of the energy in a band
_RANGE = 8.0  # powers of 10 between the loudest and the softest value
_FRAMES_AT_ONCE = 4096


def log_mel(processor: AudioProcessor, samples: Samples) -> Spectra:
    """Return the spectra of a sound.

    Up to a window of sound is padded with silence to a window. A longer one has as many spectra as whole
    hops; values are limited by the loudest of all.
    """
    window = processor.seconds * processor.rate
    if len(samples) < window:
        samples = np.pad(samples, (0, window - len(samples)))
    half, hop = processor.size // 2, processor.hop
    padded = np.pad(samples, half, mode="reflect")
    count = len(samples) // hop  # the spectrum behind the last one is left out
    frames = np.lib.stride_tricks.sliding_window_view(padded, processor.size)[::hop][:count]
    taper = np.hanning(processor.size + 1)[:-1]  # periodic
    bands = mel_filters(processor.mels, processor.size, processor.rate)
    energies = np.empty((processor.mels, count), np.float32)
    for first in range(0, count, _FRAMES_AT_ONCE):
        part = frames[first : first + _FRAMES_AT_ONCE] * taper
        power = np.abs(np.fft.rfft(part, axis=-1).astype(np.complex64)).astype(np.float64) ** 2
        energies[:, first : first + len(part)] = np.log10(np.maximum(power @ bands, _FLOOR)).T
    floor = energies.max() - np.float32(_RANGE)
    return np.asarray((np.maximum(energies, floor) + np.float32(4)) / np.float32(4), np.float32)


@functools.cache
def mel_filters(mels: int, size: int, rate: int) -> npt.NDArray[np.float64]:
    """Return triangles of equal area [size / 2 + 1, mels] on the scale of Slaney's Auditory Toolbox."""
    edges = _hertz(np.linspace(0.0, _mel(rate / 2), mels + 2))
    bins = np.linspace(0, rate // 2, size // 2 + 1)
    slopes = edges[None, :] - bins[:, None]
    widths = np.diff(edges)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(triangles * (2.0 / (edges[2:] - edges[:-2])), np.float64)


_LINEAR, _STEP = 1000.0, np.log(6.4) / 27.0  # hertz below which the scale is linear; log of a mel above


def _mel(hertz: float) -> float:
    return float(3 * hertz / 200 if hertz < _LINEAR else 15 + np.log(hertz / _LINEAR) / _STEP)


def _hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(mel < 15, 200 * mel / 3, _LINEAR * np.exp(_STEP * (mel - 15)))
