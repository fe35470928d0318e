"""What a package records of how pictures or sound become inputs, with every value written out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from ..storage.writing import writing


class ProcessorRecord:
    """The base of data classes that are the content of such a file, ``FILE``."""

    __slots__ = ()
    FILE: ClassVar[str]

    def write(self, folder: Path) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        path, content = folder / self.FILE, asdict(self)  # type: ignore[call-overload]
        with writing(path):
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def check_range(self, name: str, low: int, high: int) -> None:
        """Check that a field is an integer in [``low``, ``high``].

        Raises:
            ValueError: it is not.
        """
        value: Any = getattr(self, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"'{name}' must be an integer in [{low}, {high}], found {value!r}")
