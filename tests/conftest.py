"""What every test may rely on, wherever the suite is started."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Handle SIGINT as Python does by default: under nohup, or in a background job, it comes ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "shared-cache"))
        yield


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """An interrupted command ends the process and leaves SIGINT to the system; here the process goes on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
