"""The groups of layers that a decoder's memory consists of: what they hold, free, and can be resumed from.

Layers of a kind keep the same positions of a text: all of them (full attention), those of a window, or one
state of fixed size that sums up everything before it and cannot be cut (recurrent layers), or the rows of an
encoder, which no token changes (cross-attention). Layers that read the cache of another belong to its group,
whose window is then the widest of its readers. A runner states its groups in ``RunnerInfo.kv_groups``, and
whoever counts, frees or reuses memory asks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..records import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot can still give of its text.

    Args:
        tokens: number of tokens that were computed.
        trimmed: no prefix shorter than this can be resumed, since memory behind it was freed; 0 if none was.
        checkpoints: lengths at which states are kept besides the newest one, or will be.
    """

    tokens: int
    trimmed: int = 0
    checkpoints: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind.

    Args:
        bytes_per_token: bytes of a token in all layers of the group together.
    """

    bytes_per_token: int = 0

    @property
    def trim_step(self) -> int:
        """The number of tokens that can be freed at a time behind a length; 0 if none can."""
        return 0

    @property
    def reach(self) -> int:
        """The number of positions that a token sees, itself included; 0 is all."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of what has the same size for any number of tokens."""
        return 0

    def size(self, tokens: int) -> int:
        """Return the bytes of ``tokens`` tokens, if nothing was freed."""
        return tokens * self.bytes_per_token + self.fixed_bytes * (tokens > 0)

    def freed(self, length: int) -> int:
        """Return how many first tokens are freed if no token before position ``length`` will be computed."""
        return 0

    def resume_point(self, length: int, held: Held) -> int:
        """Return the longest prefix of at most ``length`` tokens from which ``held`` can be resumed."""
        return min(length, held.tokens)


@dataclass(frozen=True, slots=True)
class FullKV(KVGroup):
    """Layers whose tokens see all tokens before them."""


@dataclass(frozen=True, slots=True)
class WindowKV(KVGroup):
    """Layers whose tokens see the last ``window`` positions.

    Args:
        window: positions that a token sees, itself included.
        step: number of tokens that the memory frees at a time, a multiple of 64; 0 if it frees none.
    """

    window: int = 1
    step: int = 0

    @property
    def trim_step(self) -> int:
        return self.step

    @property
    def reach(self) -> int:
        return self.window

    def freed(self, length: int) -> int:
        """See ``KVGroup``. Position ``length`` itself sees ``window`` - 1 tokens before it."""
        return max(0, length + 1 - self.window) // self.step * self.step if self.step else 0

    def resume_point(self, length: int, held: Held) -> int:
        point = min(length, held.tokens)
        return point if point >= held.trimmed else 0


@dataclass(frozen=True, slots=True)
class StateKV(KVGroup):
    """Layers with a state of fixed size, which cannot be cut to fewer tokens.

    A slot has the newest state, and copies of earlier ones (checkpoints), each of the same size.

    Args:
        state_bytes: bytes of a state in all layers of the group together.
    """

    state_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.state_bytes

    def resume_point(self, length: int, held: Held) -> int:
        """See ``KVGroup``: the newest state, or the last checkpoint that is not too long."""
        points = [*held.checkpoints, held.tokens]
        return max((point for point in points if point <= min(length, held.tokens)), default=0)


@dataclass(frozen=True, slots=True)
class EncoderKV(KVGroup):
    """Cross-attention: keys and values of an encoder's rows, the same for all tokens of a text.

    Args:
        row_bytes: bytes of a row in all layers together.
        most_rows: rows of the longest encoder output.
    """

    row_bytes: int = 0
    most_rows: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.row_bytes * self.most_rows


KVGroups = tuple[KVGroup, ...]
# Tokens behind a sliding window that memories free at a time: several pages of slots, a multiple of every
# block size, and of the 64 positions that kernels read together even if a window ends between them.
TRIM_STEP = 256


def widest(windows: Iterable[int]) -> int:
    """Return the window that layers with these windows need together; 0 (all positions) if one has none."""
    needed = list(windows)
    return max(needed) if needed and all(needed) else 0


def window_groups(layers: Iterable[tuple[int, int]], step: int) -> KVGroups:
    """Return one group for each window of layers with attention, in the order of their first layers.

    Args:
        layers: window (0 for none) and bytes per token of each layer or cache.
        step: see ``WindowKV``.
    """
    sums = dict[int, int]()
    for window, size in layers:
        sums[window] = sums.get(window, 0) + size
    return tuple(WindowKV(size, window, step) if window else FullKV(size) for window, size in sums.items())


def resume_point(groups: KVGroups, length: int, held: Held) -> int:
    """Return the longest prefix of at most ``length`` tokens from which all groups can be resumed."""
    point = min((group.resume_point(length, held) for group in groups), default=min(length, held.tokens))
    return point if point == length else resume_point(groups, point, held)
