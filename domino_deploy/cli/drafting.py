"""How many tokens a cycle drafts, asked for by --num-speculative-tokens, held against what the source of proposals offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.cli.console import progress
from domino_deploy.errors import OutOfRangeError
from domino_deploy.runtime.prompt_lookup import MAX_PROPOSALS
from domino_deploy.runtime.requests import speculation_problems
from domino_deploy.runtime.session import DrafterChoice, Session


def most_proposals(bundle: Bundle, choice: DrafterChoice) -> int:
    """Tokens per cycle that there are at most; engines may be built for fewer."""
    if choice is DrafterChoice.NONE:
        return 0
    return MAX_PROPOSALS if choice is DrafterChoice.PROMPT_LOOKUP else bundle.drafter.num_proposals


def check_count(wanted: int | None, *, most: int) -> None:
    """Hold a number that is meant as it is, not as an upper limit, against what there is.

    Raises:
        OutOfRangeError: more than that.
    """
    problems = {} if wanted is None else speculation_problems(wanted, max_proposals=most)
    if problems:
        raise OutOfRangeError(problems, "Correct it, or choose another drafter.")


def check_count_for(bundle: Path, choice: DrafterChoice, wanted: int | None) -> None:
    """The same before anything is loaded; errors as `open_bundle`'s, too."""
    if wanted is not None:
        check_count(wanted, most=most_proposals(open_bundle(bundle), choice))


def open_session(ctx: click.Context, bundle: Path, wanted: int | None, *, drafter: DrafterChoice, **opening: Any) -> Session:
    """`Session.open`, told as progress, for a drafter that offers as many tokens as are wanted; errors as there and above."""
    check_count_for(bundle, drafter, wanted)
    with progress(ctx) as step:
        step(f"Opening {bundle}")
        session = Session.open(bundle, drafter=drafter, **opening)
    try:
        check_count(wanted, most=0 if session.drafter is None else session.drafter.max_proposals)  # engines may be built for fewer
    except OutOfRangeError:
        session.close()
        raise
    return session
