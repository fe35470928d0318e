"""The options ``--image`` and ``--video``: files of pictures, pages of PDF files, and files of videos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click


class PictureFile(NamedTuple):
    """A file of a picture, or a page of a PDF file, counted from 1."""

    path: Path
    page: int | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The picture as a part of a content."""
        page = {} if self.page is None else {"page": self.page}
        return {"type": "image", "image": self.path, **page}


class VideoFile(NamedTuple):
    """A file of a video, and how many frames of a second are taken; None for the default."""

    path: Path
    fps: float | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The video as a part of a content."""
        return {"type": "video", "video": self.path, "fps": self.fps}


Shown = PictureFile | VideoFile


class _Picture(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    name = "picture"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PictureFile:
        if isinstance(value, PictureFile):
            return value
        name, mark, page = str(value).rpartition("#")
        if not mark or Path(value).is_file():
            name, page = str(value), ""
        elif not page.isascii() or not page.isdigit() or not int(page):
            self.fail(f"'{page}' is no page; pages count from 1: FILE.pdf#3", param, ctx)
        path = click.Path(path_type=Path, exists=True, dir_okay=False).convert(name, param, ctx)
        return PictureFile(Path(path), int(page) if page else None)


class _Video(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    name = "video"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> VideoFile:
        if isinstance(value, VideoFile):
            return value
        name, mark, fps = str(value).rpartition("#")
        if not mark or Path(value).is_file():
            name, fps = str(value), ""
        rate = click.FloatRange(0, min_open=True)(fps, param, ctx) if fps else None
        path = click.Path(path_type=Path, exists=True, dir_okay=False).convert(name, param, ctx)
        return VideoFile(Path(path), rate)


PICTURE, VIDEO = _Picture(), _Video()
MESSAGE_PICTURES = (
    "A picture that the message is about, for models that see; repeat it for several. A PDF file is all "
    "of its pages, or one: FILE.pdf#3."
)


def image_option(help_text: str = MESSAGE_PICTURES) -> Callable[[Any], Any]:
    """Return the option ``--image``, pictures of a command."""
    return click.option("--image", "images", type=PICTURE, multiple=True, metavar="FILE", help=help_text)


def video_option() -> Callable[[Any], Any]:
    """Return the option ``--video``, videos of a command."""
    return click.option(
        "--video",
        "videos",
        type=VIDEO,
        multiple=True,
        metavar="FILE",
        help="A video that the message is about, for models that read them, at 2 frames a second, or as many "
        "as FILE#0.5 says. May be repeated.",
    )
