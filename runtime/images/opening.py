"""Open a picture: any file of a common format, a Pillow image or an array, to RGB pixels.

Limits are checked on the header, before any pixel is decoded: 74 bytes can claim 9000 x 9000 pixels.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import MissingExtraError, RequestError
from ...options import shown

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], RGB

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 64_000_000
_MOST_BYTES = 64 * 2**20  # of a file
_LONGEST_TO_SHORTEST = 200
# A scan of a progressive JPEG file takes 14 bytes and goes over all pixels, 0.6 ns each; 10 scans are usual.
_SCAN = b"\xff\xda"
_MOST_SCANS = 100
_MOST_SCANNED = 20 * MOST_PIXELS
_LEVELS = 255
_FILTERS = threading.Lock()  # filters of warnings are those of all threads


def open_picture(source: Any) -> Pixels:
    """Return the RGB pixels of a picture, upright, [height, width, 3].

    Args:
        source: the bytes of a file, a path, a Pillow image, or an array: uint8 [height, width] or [height,
            width, 1, 3 or 4]. Of an animation the first frame is taken; transparent pixels become white.

    Raises:
        RequestError: it is damaged, too large, or of a format or kind that is not supported.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pictures", "pillow", "images") from error
    if isinstance(source, np.ndarray):
        return _checked_size(_of_array(source))
    if isinstance(source, Image.Image):
        return _pixels(source)
    if isinstance(source, str | os.PathLike):
        source = read_picture(Path(source))
    if not isinstance(source, bytes | bytearray | memoryview):
        raise RequestError(
            f"a picture must be a path, bytes, a Pillow image or an array, not {shown(source)}"
        )
    return _decoded(bytes(source))


def read_picture(path: Path) -> bytes:
    """Return the content of a file of a picture.

    Raises:
        RequestError: it cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RequestError(
                f"the picture {path} is larger than {_MOST_BYTES // 2**20} MiB; make it smaller"
            )
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"the picture {path} cannot be read: {error.strerror or error}") from error


def _decoded(data: bytes) -> Pixels:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise RequestError("a picture has 0 bytes; send the content of its file")
    if len(data) > _MOST_BYTES:
        raise RequestError(f"a picture is larger than {_MOST_BYTES // 2**20} MiB; make it smaller")
    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"a picture states more than {MOST_PIXELS} pixels in its header; make it smaller"
        ) from error
    except UnidentifiedImageError as error:
        raise RequestError(
            f"a picture of {len(data)} bytes is of no supported format ({', '.join(FORMATS)}) or damaged; "
            "convert it to PNG or JPEG"
        ) from error
    except Exception as error:  # Pillow's readers raise errors of many types for a damaged header
        raise _damaged(error) from error
    with image:
        if image.format in ("JPEG", "MPO"):
            _check_scans(data.count(_SCAN), *image.size)
        return _pixels(image)


def _pixels(image: PillowImage) -> Pixels:
    _check_size(*image.size)
    try:
        return _upright(image)
    except RequestError:
        raise
    except Exception as error:  # Pillow reads the pixels now, or the caller has closed the image
        raise _damaged(error) from error


def _damaged(error: Exception) -> RequestError:
    return RequestError(f"a picture is damaged or cut off: {error}; send the whole file")


def _check_size(width: int, height: int) -> None:
    """Raise RequestError for a picture without pixels, with too many, or that is a line."""
    if width < 1 or height < 1:
        raise RequestError(f"a picture of {width} x {height} pixels has no pixels")
    if width * height > MOST_PIXELS:
        raise RequestError(
            f"a picture of {width} x {height} pixels exceeds the limit of {MOST_PIXELS}; make it smaller"
        )
    if max(width, height) > _LONGEST_TO_SHORTEST * min(width, height):
        raise RequestError(
            f"a picture of {width} x {height} pixels is longer than {_LONGEST_TO_SHORTEST} times its other "
            "side; cut it into pieces"
        )


def _check_scans(count: int, width: int, height: int) -> None:
    """Raise RequestError for a JPEG file that goes over its pixels too often."""
    if count > _MOST_SCANS or count * width * height > _MOST_SCANNED:
        raise RequestError(
            f"a picture of {width} x {height} pixels has {count} scans, which take too long; save it as a "
            "baseline JPEG file"
        )


def _checked_size(pixels: Pixels) -> Pixels:
    _check_size(pixels.shape[1], pixels.shape[0])
    return pixels


def _of_array(array: npt.NDArray[Any]) -> Pixels:
    from PIL import Image

    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise RequestError(
            "a picture as an array must be uint8 [height, width] or [height, width, 1, 3 or 4], not "
            f"{array.dtype} {list(array.shape)}"
        )
    if not array.size:
        raise RequestError(f"a picture of {array.shape[1]} x {array.shape[0]} pixels has no pixels")
    _check_size(array.shape[1], array.shape[0])
    return _upright(Image.fromarray(np.ascontiguousarray(array)))


def _upright(image: PillowImage) -> Pixels:
    """Return RGB pixels, turned as the file's EXIF orientation says."""
    from PIL import ImageOps

    return np.array(_in_rgb(ImageOps.exif_transpose(image)), np.uint8)


def _in_rgb(image: PillowImage) -> PillowImage:
    """Return an image in RGB: transparency over white, and all levels of deep images in 8 bits.

    A direct conversion of a palette shows the colours of transparent pixels, and Pillow cuts levels above 255
    off, which makes a 16-bit image white.
    """
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (_LEVELS,) * 4)
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(values: npt.NDArray[Any], mode: str) -> Pixels:
    """Return levels of 16 bits, of 32 bits up to 255 or more, or of floats up to 1 or 255, as 8 bits."""
    if mode == "F":
        if not np.isfinite(values).all() or values.min() < 0.0 or values.max() > _LEVELS:
            raise RequestError("a picture with float values must hold 0 to 1 or 0 to 255; scale it")
        scale = _LEVELS if values.max() <= 1.0 else 1
        return np.rint(values.astype(np.float64) * scale).astype(np.uint8)
    wide = values.astype(np.int64)
    if wide.min() < 0:
        raise RequestError("a picture has negative values; scale it to 0 to 255")
    if mode == "I" and wide.max() <= _LEVELS:
        return wide.astype(np.uint8)  # 32 bits state no range: levels of 8 bits that were widened
    return (wide >> (8 if wide.max() < 2**16 else 24)).astype(np.uint8)
