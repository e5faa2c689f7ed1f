"""Names of fields that bodies had and nobody knows: ignored, as clients send many, but told to the log, since one may be a slip."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from difflib import get_close_matches

from domino_deploy.server.problems import shown

_LOG = logging.getLogger(__name__)
# A client may make up as many as it likes: so many are remembered, and logged.
MAX_NAMES = 256


class UnknownFields:
    """Logs each name once, never a value; may be used by several threads."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def note(self, names: Collection[str], known: Collection[str], place: str = "") -> None:
        """Log those of `names` that were not logged before, with the one of `known` that was likely meant.

        place: what stands before them all, such as "stream_options.".
        """
        for name in names:
            text = shown(f"{place}{name}")
            with self._lock:
                if len(self._told) >= MAX_NAMES:
                    return
                if text in self._told:
                    continue
                self._told.add(text)
                end = ". Further names are not logged" if len(self._told) == MAX_NAMES else ""
            near = get_close_matches(text.strip('"').removeprefix(place), known, n=1)
            meant = f"; {place}{near[0]} may have been meant" if near else ""
            _LOG.info("Ignored the field %s of a request: there is none of this name%s%s", text, meant, end)
