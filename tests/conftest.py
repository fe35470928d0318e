"""What every test may rely on, wherever the suite is started."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Handle SIGINT as Python does by default: under nohup, or in a background job, it comes ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
