"""What this machine's processor has, for tests of behaviour that depends on it."""

from __future__ import annotations

import pytest

from carryall.providers.host.machine import describe_machine

_FEATURES = set(describe_machine().features)
HAS_VNNI = not {"avx2"} & _FEATURES or bool({"avx_vnni", "avx512_vnni"} & _FEATURES)
needs_vnni = pytest.mark.skipif(not HAS_VNNI, reason="this x86 processor has no VNNI")
