"""Sizes and pixels of pictures as transformers' processor of LFM2-VL returns them.

``python tests/kits/lfm2_pixels.py``, with torch, torchvision and transformers, records them again.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from recorded_pictures import picture

CORPUS = Path(__file__).resolve().parents[1] / "corpora" / "images"
SIZES_FILE, PIXELS_FILE = CORPUS / "lfm2_vl_sizes.json", CORPUS / "lfm2_vl_pixels.npz"
PATCH = 8
SMALL: dict[str, Any] = {
    "encoder_patch_size": PATCH,
    "tile_size": 32,
    "min_image_tokens": 2,
    "max_image_tokens": 8,
    "max_pixels_tolerance": 1.5,
}
SMALL_SIZES = [(32, 48), (50, 90), (37, 70), (200, 33), (9, 150), (64, 64)]


def sizes() -> list[tuple[int, int]]:
    """Return heights and widths to record: those near the borders of all rules, and random ones."""
    rng = random.Random(0)
    edges = (1, 16, 31, 32, 48, 255, 256, 257, 511, 512, 513, 723, 724, 725, 1024, 1600)
    found = [(rng.choice(edges), rng.choice(edges)) for _ in range(60)]
    return found + [(rng.randint(1, 2200), rng.randint(1, 2200)) for _ in range(60)]


def values(patches: Any, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels [height, width, 3] of normalized patches [rows * columns, height * width * 3]."""
    cut = np.asarray(patches, np.float64).reshape(rows, columns, PATCH, PATCH, 3).transpose(0, 2, 1, 3, 4)
    return np.rint((cut.reshape(rows * PATCH, columns * PATCH, 3) + 1) * 127.5).astype(np.uint8)


def _record() -> None:
    from PIL import Image
    from transformers import Lfm2VlImageProcessor

    recorded = []
    large = Lfm2VlImageProcessor()
    for height, width in dict.fromkeys(sizes()):
        if max(height, width) > 200 * min(height, width):
            continue
        out = large(Image.fromarray(picture(height, width)), return_row_col_info=True, return_tensors="pt")
        grid = [int(np.ravel(out[name])[0]) for name in ("image_rows", "image_cols")]
        recorded.append([height, width, *grid, out["spatial_shapes"].tolist()])
    SIZES_FILE.write_text(json.dumps(recorded).replace("]], [", "]],\n[") + "\n", encoding="utf-8")
    arrays: dict[str, Any] = {}
    small = Lfm2VlImageProcessor(**SMALL)
    for height, width in SMALL_SIZES:
        out = small(Image.fromarray(picture(height, width)), return_tensors="pt")
        for number, (rows, columns) in enumerate(out["spatial_shapes"].tolist()):
            patches = out["pixel_values"][number, : rows * columns].numpy()
            arrays[f"{height}x{width}-{number}"] = values(patches, rows, columns)
    np.savez_compressed(PIXELS_FILE, **arrays)


if __name__ == "__main__":
    _record()
