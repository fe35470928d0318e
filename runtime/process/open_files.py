"""The number of files and connections that this process may open."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any

_log = logging.getLogger(__name__)

TOO_MANY = (errno.EMFILE, errno.ENFILE)
_WARNING_SECONDS = 60.0


def open_files_limit() -> int | None:
    """The number of files that this process may open; None where the system has no such limit."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raise the limit of open files as far as the system allows: each connection of a server is one."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS allows less than it states
        _log.debug("the limit of %s open files cannot be raised", open_files_limit())


def too_many_open(error: OSError) -> str:
    """What to do about an error, if it is that of too many open files; otherwise ""."""
    limit = open_files_limit()
    if error.errno not in TOO_MANY or limit is None:
        return ""
    return f"; this process may open {limit} files and connections: raise that, such as with 'ulimit -n 4096'"


def warn_of_refused_connections(loop: asyncio.AbstractEventLoop) -> None:
    """Log in one line that connections wait because too many files are open.

    ``asyncio`` tries again each second, and logs a traceback each time.
    """
    last = -_WARNING_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last
        error = context.get("exception")
        if not isinstance(error, OSError) or not (advice := too_many_open(error)):
            loop.default_exception_handler(context)
        elif time.monotonic() - last >= _WARNING_SECONDS:
            last = time.monotonic()
            _log.warning("new connections wait: %s%s", error.strerror, advice)

    loop.set_exception_handler(handle)
