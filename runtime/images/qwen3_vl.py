"""The geometry of Qwen3-VL (https://arxiv.org/abs/2511.21631): pictures as in Qwen2-VL, videos with times.

In the text of a video, its time in seconds is in front of each unit of frames, whose places are those of a
picture.
"""

from __future__ import annotations

import math

import numpy as np

from ...exporter.vision.qwen3_vl import Processor
from .qwen2_vl import grid, units_of_frames
from .qwen2_vl import inputs as inputs
from .qwen2_vl import prepare as prepare
from .units import Prepared
from .video import Video


def prepare_video(processor: Processor, video: Video) -> Prepared:
    """Return a video in units of as many frames as a patch has, each in a text that tells its time.

    It is the middle between the first and the last of the frames; the last one fills up the last unit.
    """
    frames, texts = processor.frames, processor.texts
    count, (height, width, _) = len(video.frames), video.frames[0].shape
    units = units_of_frames(processor, video, *frame_size(processor, max(count, frames), height, width))
    token = processor.patch * processor.merge
    rows, columns = units[0].shape[1] // token, units[0].shape[2] // token
    text = ""
    for first in range(0, count, frames):
        last = min(first + frames, count) - 1
        seconds = (video.seconds(first) + video.seconds(last)) / 2
        text += f"<{seconds:.1f} seconds>{texts['start']}{texts['video'] * (rows * columns)}{texts['end']}"
    places = np.stack([np.zeros(rows * columns, np.int64), *grid(rows, columns)])
    return Prepared(units, text, places=[places] * len(units))


def frame_size(processor: Processor, count: int, height: int, width: int) -> tuple[int, int]:
    """Return the height and width of frames, in whole tokens; the range of pixels is that of all together.

    Halves round to even numbers.
    """
    token = processor.patch * processor.merge
    if min(height, width) < token:
        growth = max(token / height, token / width)
        height, width = int(height * growth), int(width * growth)
    rows, columns = round(height / token), round(width / token)
    pixels = round(count / processor.frames) * processor.frames * rows * columns * token**2
    if pixels > processor.video_max_pixels:
        shrink = math.sqrt(count * height * width / processor.video_max_pixels)
        rows, columns = (max(1, math.floor(edge / shrink / token)) for edge in (height, width))
    elif pixels < processor.video_min_pixels:
        growth = math.sqrt(processor.video_min_pixels / (count * height * width))
        rows, columns = (math.ceil(edge * growth / token) for edge in (height, width))
    return rows * token, columns * token
