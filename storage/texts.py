"""Read UTF-8 text files of users and models, with a size limit and one-line errors."""

from __future__ import annotations

from pathlib import Path

from ..errors import CarryallError, UsageError

MOST_BYTES = 64 << 20  # above any real file; stops endless files such as /dev/zero
_PIECE = 1 << 16


def read_text(path: Path, refuse: type[CarryallError] = UsageError, *, most: int = MOST_BYTES) -> str:
    """Return the content of a UTF-8 file.

    Args:
        path: a file, or a pipe.
        refuse: the class of the error to raise.
        most: the maximum size in bytes.

    Raises:
        CarryallError: of the class ``refuse``; the file cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = bytearray()
            while piece := file.read(_PIECE):  # ``read(most)`` would allocate ``most`` bytes
                content += piece
                if len(content) > most:
                    raise refuse(f"{path} cannot be read: it has more than {most} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refuse(f"{path} cannot be read: it is not UTF-8 text at byte {error.start}") from error
    except ValueError as error:  # a null byte in the name
        raise refuse(f"{str(path)!r} cannot be read: {error}") from error
