"""The memory that the processes of one model share; its layout is that of ``native/sources/ranks.h``."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import ExitStack
from pathlib import Path

from ...errors import ProviderRuntimeError
from ...storage.scratch import folder_beside, scratch_folder

VARIABLE = "CARRYALL_RANKS"  # names the file to the processes
_HEADER, _PLACE = struct.Struct("<IIQQI"), 128
_START, _ENDED = 64, 24  # bytes before the places; offset of the flag in the header
_MAGIC = 0x4B4E5231
_CAPACITY = 1 << 20  # bytes of a buffer: 256 tokens of 1,024 hidden values pass at once
_MEMORY_FILES = Path("/dev/shm")  # noqa: S108 -- files there are memory


class RanksMemory:
    """The shared memory of some ranks, in a file that is deleted once all have opened it.

    Args:
        count: number of ranks.
        patience: seconds that a rank waits for the others in a step.

    Raises:
        ProviderRuntimeError: the file cannot be made.
    """

    def __init__(self, count: int, patience: float) -> None:
        self._count = count
        memory = os.access(_MEMORY_FILES, os.W_OK)
        size = _START + count * (_PLACE + 2 * _CAPACITY)
        self._files = ExitStack()
        try:
            place = folder_beside(_MEMORY_FILES / "ranks", _MEMORY_FILES) if memory else scratch_folder()
            self.path = self._files.enter_context(place) / "ranks"
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "r+b") as file:
                file.write(bytes(size))  # a full disk must not end the ranks later
                file.flush()
                self._memory = mmap.mmap(handle, size)
        except OSError as error:
            self.unlink()
            raise ProviderRuntimeError(
                f"the ranks have no memory to share: {error.strerror}; they need {size:,} bytes in "
                f"{_MEMORY_FILES if memory else 'the folder of temporary files'}"
            ) from error
        self._memory[: _HEADER.size] = _HEADER.pack(_MAGIC, count, _CAPACITY, int(1000 * patience), 0)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the processes."""
        return {VARIABLE: str(self.path)}

    def in_step(self) -> bool:
        """Whether all ranks have run the same number of sums. Only while they wait for a call."""
        rounds = {
            struct.unpack_from("<Q", self._memory, _START + rank * _PLACE)[0] for rank in range(self._count)
        }
        return len(rounds) == 1

    def end(self) -> None:
        """Tell the ranks that one has ended, so that the others do not wait for it."""
        self._memory[_ENDED : _ENDED + 4] = struct.pack("<I", 1)

    def unlink(self) -> None:
        """Delete the file; the memory stays as long as a process has opened it."""
        self._files.close()

    def close(self) -> None:
        """Free the memory of this process."""
        self.unlink()
        self._memory.close()
