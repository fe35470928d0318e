"""How much each tenant was served: virtual token counters (Sheng et al., OSDI 2024, arXiv:2401.00588)."""

from __future__ import annotations

# A generated token costs more than one of a prompt, as in the paper (section 4.1).
OUTPUT_WEIGHT = 2.0
_MOST_IDLE = 1024


class VirtualCounters:
    """Service received by tenant. Whoever has received least is served next.

    A tenant that comes back after a pause is lifted to where the active ones are, so that it cannot save up
    service; one that was served beyond that keeps its debt.
    """

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._active: dict[str | None, int] = {}  # unfinished requests
        self._floor = 0.0  # the counter of whoever was chosen last

    def join(self, tenant: str | None) -> None:
        """Note another unfinished request."""
        if tenant not in self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str | None) -> None:
        """Note that a request is gone."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
        if len(self._served) > 2 * len(self._active) + _MOST_IDLE:
            self._forget()

    def chosen(self, tenant: str | None) -> None:
        """Note that this tenant's request was admitted."""
        self._floor = max(self._floor, self.served(tenant))

    def charge(self, tenant: str | None, cost: float) -> None:
        """Count service given."""
        self._served[tenant] = self.served(tenant) + cost

    def served(self, tenant: str | None) -> float:
        """Service received, in weighted tokens."""
        return self._served.get(tenant, self._floor)

    def _forget(self) -> None:
        """Drop pausing tenants that would be lifted anyway."""
        self._served = {t: n for t, n in self._served.items() if t in self._active or n > self._floor}
