"""The option ``--image``: files of pictures, and pages of PDF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click


class PictureFile(NamedTuple):
    """A file of a picture, or a page of a PDF file, counted from 1."""

    path: Path
    page: int | None = None


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


PICTURE = _Picture()
MESSAGE_PICTURES = (
    "A picture that the message is about, for models that see; repeat it for several. A PDF file is all "
    "of its pages, or one: FILE.pdf#3."
)


def image_option(help_text: str = MESSAGE_PICTURES) -> Callable[[Any], Any]:
    """Return the option ``--image``, pictures of a command."""
    return click.option("--image", "images", type=PICTURE, multiple=True, metavar="FILE", help=help_text)


def picture_part(picture: PictureFile) -> dict[str, Any]:
    """Return a picture as a part of a content."""
    page = {} if picture.page is None else {"page": picture.page}
    return {"type": "image", "image": picture.path, **page}
