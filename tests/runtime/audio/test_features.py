"""Log-mel spectra against transformers' WhisperFeatureExtractor on NumPy, and against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_whisper import sound
from whisper_golden import PATH, sounds

from carryall.exporter.audio_processor import AudioProcessor
from carryall.runtime.audio.features import log_mel, mel_filters


def processor(mels: int, seconds: int) -> AudioProcessor:
    return AudioProcessor(family="whisper", mels=mels, rate=16_000, hop=160, size=400, seconds=seconds)


def test_spectra_equal_transformers() -> None:
    wanted = np.load(PATH)["features"]
    found = np.stack([log_mel(processor(16, 2), each) for each in sounds()])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2.5e-7)  # 2 units in the last place


@pytest.mark.parametrize("mels", [80, 128])
def test_published_sizes_equal_transformers(mels: int) -> None:
    """Recorded with transformers 5.24: the sum over bands weighted by their numbers, at some frames."""
    wanted = {
        80: [21.628752, 13.7957346, 13.4782668, 13.393501, 13.7248154, -10.5951446, -36.4697455],
        128: [33.7274079, 20.5669915, 20.0332941, 19.7262339, 21.1511301, -17.0925048, -54.2088205],
    }[mels]
    found = log_mel(processor(mels, 30), sound(3.7, 5))
    assert found.shape == (mels, 3000)
    weights = np.arange(1, mels + 1, dtype=np.float64) / mels
    np.testing.assert_allclose(weights @ found[:, [0, 1, 100, 369, 370, 371, 2999]], wanted, atol=2e-6)


def test_a_short_sound_is_padded_with_silence() -> None:
    short = sound(0.01)
    found = log_mel(processor(16, 2), short)
    np.testing.assert_array_equal(found, log_mel(processor(16, 2), np.pad(short, (0, 32_000 - len(short)))))
    assert found.shape == (16, 200)


def test_a_long_sound_has_a_spectrum_for_each_whole_hop() -> None:
    assert log_mel(processor(16, 2), sound(5.015)).shape == (16, 501)


def test_values_are_limited_by_the_loudest() -> None:
    found = log_mel(processor(16, 2), np.concatenate([sound(1.0), np.zeros(16_000, np.float32)]))
    assert found.min() == pytest.approx(found.max() - 2.0)  # 8 powers of 10, divided by 4


def test_filters_have_equal_areas() -> None:
    filters = mel_filters(80, 400, 16_000)
    assert filters.shape == (201, 80)
    assert (filters >= 0).all()
    assert (filters.sum(axis=0) > 0).all()
    wide = filters[:, 60:].sum(axis=0) * 40.0  # hertz between two bins
    np.testing.assert_allclose(wide, 1.0, atol=0.02)
