"""How many tokens to draft in the coming cycle: as many as give the most tokens per millisecond, none if plain decoding does.

A cycle of B sequences and w drafts each commits sum_i E_i(w) tokens, E_i(w) = 1 + sum_{k<=w} prod_{j<=k} p_ij with p_ij the chance
that the target takes proposal j of sequence i once it took those before (arXiv 2211.17192, section 3.1, with a chance per
position), and takes T(B, w) milliseconds (`cycle_costs.py`).  Everything follows from the cycles observed: no clock, no randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from operator import truediv

from domino_deploy.runtime.cycle_costs import CycleCosts, calibrate
from domino_deploy.runtime.protocols import TermsMs
from domino_deploy.runtime.requests import CycleRecord

# What is forgotten per cycle: a sequence's own past within some 30 cycles, everybody's within some 100.
_OWN_DECAY = 0.97
_COMMON_DECAY = 0.99
# Cycles that the expectation weighs against what was seen.
_OWN_PRIOR_WEIGHT = 8.0
_COMMON_PRIOR_WEIGHT = 8.0
# Before anything was seen: good enough that drafting is tried.
_FIRST_CHANCE = 0.7
# However long everything was accepted, or nothing: odds must be to be had.
_LEAST_CHANCE = 1e-6
# How far a sequence that was better than the others at one position, in odds, is expected to be so at the next: half way, by logarithms.
_STAYS_BETTER = 0.5
# Another width must promise this much more than the present one, so that noise does not change it every cycle.
_BETTER_BY = 1.03
# Drafting must promise so much more than plain decoding: of two ways that are as good, estimates choose the one that luck flattered.
_WORTH = 1.08
# Cycles that a drafter's catching up must pay for itself in; sequences come and go, and with them what was expected of them.
_STRETCH_CYCLES = 16
# A probe is so many cycles: one may be unlucky.
_PROBE_CYCLES = 3
# Loss that probes may cause, as a share of the time: so much of what could be gained were every draft accepted, the other figure at most.
# It shrinks to a quarter while they keep finding nothing.
_PROBE_SHARE_OF_GAIN = 0.004
_MOST_PROBE_SHARE = 0.006
_MOST_PATIENCE = 4
_FEWEST_CYCLES_BETWEEN_PROBES = 16


class Reason(StrEnum):
    """Why a width was chosen.  All but FIXED, PAYS and SPECULATION_PROBE go with plain decoding."""

    FIXED = "fixed"
    PAYS = "pays"
    SPECULATION_PROBE = "speculation_probe"
    PLAIN_PROBE = "plain_probe"
    LOW_ACCEPTANCE = "low_acceptance"
    COSTLY_BATCH = "costly_batch"
    OTHERS_JOIN = "others_join"
    NOT_WANTED = "not_wanted"


class AcceptanceHistory:
    """How often one sequence's proposals were accepted, by position, old cycles fading.

    limit: drafts it can use in the coming cycle, set by who schedules it; None for no limit of its own.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._counts = _Counts(_OWN_DECAY)
        # What was asked for last, and of which common chances and how many drafts: in plain decoding nothing of it changes.
        self._expected: tuple[Sequence[float], int, list[float]] | None = None

    def record(self, proposed: int, accepted: int) -> None:
        """Take in one cycle: the first `accepted` of `proposed` tokens were accepted, the next one was not."""
        if not proposed:
            return
        self._expected = None
        self._counts.fade()
        for position in range(min(accepted + 1, proposed)):
            self._counts.add(position, reached=1.0, accepted=float(position < accepted))

    def usable(self, width: int) -> int:
        """Drafts of a cycle of that width that are this sequence's."""
        return width if self.limit is None else min(width, self.limit)

    def expected_tokens(self, common: Sequence[float], width: int) -> list[float]:
        """Tokens that a cycle with 0, 1, ..., `width` drafts is expected to commit.

        Args:
            common: chances by position over all sequences, strictly between 0 and 1; at least `width`, and never changed.
        """
        usable = self.usable(width)
        if self._expected is None or self._expected[0] is not common or self._expected[1] != usable:
            self._expected = common, usable, self._committed(common, usable)
        tokens = self._expected[2]
        return tokens + tokens[-1:] * (width + 1 - len(tokens))

    def _committed(self, common: Sequence[float], drafts: int) -> list[float]:
        tokens, survives, better = [1.0], 1.0, 1.0
        for position in range(drafts):
            # What is expected where it was not yet, or seldom.
            odds = better**_STAYS_BETTER * _odds(common[position])
            chance = self._counts.chance(position, odds / (1 + odds), _OWN_PRIOR_WEIGHT)
            better = _odds(chance) / _odds(common[position])
            survives *= chance
            tokens.append(tokens[-1] + survives)
        return tokens


def _committed_at_most(histories: Sequence[AcceptanceHistory], width: int, plain_sequences: int) -> list[int]:
    """Tokens of a cycle with 0, 1, ..., `width` drafts, all of them accepted."""
    return [plain_sequences + sum(history.usable(drafts) + 1 for history in histories) for drafts in range(width + 1)]


def _odds(chance: float) -> float:
    """Of a chance strictly between 0 and 1, as the estimates are."""
    return chance / (1 - chance)


class _Counts:
    """Proposals by position that were reached (all before them accepted), and those accepted; both fade."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._reached: list[float] = []
        self._accepted: list[float] = []

    def fade(self) -> None:
        self._reached = [count * self._decay for count in self._reached]
        self._accepted = [count * self._decay for count in self._accepted]

    def add(self, position: int, *, reached: float, accepted: float) -> None:
        while len(self._reached) <= position:
            self._reached.append(0.0)
            self._accepted.append(0.0)
        self._reached[position] += reached
        self._accepted[position] += accepted

    def chance(self, position: int, expected: float, weight: float) -> float:
        """Accepted among reached, shrunken towards an expectation that counts as `weight` proposals."""
        if position >= len(self._reached):
            return expected
        chance = (self._accepted[position] + weight * expected) / (self._reached[position] + weight)
        return min(max(chance, _LEAST_CHANCE), 1 - _LEAST_CHANCE)


@dataclass
class _Probe:
    """Some cycles in the other way of decoding, and what came of them; `rate_to_beat` in tokens per millisecond."""

    is_plain: bool
    rate_to_beat: float
    cycles_left: int = _PROBE_CYCLES
    tokens: int = 0
    milliseconds: float = 0.0

    @property
    def pays(self) -> bool:
        return self.tokens > self.rate_to_beat * self.milliseconds


class SpeculationController:
    """Chooses the width of every cycle.

    Args:
        max_width: drafts per sequence at most.
        adaptive: False for always as many as are wanted, which is also what an adaptive one gives until it is calibrated.
    """

    def __init__(self, max_width: int, *, adaptive: bool = True) -> None:
        self.max_width = max_width
        self.adaptive = adaptive
        self.last_reason = Reason.NOT_WANTED
        self._costs: CycleCosts | None = None
        self._common = _Counts(_COMMON_DECAY)
        self._chances: tuple[float, ...] | None = None  # of `_common`, until a cycle drafts
        self._settled: int | None = None
        self._probe: _Probe | None = None
        self._is_probe_cycle = False
        self._patience = 1
        self._since_probe_ms = 0.0
        self._cycles_since_probe = 0

    def calibrate(self, run: Callable[[int, int], TermsMs], batches: Sequence[int]) -> None:
        """Measure what cycles cost.

        Args:
            run: one cycle of so many sequences with so many drafts each, and its times.
            batches: numbers of sequences to measure, at least one; others are interpolated.
        """
        if self.adaptive and self.max_width:
            self._costs = calibrate(run, batches, self.max_width)

    def width(self, histories: Sequence[AcceptanceHistory], *, plain_sequences: int = 0, joining: int = 0, waiting_rows: int = 0) -> int:
        """Drafts per sequence in the coming cycle, 0 for plain decoding; `last_reason` says why.

        Args:
            histories: of the sequences that may speculate.
            plain_sequences: how many others are in the cycle.
            joining: requests whose prompts are run between the coming cycles; they wait for every one of them.
            waiting_rows: rows that the drafter has to take in first, if these sequences draft.
        """
        most = max((history.usable(self.max_width) for history in histories), default=0)
        if most <= 0:
            self.last_reason = Reason.NOT_WANTED
            return 0
        if self._costs is None:
            self.last_reason = Reason.FIXED
            return most
        batch = len(histories) + plain_sequences
        catch_up = [0.0, *(self._costs.catch_up_ms(waiting_rows, len(histories), width) for width in range(1, most + 1))]
        in_step = [self._costs.ms(batch, width) for width in range(most + 1)]
        tokens = self._expected_tokens(histories, most, plain_sequences)
        newcomers = [0.0, *map(self._costs.newcomers_ms, tokens[1:])]
        costs = [ms + first_ms / _STRETCH_CYCLES + later_ms for ms, first_ms, later_ms in zip(in_step, catch_up, newcomers, strict=True)]
        rates = [amount / cost for amount, cost in zip(tokens, costs, strict=True)]
        # A cycle that keeps others from joining costs what all of them together would commit in its time.
        joined_rate = (batch + joining) / self._costs.ms(batch + joining, 0)
        if joining and joined_rate > max(rates):
            width = max(range(most + 1), key=lambda width: tokens[width] - joined_rate * costs[width])
            self.last_reason = Reason.PAYS if width else Reason.OTHERS_JOIN
            return width
        chosen = self._best([rates[0], *(rate / _WORTH for rate in rates[1:])])
        other = max(range(1, most + 1), key=rates.__getitem__) if chosen == 0 else 0
        # What drafting in step could be over plain decoding, were everything accepted: probes may find no more.
        ideal = max(map(truediv, _committed_at_most(histories, most, plain_sequences), in_step)) / rates[0] if chosen == 0 else inf
        loss_ms = _PROBE_CYCLES * (in_step[other] - tokens[other] / rates[chosen]) + catch_up[other]
        share = min(_MOST_PROBE_SHARE, _PROBE_SHARE_OF_GAIN * (ideal - 1))
        if self._goes_to_probe(other, loss_ms=loss_ms, share=share, rate=rates[chosen]):
            self.last_reason = Reason.SPECULATION_PROBE if other else Reason.PLAIN_PROBE
            return other
        if chosen:
            self.last_reason = Reason.PAYS
        else:
            self.last_reason = Reason.LOW_ACCEPTANCE if ideal > _WORTH else Reason.COSTLY_BATCH
        return chosen

    def observe(self, record: CycleRecord) -> None:
        """Take in a cycle that ran."""
        spent_ms = in_step_ms = record.terms_ms.total
        if self._costs is not None:
            width = record.width if record.drafts else 0
            in_step_ms = self._costs.add(
                record.batch, width, spent_ms, waiting_rows=record.waiting_rows, sequences=record.drafts, tokens=record.tokens
            )
            in_step_ms += self._costs.newcomers_ms(record.tokens) if width else 0.0
        if record.drafts:
            self._chances = None
            self._common.fade()
            for position, (reached, accepted) in enumerate(zip(record.reached_per_position, record.accepted_per_position, strict=True)):
                self._common.add(position, reached=reached, accepted=accepted)
        self._since_probe_ms += spent_ms
        self._cycles_since_probe += 1
        if self._probe is not None and self._is_probe_cycle:
            self._follow(self._probe, record.tokens, in_step_ms)
        self._is_probe_cycle = False

    def _expected_tokens(self, histories: Sequence[AcceptanceHistory], most: int, plain_sequences: int) -> list[float]:
        if self._chances is None:
            common = [_FIRST_CHANCE]
            for position in range(self.max_width):
                common.append(self._common.chance(position, common[-1], _COMMON_PRIOR_WEIGHT))
            self._chances = tuple(common[1:])
        chances = self._chances
        columns = zip(*(history.expected_tokens(chances, most) for history in histories), strict=True)
        return [sum(column) + plain_sequences for column in columns]

    def _best(self, rates: Sequence[float]) -> int:
        """The width with the highest rate, or the present one if it is as good."""
        best = max(range(len(rates)), key=rates.__getitem__)
        if self._settled is not None and self._settled < len(rates) and rates[self._settled] * _BETTER_BY >= rates[best]:
            best = self._settled
        if self._settled is None or bool(best) != bool(self._settled):
            self._probe, self._patience, self._since_probe_ms, self._cycles_since_probe = None, 1, 0.0, 0
        self._settled = best
        return best

    def _goes_to_probe(self, other: int, *, loss_ms: float, share: float, rate: float) -> bool:
        """Whether this cycle tries the other way of decoding: a probe goes on, or the time since the last one has paid for one."""
        if self._probe is None:
            is_due = self._cycles_since_probe >= _FEWEST_CYCLES_BETWEEN_PROBES * self._patience
            if not is_due or share * self._since_probe_ms < loss_ms * self._patience:
                return False
            self._probe = _Probe(is_plain=other == 0, rate_to_beat=rate * _WORTH)
        self._is_probe_cycle = True
        return True

    def _follow(self, probe: _Probe, tokens: int, milliseconds: float) -> None:
        """Count a probe's cycle; at its end, one of drafting that paid goes on until the estimates agree or it no longer pays."""
        probe.cycles_left -= 1
        probe.tokens += tokens
        probe.milliseconds += milliseconds
        if probe.cycles_left:
            return
        self._since_probe_ms, self._cycles_since_probe = 0.0, 0
        if probe.pays and not probe.is_plain:
            self._probe = _Probe(is_plain=False, rate_to_beat=probe.rate_to_beat)
        else:
            self._probe = None
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
