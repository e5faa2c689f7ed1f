"""Telling an observer what happens, so that its failures end nothing but itself: who watches must not stop what is watched."""

from __future__ import annotations

import logging
from collections.abc import Callable

from domino_deploy.runtime.requests import Observer

logger = logging.getLogger(__name__)


class Telling:
    """Calls an observer, if there is one.

    Args:
        observer: whom to tell, or None.
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._has_failed = False

    def __call__(self, tell: Callable[[Observer], None]) -> None:
        """Tell it; of its errors the first is logged as one, the others only for debugging: there may be some in every cycle."""
        if self._observer is None:
            return
        try:
            tell(self._observer)
        except Exception:
            level = logging.DEBUG if self._has_failed else logging.ERROR
            logger.log(level, "the observer failed: from now on, its figures may be wrong", exc_info=True)
            self._has_failed = True
