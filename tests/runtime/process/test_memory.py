"""An error of too little memory says what to do."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from carryall.runtime.process.memory import memory_exhausted

NO_MEMORY = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
UNLIMITED = "; end other programs, or take a smaller or quantized model"


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY, reason="this shell has a limit"
)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_MEMORY, "the memory of this process is exhausted: [Errno 12] Cannot allocate memory"),
        (MemoryError(), "the memory of this process is exhausted"),
        (
            ImportError("x.so: failed to map segment from shared object"),
            "a library cannot be loaded, since the memory of this process is exhausted: "
            "x.so: failed to map segment from shared object",
        ),
    ],
)
def test_without_a_limit_other_programs_or_the_model_take_it(error: Exception, words: str) -> None:
    assert memory_exhausted(error) == words + UNLIMITED


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ImportError("no x"), ValueError("12")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert memory_exhausted(error) == ""


def test_a_limit_of_addresses_is_named() -> None:
    code = (
        "import mmap, resource as r\n"
        "from carryall.runtime.process.memory import memory_exhausted\n"
        "r.setrlimit(r.RLIMIT_AS, (10**9, r.RLIM_INFINITY))\n"
        "try: mmap.mmap(-1, 1 << 30)\n"
        "except OSError as error: print(memory_exhausted(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "the memory of this process is exhausted: [Errno 12] Cannot allocate memory; "
        "it may map 1.0 GB: raise that, such as with 'ulimit -v unlimited'"
    )
