"""SplitMix64, a random number generator with random access.

Steele et al.: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014).
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """Mix the bits of a 64-bit number (the finalizer of SplitMix64)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(key: int, place: int) -> float:
    """Return number ``place`` of the stream ``key``, a multiple of 2**-53 in [0, 1)."""
    return (mix((key + (place + 1) * _GOLDEN_GAMMA) & _MASK) >> 11) * 2.0**-53
