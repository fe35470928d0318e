"""How many tokens an engine holds and computes."""

from __future__ import annotations

from ...errors import UsageError
from ...providers.base import RunnerInfo
from ...records import dataclass
from .config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The limits of an engine, in tokens.

    Args:
        step: computed in one step.
        sequence: of one sequence, prompt and output together.
        kv: held by the KV memory; None if only the slots limit it.
        kv_budget: held by all slots together.
    """

    step: int
    sequence: int
    kv: int | None
    kv_budget: int

    @classmethod
    def of(cls, config: EngineConfig, info: RunnerInfo) -> TokenLimits:
        """Return the limits that the options and the runner set.

        Raises:
            UsageError: ``max_step_tokens`` is less than the slots need, or ``kv_bytes`` less than a state.
        """
        step, kv = _step_tokens(config, info), _kv_tokens(config, info)
        state = state_tokens(info) + encoder_tokens(info)
        if kv is not None and state and kv <= state:
            held = info.state_bytes + info.encoder_bytes
            raise UsageError(
                f"kv_bytes must be more than the {held} bytes of a sequence's state and of its encoder's rows"
            )
        every_slot = info.max_slots * info.context_length
        return cls(
            step=step,
            # The last generated token needs no KV.
            sequence=info.context_length if kv is None else min(info.context_length, kv + 1 - state),
            kv=kv,
            kv_budget=every_slot if kv is None else min(every_slot, kv),
        )


def state_tokens(info: RunnerInfo) -> int:
    """Return the size of a state in tokens of KV, rounded up; 0 if no layer has a state."""
    return -(-info.state_bytes // max(1, info.kv_bytes_per_token))


def encoder_tokens(info: RunnerInfo) -> int:
    """Return the size of the encoder's rows in tokens of KV, rounded up; 0 without cross-attention."""
    return -(-info.encoder_bytes // max(1, info.kv_bytes_per_token))


def _step_tokens(config: EngineConfig, info: RunnerInfo) -> int:
    """Return the maximum number of tokens of a step: each slot needs one."""
    if config.max_step_tokens is None:
        return max(info.step_tokens, info.max_slots)
    if config.max_step_tokens < info.max_slots:
        raise UsageError(
            f"max_step_tokens is {config.max_step_tokens}, less than the {info.max_slots} slots, "
            "each of which needs one token a step; raise max_step_tokens or lower max_slots"
        )
    return config.max_step_tokens


def _kv_tokens(config: EngineConfig, info: RunnerInfo) -> int | None:
    """Return the total number of tokens that fit into the KV memory; None if only the slots limit it."""
    if config.kv_bytes is None:
        return info.kv_tokens
    most = config.kv_bytes // max(1, info.kv_bytes_per_token)
    return most if info.kv_tokens is None else min(most, info.kv_tokens)
