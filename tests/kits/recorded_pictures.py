"""The picture whose pixels are recorded, in any size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def picture(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return [height, width, 3] with slopes, a curve and tiles, so that each step of resizing shows."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [
        (x * 7 + y * 3) % 256,
        (x * x // 5 + y * 11) % 256,
        ((x // 9 + y // 7) % 2) * 200 + (x % 50),
    ]
    return np.stack(channels, -1).astype(np.uint8)
