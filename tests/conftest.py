"""Setup of all tests: signals and a separate cache."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# numpy reads it when it is imported, which other conftest files do. The threads of OpenBLAS spin while they
# wait: two processes on two cores took three to six times the time for matrices of tiny models.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Programs that tests start would compile carryall each time, for 0.9 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which ``make test`` ends in minutes."""
    parser.addoption(
        "--long-tests",
        type=int,
        default=1,
        metavar="N",
        help="run one in N of the long tests, others with each commit (default: all)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that are not this commit's."""
    share, commit = config.getoption("--long-tests"), _commit()
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        due = crc32(f"{commit} {item.nodeid}".encode()) % share == 0
        (kept if due or item.get_closest_marker("long") is None else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_report_header(config: pytest.Config) -> str:
    """Say which long tests run."""
    share = config.getoption("--long-tests")
    return f"long tests: one in {share}, by commit {_commit()}" if share > 1 else "long tests: all"


@cache
def _commit() -> str:
    """Return the commit of the source, "unknown" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def pytest_configure() -> None:
    """Set Python's default handler of SIGINT, which nohup and background jobs ignore; bound no times.

    On a machine with other load, hypothesis would refuse tests that take longer than it expects.
    """
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary cache, not that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYALL_CACHE", str(tmp_path_factory.getbasetemp() / "shared-cache"))
        yield


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restore the signal handlers: an interrupted command resets SIGINT, but the test process goes on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def seeds_of_sampling(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw the seeds of requests that name none from the name of the test.

    A statement about sampled text (a watermark is found, two answers differ) then fails always or never. The
    fixture ``monkeypatch`` is not used, since that would undo the patches of tests behind their own fixtures.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.randbits", Random(request.node.nodeid).getrandbits)
        yield


@pytest.fixture(autouse=True)
def generators_of_the_module(request: pytest.FixtureRequest) -> None:
    """Draw the numbers of a test's module from the name of the test.

    Most modules have one generator for all their tests: values would depend on the tests that ran before, and
    a bound that holds in a run of all could fail in a run of some.
    """
    from numpy.random import Generator, default_rng

    for value in vars(request.module).values():
        if isinstance(value, Generator):
            value.bit_generator.state = default_rng(crc32(request.node.nodeid.encode())).bit_generator.state


@pytest.fixture
def without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the library of CPU kernels from this process."""
    monkeypatch.setattr("carryall.providers.native.library.installed_library", lambda: tmp_path / "none")
    monkeypatch.setattr("carryall.providers.native.library.built_library", lambda: None)
