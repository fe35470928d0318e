"""Sound from files of several formats and from arrays, and what is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from carryall.errors import RequestError
from carryall.runtime.audio import opening
from carryall.runtime.audio.opening import open_sound

av = pytest.importorskip("av")

RATE = 16_000


def tone(rate: int, seconds: float = 1.0, pitch: float = 440.0) -> npt.NDArray[np.float32]:
    return np.asarray(0.5 * np.sin(2 * np.pi * pitch * np.arange(round(rate * seconds)) / rate), np.float32)


def file(
    samples: npt.NDArray[np.float32],
    rate: int,
    kind: str,
    codec: str,
    layout: str = "mono",
    fmt: str = "fltp",
) -> bytes:
    """Return a file of sound with equal channels."""
    stored = io.BytesIO()
    with av.open(stored, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        channels = np.repeat(samples[None], len(stream.layout.channels), axis=0)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format or fmt, layout=layout, rate=rate)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return stored.getvalue()


def pitch_of(samples: npt.NDArray[np.float32]) -> float:
    """Return the frequency of the largest part, in hertz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))


@pytest.mark.parametrize(
    ("kind", "codec", "rate", "layout"),
    [
        ("wav", "pcm_s16le", 16_000, "mono"),
        ("wav", "pcm_s16le", 8_000, "stereo"),
        ("wav", "pcm_f32le", 44_100, "mono"),
        ("wav", "pcm_u8", 11_025, "mono"),
        ("flac", "flac", 48_000, "stereo"),
        ("mp3", "libmp3lame", 44_100, "mono"),
        ("ogg", "libopus", 48_000, "mono"),
        ("ipod", "aac", 44_100, "stereo"),
    ],
)
def test_files_of_many_formats(kind: str, codec: str, rate: int, layout: str) -> None:
    found = open_sound(file(tone(rate, 2.0), rate, kind, codec, layout), RATE)
    assert found.dtype == np.float32
    assert found.ndim == 1
    assert len(found) == pytest.approx(2 * RATE, abs=0.1 * RATE)
    assert pitch_of(found) == pytest.approx(440.0, abs=1.0)
    assert np.abs(found[RATE // 2 : RATE]).max() == pytest.approx(0.5, abs=0.05)


def test_16_bits_at_the_models_rate_are_read_exactly(tmp_path: Path) -> None:
    samples = tone(RATE)
    path = tmp_path / "tone.wav"
    path.write_bytes(file(samples, RATE, "wav", "pcm_s16le"))
    np.testing.assert_allclose(open_sound(path, RATE), samples, atol=1 / 32_768)
    np.testing.assert_array_equal(open_sound(str(path), RATE), open_sound(path.read_bytes(), RATE))


def test_arrays_have_a_rate() -> None:
    np.testing.assert_array_equal(open_sound(tone(RATE), RATE), tone(RATE))
    found = open_sound((tone(48_000, 2.0), 48_000), RATE)
    assert len(found) == pytest.approx(2 * RATE, abs=100)
    assert pitch_of(found) == pytest.approx(440.0, abs=1.0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "is empty"),
        (b"no sound at all", "damaged or of no supported format"),
        (
            b"RIFF\xff\xff\xff\x7fWAVEfmt " + bytes(40),
            "damaged or of no supported format|no samples|no stream",
        ),
        (np.zeros((2, 100), np.float32), r"must be floats \[samples\]"),
        (np.zeros(100, np.int16), r"must be floats \[samples\]"),
        (np.zeros(0, np.float32), r"must be floats \[samples\]"),
        (np.full(100, np.nan, np.float32), "not finite"),
        ((np.zeros(100, np.float32), 3), "rate of a sound"),
        ((np.zeros(100, np.float32), True), "rate of a sound"),
        ([0.0, 1.0], "must be the path or the bytes"),
        ("/there/is/no/file.wav", "cannot be read"),
    ],
)
def test_what_is_no_sound_is_refused(source: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        open_sound(source, RATE)


def test_a_picture_is_no_sound() -> None:
    pillow = pytest.importorskip("PIL.Image")
    stored = io.BytesIO()
    pillow.new("RGB", (8, 8)).save(stored, "PNG")
    with pytest.raises(RequestError, match="no stream of sound"):
        open_sound(stored.getvalue(), RATE)


def test_long_sounds_are_refused_by_header_and_by_content() -> None:
    with pytest.raises(RequestError, match="longer than the limit of 2 s"):
        open_sound(file(np.zeros(3 * RATE, np.float32), RATE, "flac", "flac"), RATE, 2)
    raw = file(np.zeros(3 * RATE, np.float32), RATE, "adts", "aac")  # states no length
    with pytest.raises(RequestError, match="longer than the limit of 2 s"):
        open_sound(raw, RATE, 2)
    with pytest.raises(RequestError, match="longer than the limit of 2 s"):
        open_sound(np.zeros(3 * RATE, np.float32), RATE, 2)


def test_large_files_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MOST_BYTES", 1000)
    path = tmp_path / "large.wav"
    path.write_bytes(file(tone(RATE), RATE, "wav", "pcm_s16le"))
    with pytest.raises(RequestError, match="the limit is 1000"):
        open_sound(path, RATE)
    with pytest.raises(RequestError, match="the limit is 1000"):
        open_sound(path.read_bytes(), RATE)


def test_a_cut_file_gives_what_is_there_or_an_error() -> None:
    whole = file(tone(RATE, 2.0), RATE, "flac", "flac")
    for size in range(0, len(whole), max(1, len(whole) // 25)):
        with contextlib.suppress(RequestError):
            assert len(open_sound(whole[:size], RATE)) <= 2 * RATE
