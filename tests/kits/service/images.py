"""Images of containers without a daemon or a registry: buildah, on base images made of Debian's packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hosts import Host
from own_environment import environments

ROOT = Path(__file__).resolve().parents[3]
_SUITE = "bookworm"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# What CPython's extension modules link to.
_LIBRARIES = "ca-certificates,libsqlite3-0,libreadline8,libncursesw6,libssl3,libffi8,liblzma5,libbz2-1.0"
_SECONDS = 1800


@contextmanager
def builder() -> Iterator[Builder]:
    """A builder of images; skips the test where none can be built."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"building images needs Debian's packages {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can build images without a daemon")
    folder = Path(
        tempfile.mkdtemp(prefix="carryall-images-", dir="/var/tmp")
    )  # hosts have a /tmp of their own
    made = Builder(folder)
    try:
        yield made
    finally:
        made.close()


class Builder:
    """Builds and mounts images.

    Args:
        folder: where images are kept; removed at the end.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self, dockerfile: Path) -> str:
        """Build the image of a Dockerfile as it is, with the repository as context; return its name."""
        (version,) = set(re.findall(r"^FROM python:([\d.]+)", dockerfile.read_text(), re.MULTILINE))
        name = dockerfile.name.lower()
        self._base(version, packages="", name=f"python:{version}-slim")
        self._base(version, packages="g++", name=f"python:{version}")
        options = ["--isolation", "chroot", "--format", "docker", "--pull-never"]
        options += [
            "--ignorefile",
            str(ROOT / ".dockerignore"),
            "-f",
            str(dockerfile),
            "-t",
            dockerfile.name.lower(),
        ]
        self._run("bud", *options, str(ROOT))
        return name

    def _base(self, version: str, *, packages: str, name: str) -> None:
        """Make a base image: Debian, and Python in /usr/local as in Docker's official images."""
        container = self._run("from", "scratch").strip()
        self._run("add", "-q", container, str(_debian(packages)))
        self._run("add", "-q", container, str(_python(version)), "/usr/local")
        for command in ("ldconfig", "python3 -m ensurepip", "ln -sf pip3 /usr/local/bin/pip",
                        "ln -sf python3 /usr/local/bin/python"):  # fmt: skip
            self._run("run", "--isolation", "chroot", container, "--", "sh", "-c", command)
        self._run("commit", "-q", container, name)
        self._run("rm", container)

    @contextmanager
    def mounted(self, image: str) -> Iterator[Image]:
        """The files of an image, and how its container starts."""
        container = self._run("from", "--pull-never", image).strip()
        try:
            found = json.loads(self._run("inspect", "--type", "container", container))
            yield Image(Path(self._run("mount", container).strip()), found["Docker"]["config"])
        finally:
            self._run("rm", container)

    def close(self) -> None:
        """Remove all images."""
        self._run("rm", "--all")
        self._run("rmi", "--all", "--force")
        shutil.rmtree(self._folder)

    def _run(self, *command: str) -> str:
        store = ["--root", str(self._folder / "store"), "--runroot", str(self._folder / "run")]
        done = subprocess.run(
            ["buildah", *store, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, "TMPDIR": str(self._folder)},
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout


def _debian(packages: str) -> Path:
    """The archive of a small Debian with packages; skips the test if it cannot be fetched."""
    archive = environments() / f"{_SUITE}{'-' + packages if packages else ''}.tar"
    if archive.exists():
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        include = f"--include={_LIBRARIES}{',' + packages if packages else ''}"
        command = ["debootstrap", "--variant=minbase", include, _SUITE, scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        if done.returncode:
            pytest.skip(f"debootstrap cannot make a base image: {done.stdout[-300:]}")
        shutil.rmtree(f"{scratch}/var/cache/apt")
        if _CERTIFICATES.exists():  # a network with a certificate authority of its own
            shutil.copy(_CERTIFICATES, f"{scratch}{_CERTIFICATES}")
            Path(scratch, "etc/pip.conf").write_text(f"[global]\ncert = {_CERTIFICATES}\n")
        unfinished = archive.with_suffix(".unfinished")
        subprocess.run(["tar", "-C", scratch, "-cf", unfinished, "."], check=True)
        unfinished.rename(archive)
    return archive


def _python(version: str) -> Path:
    """The archive of this machine's Python of a version, without packages; skips the test without it."""
    archive = environments() / f"python-{version}.tar"
    if archive.exists():
        return archive
    # Those of pyenv and of uv need no other place than their own.
    folders = [*Path.home().glob(f".pyenv/versions/{version}*")]
    folders += Path.home().glob(f".local/share/uv/python/cpython-{version}*")
    if not folders:
        pytest.skip(f"neither pyenv nor uv has a Python {version}")
    prefix = folders[0]
    patterns = ("*/site-packages/*", "__pycache__", "*/test", "config-*", "bin/pip*")
    without = [f"--exclude={pattern}" for pattern in patterns]
    subprocess.run(["tar", "-C", prefix, *without, "-cf", archive, "bin", "lib", "include"], check=True)
    return archive


class Image:
    """A mounted image.

    Args:
        root: its files.
        config: its configuration by Docker's names.
    """

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self.root, self.config = root, config

    def megabytes(self) -> int:
        """The size of the files."""
        return int(subprocess.check_output(["du", "-sm", self.root], text=True).split()[0])

    def prepare(self, host: Host) -> None:
        """Mount the files on a host as compose.yaml does: read-only but for /tmp and the volumes."""
        commands = [
            "mount --bind {0} {0}",
            "mount -o remount,bind,ro {0}",
            "mount -t proc proc {0}/proc",
            "mount --rbind /dev {0}/dev",
            "mount -t tmpfs -o mode=1777 tmpfs {0}/tmp",
        ]
        # A new named volume has the owner that the folder has in the image.
        for volume in self.config["Volumes"] or {}:
            owner = (self.root / volume.lstrip("/")).stat().st_uid
            commands.append(f"mount -t tmpfs -o uid={owner} tmpfs {{0}}{volume}")
        host.run("sh", "-ec", "\n".join(commands).format(self.root))

    def start(self, host: Host, *arguments: str, entry: Sequence[str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a prepared host, as the image's user and without privileges.

        Args:
            host: the host.
            arguments: the arguments of the entry point; none are the image's own.
            entry: another program than the image's entry point.
        """
        user = self.config["User"]
        limits = ["setpriv", "--no-new-privs", "chroot", f"--userspec={user}:{user}", str(self.root)]
        command = [
            *(entry or self.config["Entrypoint"]),
            *(arguments or (() if entry else self.config["Cmd"])),
        ]
        variables = ["env", "-i", "HOME=/tmp", *self.config["Env"]]
        return host.start(*limits, *variables, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
