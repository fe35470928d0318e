"""Check requested threads and memory against the machine before loading a model."""

from __future__ import annotations

from ...errors import UsageError
from ...providers.base import RunnerInfo
from ...providers.host import machine
from ..engine.config import EngineConfig
from .model_source import SourceModel

THREADS_PER_CORE = 4  # more threads only wait for each other
_MIN_TOKENS = 64  # per slot; KV is allocated in chunks of this many tokens
_FLOAT = 4  # bytes


def check_threads(num_threads: int) -> None:
    """Check the number of threads.

    Raises:
        UsageError: there are more than four threads for each core.
    """
    cores = machine.usable_cores()
    if num_threads > THREADS_PER_CORE * cores:
        raise UsageError(
            f"num_threads is {num_threads}; at most {THREADS_PER_CORE * cores} are allowed, "
            f"{THREADS_PER_CORE} for each of the {cores} cores that this process may use"
        )


def check_memory(source: SourceModel, max_slots: int, context_length: int) -> None:
    """Check that the minimum memory of slots and context is available.

    KV grows with its sequence, so only a minimum is counted: 64 tokens in each slot, and rotary tables for
    all positions.

    Raises:
        UsageError: the minimum exceeds the available memory.
    """
    sizes = source.facts.sizes
    if sizes is None:  # not a decoder: the provider reports what is wrong with the graph
        return
    available, table = machine.memory()[1], sizes.head_dim * _FLOAT
    if context_length * table > available:
        raise UsageError(
            f"context_length {context_length} x {table} bytes of rotary tables is "
            f"{_in_words(context_length * table)}, and {_in_words(available)} of memory is available; "
            f"lower context_length to {available // table} or less"
        )
    if (weights := source.unprepared_bytes) > machine.memory()[0]:
        raise UsageError(
            f"{source.name} has {_in_words(weights)} of weights, and this process may use "
            f"{_in_words(machine.memory()[0])} of memory; take a smaller model, or one with fewer bits"
        )
    tokens, token = min(context_length, _MIN_TOKENS), sizes.kv_bytes_per_token
    slot = tokens * token + sizes.vocab_size * _FLOAT
    if max_slots * slot > available:
        raise UsageError(
            f"max_slots {max_slots} x ({tokens} tokens x {token} bytes of KV + {sizes.vocab_size} logits x "
            f"{_FLOAT} bytes) is {_in_words(max_slots * slot)}, and {_in_words(available)} of memory is "
            f"available; lower max_slots to {available // slot} or less"
        )


def check_budgets(config: EngineConfig, info: RunnerInfo) -> None:
    """Check ``swap_bytes`` and ``kv_bytes`` against the memory of the machine.

    Raises:
        UsageError: they exceed the memory that this process may use.
    """
    total = machine.memory()[0]
    budgets = {"swap_bytes": config.swap_bytes}
    if info.kv_layout:  # KV lies in host memory
        budgets["kv_bytes"] = config.kv_bytes or 0
    asked = sum(budgets.values())
    if asked > total:
        terms = " + ".join(f"{name} {_in_words(size)}" for name, size in budgets.items() if size)
        raise UsageError(f"{terms} is more than the {_in_words(total)} of memory that this process may use")


def _in_words(size: int) -> str:
    for power, unit in ((15, "PB"), (12, "TB")):
        if size >= 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size / 1e9:.3g} GB"
