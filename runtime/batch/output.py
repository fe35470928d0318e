"""Results on disk: appended as they come, resumable, and under their final name only when complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ...errors import OutputExistsError, UsageError


class ResultFile:
    """Results of a run, one JSON object a line.

    They are appended to `TARGET.partial`, which is renamed when the run is complete. A cut can only tear the
    last line, which `resume` drops.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._partial = target.with_name(target.name + ".partial")
        self._mode: Literal["wb", "ab"] = "wb"

    def start(self, *, overwrite: bool) -> None:
        """Make sure that `open` may start anew.

        Raises:
            OutputExistsError: there are results already, and ``overwrite`` is not set.
            UsageError: there is no folder for them.
        """
        if not self._target.parent.is_dir():
            raise UsageError(f"{self._target.parent} is no folder; make it first")
        if not overwrite and self._target.exists():
            raise OutputExistsError(
                f"{self._target} exists; --overwrite replaces it, --resume adds what is missing"
            )
        if not overwrite and self._partial.exists():
            raise OutputExistsError(
                f"{self._partial} is an unfinished run; --resume goes on, --overwrite starts anew"
            )
        self._mode = "wb"

    def resume(self) -> set[str]:
        """Keep the results that succeeded, drop failed ones and a torn last line; return the kept custom_ids.

        Raises:
            UsageError: the file does not hold results.
        """
        source = self._partial if self._partial.exists() else self._target
        if not source.exists():
            self.start(overwrite=False)
            return set()
        finished: set[str] = set()
        self._mode = "ab"
        kept = self._partial.with_name(self._partial.name + ".new")
        with source.open("rb") as before, kept.open("wb") as after:
            for number, line in enumerate(before, start=1):
                if line.endswith(b"\n") and (custom_id := _succeeded(source, number, line)) is not None:
                    finished.add(custom_id)
                    after.write(line)
        kept.replace(self._partial)
        return finished

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Write results, after `start` or `resume`; leaving without an error gives them their final name."""
        with self._partial.open(self._mode) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        self._partial.replace(self._target)


def write_result(stream: BinaryIO, record: dict[str, Any]) -> None:
    """Append one result and hand it to the operating system."""
    stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    stream.flush()


def _succeeded(path: Path, number: int, line: bytes) -> str | None:
    """Return the custom_id of a result, or None if it reports an error."""
    try:
        record = json.loads(line)
        failed, custom_id = record["error"] is not None, record["custom_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot resume: line {number} of {path} is not a batch result") from error
    return None if failed else str(custom_id)
