"""Hosts with their own addresses, processes and files of /tmp, made of Linux namespaces on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Networks of tests at the same time must differ.
_PREFIX = f"10.213.{os.getpid() % 250}."
_SECONDS = 60.0


class Host:
    """A host: an address in the network of a test, and processes and a /tmp of its own.

    Args:
        network: the name of the bridge that connects the hosts.
        number: the last part of the address.
    """

    def __init__(self, network: str, number: int) -> None:
        self.address = f"{_PREFIX}{number}"
        self._name, self._port = f"{network}-{number}", f"{network}p{number}"
        names = f"127.0.0.1 localhost\\n{self.address} {self._name}\\n"
        inside = f"""
            hostname {self._name}
            mount -t tmpfs tmpfs /tmp
            mount -t tmpfs tmpfs /dev/shm
            names=$(mktemp)
            printf '{names}' > "$names"
            mount --bind "$names" /etc/hosts
            exec bash -c 'while sleep 1; do :; done'
        """
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        _ip("netns", "add", self._name)
        _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _ip("link", "set", self._port, "master", network, "up")
        _ip("-n", self._name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", self._name, "link", "set", device, "up")
        # A test that is killed leaves no processes.
        command = ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._name, *spaces]
        self._outer = subprocess.Popen([*command, "sh", "-ec", inside])
        self._init = self._first_process()
        self._started: list[subprocess.Popen[str]] = []

    def _first_process(self) -> str:
        """The process with the number 1 of the host, once its /tmp is mounted."""
        listed = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            children = listed.read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text() == "bash\n":
                return children[0]
            time.sleep(0.05)
        raise TimeoutError(f"host {self._name} does not start")

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the host."""
        enter = ["nsenter", "--target", self._init, "--mount", "--uts", "--pid", "--net", "--"]
        process: subprocess.Popen[str] = subprocess.Popen([*enter, *command], text=True, **options)
        self._started.append(process)
        return process

    def run(self, *command: str | Path, **options: Any) -> str:
        """What a command on the host prints; fails if the command does."""
        with self.start(*command, stdout=subprocess.PIPE, **options) as process:
            out, _ = process.communicate(timeout=10 * _SECONDS)
        assert process.returncode == 0, out
        return out

    def processes(self, text: str) -> list[Path]:
        """The processes whose command line has a text, as folders of /proc."""
        space = _of_process(self._init, "pid")
        here = [path for path in Path("/proc").glob("[0-9]*") if _of_process(path.name, "pid") == space]
        return [path for path in here if text in _command_line(path)]

    def lose_power(self) -> None:
        """End the host: no packet and no process is left, and nobody is told."""
        if self._outer.poll() is not None:
            return
        _ip("link", "delete", self._port)
        self._outer.kill()  # --kill-child ends the first process, which ends all others
        ended: list[subprocess.Popen[Any]] = [self._outer, *self._started]
        for process in ended:
            process.wait(_SECONDS)
        _ip("netns", "delete", self._name)


@contextmanager
def network() -> Iterator[Network]:
    """A network that ends with its hosts; skips the test where namespaces cannot be made."""
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"hosts need Linux with iproute2 and util-linux: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    name = f"cy{os.getpid() % 100_000}"
    made = subprocess.run(
        ["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no bridge can be made: {made.stderr.strip()}")
    found = Network(name)
    try:
        _ip("address", "add", f"{_PREFIX}254/24", "dev", name)
        _ip("link", "set", name, "up")
        yield found
    finally:
        for host in found.hosts:
            host.lose_power()
        _ip("link", "delete", name)


class Network:
    """The hosts of a test, in the network of a bridge."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hosts: list[Host] = []

    def host(self) -> Host:
        """A new host."""
        made = Host(self.name, len(self.hosts) + 1)
        self.hosts.append(made)
        return made


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""


def _of_process(process: str, kind: str) -> str:
    """The namespace of a process."""
    try:
        return os.readlink(f"/proc/{process}/ns/{kind}")
    except OSError:  # it ended meanwhile
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
