"""A warning when drafts are hardly ever accepted (T-31 of the peer study): text stays right then, so nothing else would tell."""

from __future__ import annotations

import logging
from collections import deque

_LOG = logging.getLogger(__name__)

# Mean acceptance length.  The worst drafters that are of any use reach 1.3; one of another model, or of a broken graph, hardly leaves 1.
FLOOR = 1.05
# A few answers' worth: soon full, and one unlucky answer alone does not bring it below the floor.
WINDOW_DRAFTS = 256


class AcceptanceFloor:
    """Watches the mean acceptance length over the last `WINDOW_DRAFTS` drafts, and logs once each time that it falls below `FLOOR`."""

    def __init__(self) -> None:
        self._cycles: deque[tuple[int, int]] = deque()  # (drafts, accepted), those of the window
        self._drafts = self._accepted = 0
        self._was_below = False

    def observe(self, drafts: int, accepted: int) -> bool:
        """Take another cycle in; whether the mean is below the floor now (never before the window is full).

        Args:
            drafts: sequences that proposed at least one token.
            accepted: proposed tokens that were accepted.
        """
        if drafts == 0:
            return self._was_below
        self._cycles.append((drafts, accepted))
        self._drafts, self._accepted = self._drafts + drafts, self._accepted + accepted
        while self._drafts - self._cycles[0][0] >= WINDOW_DRAFTS:
            old_drafts, old_accepted = self._cycles.popleft()
            self._drafts, self._accepted = self._drafts - old_drafts, self._accepted - old_accepted
        if self._drafts < WINDOW_DRAFTS:
            return False
        length = 1 + self._accepted / self._drafts
        is_below = length < FLOOR
        if is_below and not self._was_below:
            _LOG.warning(
                "Expected a drafter whose proposals are accepted now and then, found a mean acceptance length of %.3f over the last %d "
                "drafts. Answers stay right, but drafting is wasted: check the pair with domino-deploy verify, or serve it with "
                "--no-speculation.",
                length,
                self._drafts,
            )
        self._was_below = is_below
        return is_below
