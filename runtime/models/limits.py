"""What the machine can hold: threads and memory are compared with what is there before they are asked for."""

from __future__ import annotations

from ...errors import UsageError
from ...providers.base import RunnerInfo
from ...providers.host import machine
from ..engine.config import EngineConfig
from .model_source import SourceModel

THREADS_PER_CORE = 4  # more only wait for each other
_LEAST_TOKENS = 64  # of a slot; KV moves in pieces of as many
_FLOAT = 4  # bytes


def check_threads(num_threads: int) -> None:
    """Refuse more threads than could be of use.

    Raises:
        UsageError: there are more than four for each core.
    """
    cores = machine.usable_cores()
    if num_threads > THREADS_PER_CORE * cores:
        raise UsageError(
            f"num_threads is {num_threads}; at most {THREADS_PER_CORE * cores} are allowed here, "
            f"{THREADS_PER_CORE} for each of the {cores} cores that this process may use"
        )


def check_memory(source: SourceModel, max_slots: int, context_length: int) -> None:
    """Refuse slots and contexts that cannot fit, however short the sequences in them are.

    KV takes memory as sequences grow, so what is counted is the least: a short sequence in each slot, and
    tables for each position.

    Raises:
        UsageError: they need more than the memory that is available.
    """
    sizes = source.signature
    if sizes is None:  # the provider will say what is wrong with the graph
        return
    available, table = machine.memory()[1], sizes.head_dim * _FLOAT
    if context_length * table > available:
        raise UsageError(
            f"context_length {context_length} x {table} bytes of rotary tables is "
            f"{_in_words(context_length * table)}, and {_in_words(available)} of memory is available; "
            f"lower context_length to {available // table} or less"
        )
    tokens, token = min(context_length, _LEAST_TOKENS), sizes.kv_bytes_per_token
    slot = tokens * token + sizes.vocab_size * _FLOAT
    if max_slots * slot > available:
        raise UsageError(
            f"max_slots {max_slots} x ({tokens} tokens x {token} bytes of KV + {sizes.vocab_size} logits x "
            f"{_FLOAT} bytes) is {_in_words(max_slots * slot)}, and {_in_words(available)} of memory is "
            f"available; lower max_slots to {available // slot} or less"
        )


def check_budgets(config: EngineConfig, info: RunnerInfo) -> None:
    """Refuse budgets of host memory that the machine does not have.

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
