"""Run tests under conditions of other machines.

    python tools/test_anywhere.py                          # all conditions: `make anywhere`
    python tools/test_anywhere.py --pick 2 --seed 7        # two conditions at random, as CI does
    python tools/test_anywhere.py read-only-home one-core -- tests/cli
    python tools/test_anywhere.py --list

Each condition runs pytest in a separate process, by default on the tests that depend on the machine most
(signals, files, caches) and on files of tests chosen at random by the seed; what is left after ``--seconds``
is skipped. A condition that this machine cannot create (no root, no namespaces) is reported as skipped. The
exit code is 0 if every run passed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KITS = ROOT / "tests/kits"
NOBODY = 65534
# Tests of what differs most between machines.
CORE = (
    "tests/storage",
    "tests/storage/test_cache.py",
    "tests/runtime/engine/kv/tiers/test_tiers.py",
    "tests/cli/test_full_disk.py",
    "tests/cli/test_signals.py",
)
RANDOM_FILES = 6
_ENGINE = tuple(
    f"tests/runtime/engine/{room}" for room in ("requests", "sampling", "schedule", "speculation")
)


@dataclass(frozen=True)
class Run:
    """One pytest process: the interpreter, the command's prefix, its options, and its environment.

    ``tests`` are run instead of files chosen at random, where some files state what the condition takes away.
    """

    python: str = sys.executable
    prefix: Sequence[str] = ()
    options: Sequence[str] = ("-n", "2")
    environment: dict[str, str] = field(default_factory=dict)
    ignore_interrupts: bool = False
    folder: Path = ROOT
    tests: Sequence[str] = ()


class ImpossibleError(Exception):
    """This machine cannot create the condition."""


def interrupts_ignored(scratch: Path) -> list[Run]:
    """SIGINT is ignored and children inherit that, as under nohup or in a background job."""
    return [Run(ignore_interrupts=True)]


def another_user(scratch: Path) -> list[Run]:
    """A user without root's privileges and with a separate home."""
    home = _owned_folder(scratch)
    return [Run(sys.executable, _as_nobody(), (*_OWN_CACHES, "-n", "2"), _environment(home))]


def read_only_home(scratch: Path) -> list[Run]:
    """A home in which nothing can be created."""
    temporary = _owned_folder(scratch)
    home = scratch / "home"
    home.mkdir(mode=0o555)
    prefix = _as_nobody() if os.geteuid() == 0 else ()  # root may write anywhere
    return [
        Run(sys.executable, prefix, (*_OWN_CACHES, "-n", "2"), {**_environment(temporary), "HOME": str(home)})
    ]


def one_core(scratch: Path) -> list[Run]:
    """A machine with a single core."""
    if not shutil.which("taskset"):
        raise ImpossibleError("needs taskset")
    return [Run(prefix=("taskset", "--cpu-list", "0"), options=("-n", "1"))]


def no_xdist(scratch: Path) -> list[Run]:
    """All tests in one process, without pytest-xdist."""
    return [Run(options=("-p", "no:xdist"))]


def random_order(scratch: Path) -> list[Run]:
    """Tests in random order; the seed is that of --seed."""
    return [Run(options=("-n", "2", "-p", "random_order"))]


def twice_at_once(scratch: Path) -> list[Run]:
    """Two runs of one checkout at the same time."""
    return [Run(options=("-n", "1")), Run(options=("-n", "1"))]


def old_cache(scratch: Path) -> list[Run]:
    """A cache of an older version: foreign files, damaged entries, unknown kinds."""
    cache = scratch / "cache"
    for kind in ("lowered", "exported", "something-else"):
        entry = cache / kind / ("0" * 32)
        entry.mkdir(parents=True)
        (entry / "entry.json").write_text("{ not json")
        (entry / "model.onnx").write_bytes(b"\x00" * 100)
    (cache / "lowered" / "a file").write_text("no folder")
    return [Run(environment={"CARRYALL_CACHE": str(cache)})]


def no_network(scratch: Path) -> list[Run]:
    """A network namespace with only its own loopback."""
    prefix = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    if not shutil.which("unshare") or not shutil.which("ip"):
        raise ImpossibleError("needs unshare and ip")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        raise ImpossibleError("network namespaces are not permitted here")
    return [Run(prefix=prefix)]


def no_kernels(scratch: Path) -> list[Run]:
    """A checkout without CPU kernels, and no compiler that could build them."""
    checkout = scratch / "checkout"
    left_out = shutil.ignore_patterns("built", "build", ".git", ".venv*", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    programs = scratch / "programs"
    programs.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for path in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if not re.search(r"(cc|\+\+|clang)(-[0-9.]+)?$", path.name):
                with contextlib.suppress(FileExistsError):
                    (programs / path.name).symlink_to(path)
    hidden = scratch / "hidden"  # ziglang of the environment
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['ziglang'] = None\n")
    paths = (hidden, checkout / "tests/kits", checkout / "src")
    environment = {
        "PATH": str(programs),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CARRYALL_CACHE": str(scratch / "cache"),
    }
    return [Run(environment=environment, folder=checkout, tests=(*CORE, *_ENGINE))]


def slow_disk(scratch: Path) -> list[Run]:
    """A disk that reads and writes 20 MB a second, and files that are not in memory."""
    group = Path("/sys/fs/cgroup/blkio/carryall-slow-disk")
    disk = os.stat(ROOT).st_dev
    try:
        group.mkdir(exist_ok=True)
        for kind in ("read", "write"):
            limit = f"{os.major(disk)}:{os.minor(disk)} {20 << 20}"
            (group / f"blkio.throttle.{kind}_bps_device").write_text(limit)
    except OSError as error:
        raise ImpossibleError(f"needs root and a blkio control group: {error}") from error
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
    prefix = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    return [Run(prefix=prefix)]


def other_pythons(scratch: Path) -> list[Run]:
    """Newer versions of Python, each with an environment of its own."""
    versions = ("3.12", "3.13", "3.14")
    pythons = [path for version in versions if (path := _interpreter(version)) is not None]
    if not pythons:
        raise ImpossibleError(f"found none of Python {', '.join(versions)} in PATH or in ~/.pyenv/versions")
    runs = []
    for number, python in enumerate(pythons):
        environment = scratch / f"environment{number}"
        subprocess.run([python, "-m", "venv", environment], check=True)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[test]")
        subprocess.run([environment / "bin/python", *install], cwd=ROOT, check=True)
        runs.append(Run(str(environment / "bin/python"), options=("-n", "1")))
    return runs


def _interpreter(version: str) -> str | None:
    """Return an interpreter of a version of Python that starts; a shim of pyenv may not."""
    installed = Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3")
    paths = [shutil.which(f"python{version}"), *map(str, installed)]
    starts = (path for path in paths if path and not subprocess.run([path, "-c", ""], check=False).returncode)
    return next(starts, None)


CONDITIONS: dict[str, Callable[[Path], list[Run]]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        interrupts_ignored,
        another_user,
        read_only_home,
        one_core,
        no_xdist,
        random_order,
        twice_at_once,
        old_cache,
        no_network,
        no_kernels,
        slow_disk,
        other_pythons,
    )
}
INSTALLING = ("other-pythons",)  # conditions that take minutes to create; --pick leaves them out
_OWN_CACHES = ("-p", "no:cacheprovider")


def _as_nobody() -> tuple[str, ...]:
    """Return the prefix of a command that drops root's privileges: another user, or a user namespace."""
    ways = (
        ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        ("unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--"),
    )
    # The other user must be able to execute the interpreter: its folder may be readable only by root.
    check = [sys.executable, "-c", "import os, sys; sys.exit(not os.access(sys.executable, os.X_OK))"]
    for way in ways:
        if (
            shutil.which(way[0])
            and not subprocess.run([*way, *check], capture_output=True, check=False).returncode
        ):
            return way
    raise ImpossibleError("neither setpriv nor a user namespace lets another user run this interpreter")


def _owned_folder(scratch: Path) -> Path:
    folder = scratch / "nobody"
    folder.mkdir()
    folder.chmod(0o777)
    scratch.chmod(0o755)
    return folder


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
    }


def chosen_tests(seed: int) -> list[str]:
    """Return the tests of every run, and files chosen at random."""
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    others = [name for name in files if not name.startswith(CORE)]
    return [*CORE, *random.Random(seed).sample(others, RANDOM_FILES)]


def start(run: Run, arguments: Sequence[str], seed: int, seconds: float) -> subprocess.Popen[bytes]:
    """Start pytest under a condition."""
    environment = {
        **os.environ,
        "CARRYALL_TEST_SEED": str(seed),
        "CARRYALL_TEST_SECONDS": str(seconds),
        "PYTHONPATH": str(KITS),
        **run.environment,
    }
    options = ("-q", "-p", "time_limit", *run.options)
    command = [*run.prefix, run.python, "-m", "pytest", *options, *arguments]

    def prepare() -> None:
        if run.ignore_interrupts:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    return subprocess.Popen(command, cwd=run.folder, env=environment, preexec_fn=prepare)


def main() -> int:
    """Run the conditions and print the result of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help="conditions to run; default all")
    parser.add_argument("--list", action="store_true", help="list the conditions and exit")
    parser.add_argument("--pick", type=int, help="number of conditions to run, chosen at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a run skips what is left")
    own, after = sys.argv[1:], []
    if "--" in own:
        own, after = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.list:
        for name, made in CONDITIONS.items():
            print(f"{name:20} {made.__doc__}")
        return 0
    chosen = options.conditions or list(CONDITIONS)
    if unknown := set(chosen) - set(CONDITIONS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CONDITIONS)}")
    if options.pick is not None:
        quick = [name for name in chosen if name not in INSTALLING]
        chosen = random.Random(options.seed).sample(quick, options.pick)
    print(f"seed {options.seed}: {', '.join(chosen)}", flush=True)
    failed = [name for name in chosen if not passes(name, after, options.seed, options.seconds)]
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} conditions passed"
        + f"; failed: {failed}" * bool(failed)
    )
    return int(bool(failed))


def passes(name: str, arguments: Sequence[str], seed: int, seconds: float) -> bool:
    """Return whether all runs of one condition passed; a skipped one passes.

    Without arguments the run's own tests are run, else those of every run and files chosen at random.
    """
    with tempfile.TemporaryDirectory(prefix="carryall-", ignore_cleanup_errors=True) as scratch:
        try:
            runs = CONDITIONS[name](Path(scratch))
        except ImpossibleError as reason:
            print(f"== {name}: skipped, {reason}", flush=True)
            return True
        tests = [arguments or run.tests or chosen_tests(seed) for run in runs]
        print(f"== {name}: {' '.join(tests[0])}", flush=True)
        started = [start(run, own, seed, seconds) for run, own in zip(runs, tests, strict=True)]
        codes = [process.wait() for process in started]
    return not any(codes)


if __name__ == "__main__":
    sys.exit(main())
