"""Service received by each tenant: virtual token counters (Sheng et al., OSDI 2024, arXiv:2401.00588)."""

from __future__ import annotations

# A generated token costs twice a prompt token, as in the paper (section 4.1).
OUTPUT_WEIGHT = 2.0
_MAX_IDLE_TENANTS = 1024


class VirtualCounters:
    """Weighted tokens served to each tenant; the tenant with the smallest counter is served next.

    The counter of a tenant that returns after a pause is raised to the largest counter at an admission, so
    that no tenant saves up service. A larger counter stays as it is.
    """

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._active: dict[str | None, int] = {}  # unfinished requests
        self._floor = 0.0  # the largest counter at an admission

    def join(self, tenant: str | None) -> None:
        """Count another unfinished request of a tenant."""
        if tenant not in self._active:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str | None) -> None:
        """Count a request of a tenant as gone."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
        if len(self._served) > 2 * len(self._active) + _MAX_IDLE_TENANTS:
            self._forget()

    def chosen(self, tenant: str | None) -> None:
        """Note that a request of this tenant was admitted."""
        self._floor = max(self._floor, self.served(tenant))

    def charge(self, tenant: str | None, cost: float) -> None:
        """Add weighted tokens to a tenant's counter."""
        self._served[tenant] = self.served(tenant) + cost

    def served(self, tenant: str | None) -> float:
        """Return a tenant's counter, in weighted tokens."""
        return self._served.get(tenant, self._floor)

    def _forget(self) -> None:
        """Drop inactive tenants whose counter would be raised anyway."""
        self._served = {t: n for t, n in self._served.items() if t in self._active or n > self._floor}
