"""Configure logging by environment variables.

Every module logs to ``logging.getLogger(__name__)``, so loggers have the names of packages, such as
``carryall.runtime.engine``. By default only warnings are shown:

    CARRYALL_LOG=debug                                  all records
    CARRYALL_LOG=runtime.engine=debug,providers=info    records of some packages
    CARRYALL_LOG_FORMAT=json                            one JSON object per line

Records contain ids of requests, and their text only with ``carryall serve --log-content``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from .errors import CarryallWarning, UsageError

LEVELS_VARIABLE, FORMAT_VARIABLE = "CARRYALL_LOG", "CARRYALL_LOG_FORMAT"
ROOT = "carryall"
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


# Facts of the current task, such as the id of a request, which JSON records have.
CONTEXT: ContextVar[Mapping[str, Any]] = ContextVar("log context", default={})  # noqa: B039 -- never changed


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (seconds since 1970), level, logger, message, and error if any.

    Further fields are those of the task (``CONTEXT``) and of the record (``extra={"fields": ...}``).
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line of JSON."""
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **CONTEXT.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current ``sys.stderr`` at each record, as ``logging.lastResort`` does."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def stream(self) -> object:
        """The current ``sys.stderr``."""
        return sys.stderr

    @stream.setter
    def stream(self, _: object) -> None:
        """Ignore the stream."""


def levels(text: str) -> Iterator[tuple[str, int]]:
    """Yield the loggers and levels of a value of ``CARRYALL_LOG``.

    Raises:
        UsageError: the value is invalid.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        room, equals, level = item.rpartition("=")
        if level.lower() not in _LEVELS or (equals and not room.replace("_", "").replace(".", "").isalnum()):
            raise UsageError(
                f"{LEVELS_VARIABLE} must be a level ({', '.join(_LEVELS)}) or PACKAGE=LEVEL,..., such as "
                f"runtime.engine=debug, not {item!r}"
            )
        name = room if room == ROOT or room.startswith(f"{ROOT}.") else ".".join(filter(None, (ROOT, room)))
        yield name, _LEVELS[level.lower()]


def configure(environment: Mapping[str, str] = os.environ) -> None:
    """Configure logging to stderr by the environment; without these variables nothing changes.

    Raises:
        UsageError: a variable has an invalid value.
    """
    asked = dict(levels(environment.get(LEVELS_VARIABLE, "")))
    form = environment.get(FORMAT_VARIABLE, "text")
    if form not in ("text", "json"):
        raise UsageError(f"{FORMAT_VARIABLE} must be text or json, not {form!r}")
    if not asked and form == "text":
        return
    handler = _Stderr()
    handler.setFormatter(JsonFormatter() if form == "json" else _utc(logging.Formatter(_FORM)))
    root = logging.getLogger(ROOT)
    root.handlers = [one for one in root.handlers if not isinstance(one, _Stderr)] + [handler]
    root.propagate = False
    for name, level in asked.items():
        logging.getLogger(name).setLevel(level)


def configure_at_import() -> None:
    """Call ``configure``; an invalid variable gives a warning, so that the import does not fail."""
    try:
        configure()
    except UsageError as error:
        warnings.warn(str(error), CarryallWarning, stacklevel=2)


def _utc(formatter: logging.Formatter) -> logging.Formatter:
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    return formatter
