"""The acceptance rule: how much of a draft the target keeps, and the token it adds.

At every row the target chooses its own token; a drafted token is accepted if it is that very token.  What is emitted is
therefore always the target's choice, and the drafter can only change how many of them come out of one pass.

Greedy: the choice is the argmax (arXiv 1811.03115).  With a temperature: the choice is a draw from the target's filtered
distribution p.  A greedy drafter's proposal x is a point mass, and this rule is in law the speculative-sampling rule for
it (arXiv 2211.17192, 2302.01318, with q(x) = 1): x is accepted with probability p(x), and a draw that is not x has the law
of p without x.  Draws depend on seed and position alone (`sampling.py`), so with a seed this holds token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(choose: Callable[[int], int], drafts: Sequence[int]) -> list[int]:
    """The tokens that one verified draft yields: the accepted drafts, then one token of the target's own.

    Args:
        choose: the target's choice at row j, which saw the anchor and the drafts before j; called for rows 0, 1, ... and
            for none behind the first that leaves the draft, so that no sampling is wasted.
        drafts: drafted tokens; may be empty.
    """
    tokens: list[int] = []
    for row, draft in enumerate(drafts):
        tokens.append(choose(row))
        if tokens[row] != draft:
            return tokens
    return [*tokens, choose(len(drafts))]
