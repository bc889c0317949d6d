"""Token service of each tenant, and who has had too much of it (spec E5; VTC, Sheng et al., OSDI 2024).

Knows tenants, bands and counts. Knows nothing of deadlines or blocks.

A tenant's counter in a band grows with the prompt tokens computed and the tokens generated for it. Between two
tenants that both have work waiting, counters differ by at most the limit that is asked for and what the running
batch still adds; with a limit of up to max(w_in·L_in, w_out·M), for prompts of up to L_in tokens and M tokens in
the batch, service stays within the bound of VTC, 2·max(w_in·L_in, w_out·M). A tenant that comes back starts one
longest prompt below the least counter of those with work, or where it was: what it did not use is saved up only so
far.
"""

from __future__ import annotations

from collections import Counter, defaultdict

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""What a prompt token and a generated one count."""

CROWD = 3
"""Waiting requests of one tenant that may crowd others out; fewer are an even load's accidents."""


class TokenService:
    """Counters of every band; see above."""

    def __init__(self) -> None:
        self._longest: defaultdict[int, int] = defaultdict(int)  # prompt of each band so far
        self._served: dict[tuple[int, str], float] = {}
        self._work: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._level: dict[int, float] = {}  # what a band's last tenant had been served when it left

    def enter(self, band: int, tenant: str, prompt_tokens: int) -> None:
        """One more request of a tenant waits for its prompt to be computed."""
        self._longest[band] = max(self._longest[band], prompt_tokens)
        if not self._work[band][tenant]:
            least = self.least(band) - INPUT_WEIGHT * self._longest[band]
            self._served[band, tenant] = max(self._served.get((band, tenant), 0.0), least)
        self._work[band][tenant] += 1

    def leave(self, band: int, tenant: str) -> None:
        """One request fewer: computed, or gone."""
        work = self._work[band]
        work[tenant] -= 1
        if not work[tenant]:
            del work[tenant]
            if not work:
                self._level[band] = self._served[band, tenant]

    def charge(self, band: int, tenant: str, prompt_tokens: int, new_tokens: int) -> None:
        key = band, tenant
        added = INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * new_tokens
        self._served[key] = self._served.get(key, 0.0) + added

    def served(self, band: int, tenant: str) -> float:
        """Weighted tokens, from where the tenant was lifted to."""
        return self._served.get((band, tenant), 0.0)

    def least(self, band: int) -> float:
        """Of the tenants with work, the counter of the one that was served least."""
        return min((self._served[band, t] for t in self._work[band]), default=self._level.get(band, 0.0))

    def ahead(self, band: int, prompts: float) -> set[str]:
        """Tenants with work that were served `prompts` longest prompts more than another one with work."""
        if len(self._work[band]) < 2:
            return set()
        most = self.least(band) + prompts * INPUT_WEIGHT * self._longest[band]
        return {tenant for tenant in self._work[band] if self._served[band, tenant] > most}

    def crowding(self, band: int) -> set[str]:
        """Tenants with at least half of the requests that wait, and with `CROWD` of them, until they were served
        one longest prompt less than another one with work."""
        work = self._work[band]
        if len(work) < 2:
            return set()
        found = {tenant for tenant, waiting in work.items() if waiting >= CROWD and 2 * waiting >= work.total()}
        longest = INPUT_WEIGHT * self._longest[band]
        return {t for t in found if self._served[band, t] > self._least_of_others(band, t) - longest}

    def _least_of_others(self, band: int, tenant: str) -> float:
        return min(self._served[band, other] for other in self._work[band] if other != tenant)

    def spread(self, band: int) -> float:
        """How far the counters of tenants with work are apart."""
        served = [self._served[band, tenant] for tenant in self._work[band]]
        return max(served) - min(served) if served else 0.0
