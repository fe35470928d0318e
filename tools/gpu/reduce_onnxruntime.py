"""Reduce onnxruntime-gpu's CUDA provider to the code of one compute capability, so that it compresses well.

    python tools/gpu/reduce_onnxruntime.py libonnxruntime_providers_cuda.so 90

The payloads of other capabilities in the ELF section ``.nv_fatbin`` are overwritten by zeros; no offset
changes, so the library loads and runs as before on devices of the one capability. The layout of a fat binary
(magic, sizes of header and content; entries with kind, header size, payload size and, at byte 28, the
capability) was read from libraries of CUDA 13.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_MAGIC = 0xBA55ED50
_CAPABILITY = 28  # its offset in the header of an entry


def entries(library: mmap.mmap | bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (capability, offset of the payload, its size) of every entry of the fat binaries of an ELF file.

    Raises:
        ValueError: it is no 64-bit ELF file.
    """
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * size) for index in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length in headers:
        start = names + name
        if library[start : library.find(b"\0", start)] == b".nv_fatbin":
            yield from _of_section(library, offset, offset + length)


def _of_section(library: mmap.mmap | bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    while place + 16 <= end:
        if struct.unpack_from("<I", library, place)[0] != _MAGIC:
            place += 8
            continue
        header, content = struct.unpack_from("<HQ", library, place + 6)
        entry, last = place + header, place + header + content
        while entry < last:
            size, payload = struct.unpack_from("<IQ", library, entry + 4)
            yield struct.unpack_from("<I", library, entry + _CAPABILITY)[0], entry + size, payload
            entry += size + payload
        place = -(-last // 8) * 8


def reduce(library: Path, capability: int) -> dict[int, int]:
    """Overwrite the code of other capabilities in a library; return the bytes of code by capability.

    Args:
        library: ``libonnxruntime_providers_cuda.so``, changed in place.
        capability: 90 for compute capability 9.0.

    Raises:
        ValueError: it has no code for the capability; nothing was changed.
    """
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        found = list(entries(content))
        sizes = Counter[int]()
        for owner, _, size in found:
            sizes[owner] += size
        if capability not in sizes:
            raise ValueError(f"{library} has code for {sorted(sizes)}, not for {capability}")
        for owner, place, size in found:
            if owner != capability:
                content[place : place + size] = bytes(size)
    return dict(sizes)


if __name__ == "__main__":
    for owner, size in sorted(reduce(Path(sys.argv[1]), int(sys.argv[2])).items()):
        print(f"{owner / 10:.1f}: {size / 1e6:.1f} MB")
