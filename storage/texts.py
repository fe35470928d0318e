"""Text files that a user or a model brings: UTF-8 of bounded size, or one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path

from ..errors import CarryallError, UsageError

MOST_BYTES = 64 << 20  # more than any configuration, template, schema or grammar; /dev/zero has no end
_PIECE = 1 << 16


def read_text(path: Path, refuse: type[CarryallError] = UsageError, *, most: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file.

    Args:
        path: a file, or a pipe.
        refuse: the error to raise.
        most: the number of bytes it may hold.

    Raises:
        CarryallError: of the class ``refuse``; the file cannot be read, is too large, or is no UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = bytearray()
            while piece := file.read(_PIECE):  # ``read(most)`` would reserve that much at once
                content += piece
                if len(content) > most:
                    raise refuse(f"{path} cannot be read: it holds more than {most} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise refuse(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise refuse(f"{path} cannot be read: it is no UTF-8 text, see its byte {error.start}") from error
    except ValueError as error:  # a null byte in the name
        raise refuse(f"{str(path)!r} cannot be read: {error}") from error
