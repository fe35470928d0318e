"""What this machine's processor has, for tests of behaviour that depends on it."""

from __future__ import annotations

import pytest

from carryall.providers.host.machine import has_exact_byte_sums

needs_vnni = pytest.mark.skipif(not has_exact_byte_sums(), reason="this x86 processor has no VNNI")
