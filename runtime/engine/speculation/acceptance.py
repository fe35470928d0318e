"""Estimates of how likely proposed tokens are to be accepted."""

from __future__ import annotations

from dataclasses import field

from ....records import dataclass

_MEMORY = 16.0  # verified tokens that count, of one request
# If the first token of a proposal is rejected, the text may have changed: forget this share of the successes.
_FORGET_ON_MISS = 0.1
_SHARED_MEMORY = 256.0  # verified tokens that count, of all requests
_PRIOR = 0.6
_WEIGHT = 2.0  # of the prior, in verified tokens


@dataclass(slots=True)
class _Trials:
    """Decaying counts of verified tokens, and of accepted ones."""

    tried: float = 0.0
    accepted: float = 0.0

    def rate(self, prior: float) -> float:
        return (_WEIGHT * prior + self.accepted) / (_WEIGHT + self.tried)

    def discount(self) -> None:
        lost = _FORGET_ON_MISS * self.accepted
        self.tried, self.accepted = self.tried - lost, self.accepted - lost

    def observe(self, accepted: int, rejected: bool, memory: float) -> None:
        decay = (1.0 - 1.0 / memory) ** (accepted + rejected)
        self.tried = decay * self.tried + accepted + rejected
        self.accepted = decay * self.accepted + accepted


@dataclass(slots=True)
class Acceptance:
    """The probability that a proposed token is accepted if those before it were, by request and evidence.

    A new request starts with the rate of other requests with the same evidence. Tokens after a rejected one
    do not count.
    """

    _shared: dict[object, _Trials] = field(default_factory=dict)
    _own: dict[str, dict[object, _Trials]] = field(default_factory=dict)

    def rate(self, request_id: str, evidence: object) -> float:
        """Return the acceptance probability of a request's next proposed token."""
        shared = self._shared.get(evidence)
        rate = _PRIOR if shared is None else shared.rate(_PRIOR)
        own = self._own.get(request_id, {}).get(evidence)
        return rate if own is None else own.rate(rate)

    def observe(self, request_id: str, evidence: object, accepted: int, *, rejected: bool) -> None:
        """Learn from a verified proposal.

        Args:
            request_id: the request.
            evidence: what the proposer based the proposal on.
            accepted: number of accepted tokens.
            rejected: whether the token after these was rejected.
        """
        self._shared.setdefault(evidence, _Trials()).observe(accepted, rejected, _SHARED_MEMORY)
        own = self._own.setdefault(request_id, {})
        trials = own.setdefault(evidence, _Trials())
        if rejected and not accepted:
            trials.discount()
        trials.observe(accepted, rejected, _MEMORY)

    def forget(self, request_id: str) -> None:
        """Drop the counts of an ended request."""
        self._own.pop(request_id, None)
