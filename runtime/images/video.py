"""Videos: frames with the seconds that they are of, from a list, or from the file of a container by PyAV."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import MissingExtraError, RequestError
from ...options import shown
from ...records import dataclass
from .opening import MOST_PIXELS, Pixels, open_picture, read_picture

FPS = 2.0  # frames of a second that are taken, unless the caller says otherwise
MOST_FRAMES = 256
_MOST_FPS = 240.0


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """The frames of a video, at equal distances in time.

    Args:
        frames: of one size, uint8 [height, width, 3].
        fps: of them are in a second.
        duration: of the video, in seconds.
    """

    frames: Sequence[Pixels]
    fps: float
    duration: float

    @property
    def seconds_per_frame(self) -> float:
        """The time between two frames."""
        return 1 / self.fps

    def seconds(self, number: int) -> float:
        """Return the time of a frame, counted from 0."""
        return number / self.fps


def open_video(source: Any, fps: Any = None) -> Video:
    """Return the frames of a video.

    Args:
        source: a list of what ``open_picture`` takes, of one size; or the bytes or the path of a file, whose
            frames are taken at equal distances in time.
        fps: frames of a second: those of a list, and those to take of a file; None is ``FPS``.

    Raises:
        RequestError: the video is damaged, has no or too many frames, or frames of several sizes.
        MissingExtraError: PyAV, for files, or Pillow is not installed.
    """
    rate = FPS if fps is None else fps
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= _MOST_FPS:
        raise RequestError(f"'fps' of a video must be a number above 0 and up to {_MOST_FPS}: {shown(fps)}")
    if isinstance(source, str | os.PathLike):
        source = read_picture(Path(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_file(bytes(source), float(rate))
    if isinstance(source, np.ndarray) and source.ndim == 4:
        source = list(source)
    if not isinstance(source, list | tuple):
        raise RequestError(
            f"a video must be a list of frames, or a file: a path or bytes, not {shown(source)}"
        )
    _check_count(len(source))
    frames = [open_picture(frame) for frame in source]
    if len(sizes := {frame.shape for frame in frames}) > 1:
        raise RequestError(f"the frames of a video have {len(sizes)} sizes; give all of them one size")
    _check_pixels(len(frames), *frames[0].shape[:2])
    return Video(frames, float(rate), len(frames) / rate)


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_FRAMES:
        raise RequestError(f"a video of {count} frames; from 1 to {MOST_FRAMES} are read: take a smaller fps")


def _check_pixels(count: int, height: int, width: int) -> None:
    if count * height * width > 4 * MOST_PIXELS:
        raise RequestError(
            f"a video of {count} frames of {width} x {height} pixels exceeds the limit of {4 * MOST_PIXELS} "
            "pixels; make it smaller, or take a smaller fps"
        )


def _of_file(data: bytes, fps: float) -> Video:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("files of videos", "av", "video") from error
    try:
        with av.open(io.BytesIO(data)) as container:
            return _decoded(container, fps)
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise RequestError(f"a video is damaged or of no supported format: {error}") from error


def _decoded(container: Any, fps: float) -> Video:
    """Return the last frame that is shown at each 1 / fps seconds of the first stream of pictures."""
    if not container.streams.video:
        raise RequestError("a file has no stream of pictures; it is no video")
    frames: list[Pixels] = []
    shown_frame: Any = None
    first = end = 0.0
    for frame in container.decode(video=0):
        time = float(frame.time or 0.0)
        first = time if shown_frame is None else first
        while shown_frame is not None and first + len(frames) / fps < time:
            _check_count(len(frames) + 1)
            _check_pixels(len(frames) + 1, shown_frame.height, shown_frame.width)
            frames.append(shown_frame.to_ndarray(format="rgb24"))
        shown_frame, end = frame, time
    if shown_frame is None:
        raise RequestError("a video has no frames")
    if first + len(frames) / fps <= end:
        frames.append(shown_frame.to_ndarray(format="rgb24"))
    rate = container.streams.video[0].average_rate
    return Video(frames, fps, end - first + (1 / float(rate) if rate else 0.0))
