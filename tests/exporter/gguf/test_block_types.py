from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from carryall.exporter.gguf.block_types import BY_NAME, TYPES
from carryall.exporter.gguf.blocks import LAYOUTS
from carryall.exporter.gguf.file import FLOATS


def test_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {number: tuple(kind) for number, kind in TYPES.items() if number in theirs} == theirs
    assert BY_NAME.keys() >= {*FLOATS, *LAYOUTS}
