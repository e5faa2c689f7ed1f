"""Sequences written down in advance, run alone or over the slots of a pair: both must say the same of every one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from domino_deploy.runtime.protocols import Drafter, FloatArray, SlotCycle, SlotPair, Target, Verified


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to one sequence, whatever its logits say.

    prompt: its tokens; pieces: rows of each prefill; cycles: (tokens to draft, share of the verified rows to keep) of each;
    anchors: the token behind the prompt and behind each cycle; with_drafter: whether the drafter is kept in step.
    """

    prompt: tuple[int, ...]
    pieces: tuple[int, ...]
    cycles: tuple[tuple[int, float], ...]
    anchors: tuple[int, ...]
    with_drafter: bool = True


@dataclass
class Record:
    """What was said of a sequence: logits of each prefill [rows, V], and drafts and logits [drafts + 1, V] of each cycle."""

    prefills: list[FloatArray] = field(default_factory=list)
    cycles: list[tuple[list[int], FloatArray]] = field(default_factory=list)


def random_script(
    rng: np.random.Generator, max_proposals: int, *, longest: int = 90, largest_piece: int = 64, cycles: int = 6, vocab_size: int = 290
) -> Script:
    """A prompt of up to `longest` tokens in pieces, then cycles that draft, do not draft, or never do."""
    length = int(rng.integers(1, longest + 1))
    pieces: list[int] = []
    while sum(pieces) < length:
        pieces.append(min(int(rng.integers(1, largest_piece + 1)), length - sum(pieces)))
    with_drafter = bool(rng.random() < 0.8)
    counts = rng.integers(0, max_proposals + 1, cycles) * (rng.random(cycles) < 0.7) * with_drafter
    return Script(
        prompt=tuple(rng.integers(3, vocab_size, length).tolist()),
        pieces=tuple(pieces),
        cycles=tuple(zip(counts.tolist(), rng.random(cycles).tolist(), strict=True)),
        anchors=tuple(rng.integers(3, vocab_size, cycles + 1).tolist()),
        with_drafter=with_drafter,
    )


def kept_rows(drafts: Sequence[int], share: float) -> int:
    """At least the anchor's row."""
    return 1 + int(share * (len(drafts) + 1 - 1e-9))


def run_alone(target: Target, drafter: Drafter | None, script: Script) -> Record:
    """The script with the parts of one sequence."""
    target.reset()
    if drafter is not None:
        drafter.reset()
    record, tokens, features = Record(), [], []
    for rows in script.pieces:
        piece = script.prompt[len(tokens) : len(tokens) + rows]
        found = target.forward(piece, rows)
        record.prefills.append(found.logits.copy())
        features.append(found.features.copy())
        target.commit(rows)
        tokens += piece
    tokens.append(script.anchors[0])
    for (count, share), anchor in zip(script.cycles, script.anchors[1:], strict=True):
        drafts: list[int] = []
        if count and drafter is not None:
            drafts = drafter.propose(tokens, np.concatenate(features), count).token_ids.tolist()
            features = []
        found = target.forward([tokens[-1], *drafts], len(drafts) + 1)
        record.cycles.append((drafts, found.logits.copy()))
        kept = kept_rows(drafts, share)
        features.append(found.features[:kept].copy())
        target.commit(kept)
        tokens += [*drafts[: kept - 1], anchor]
    return record


@dataclass
class _Running:
    script: Script
    slot: int
    tokens: list[int] = field(default_factory=list)
    record: Record = field(default_factory=Record)

    @property
    def in_prompt(self) -> bool:
        return len(self.record.prefills) < len(self.script.pieces)

    @property
    def is_done(self) -> bool:
        return len(self.record.cycles) == len(self.script.cycles)

    def prefill(self, pair: SlotPair) -> None:
        script, done = self.script, len(self.tokens)
        rows = script.pieces[len(self.record.prefills)]
        piece = script.prompt[done : done + rows]
        num_logits = rows if pair.gives_prompt_logits else 1
        logits = pair.prefill(self.slot, piece, num_logits=num_logits, with_drafter=script.with_drafter)
        self.record.prefills.append(logits.copy())
        self.tokens += piece
        if not self.in_prompt:
            self.tokens.append(script.anchors[0])

    def next_cycle(self) -> SlotCycle:
        count, _ = self.script.cycles[len(self.record.cycles)]
        return SlotCycle(slot=self.slot, token_ids=self.tokens, count=count, with_drafter=self.script.with_drafter)

    def take(self, verified: Verified) -> int:
        """Note a cycle; the rows to commit."""
        assert verified.logits is not None
        done, drafts = len(self.record.cycles), verified.proposal.token_ids.tolist()
        kept = kept_rows(drafts, self.script.cycles[done][1])
        self.record.cycles.append((drafts, verified.logits.copy()))
        self.tokens = [*self.tokens, *drafts[: kept - 1], self.script.anchors[done + 1]]
        return kept


def run_together(pair: SlotPair, scripts: Sequence[Script], rng: np.random.Generator) -> list[Record]:
    """All scripts over the slots of a pair, in an order drawn at random: who joins, whose prompt goes on, who is in a cycle."""
    waiting, running, all_of_them = [*scripts], [], []
    free = [*range(pair.num_slots)]
    while waiting or running:
        if waiting and free and rng.random() < 0.5:
            slot = free.pop(int(rng.integers(len(free))))
            pair.truncate(slot, 0)
            running.append(_Running(waiting.pop(0), slot))
            all_of_them.append(running[-1])
        prompts = [sequence for sequence in running if sequence.in_prompt]
        if prompts:
            prompts[int(rng.integers(len(prompts)))].prefill(pair)
        decoding = [sequence for sequence in running if not sequence.in_prompt and rng.random() < 0.8]
        rng.shuffle(decoding)  # type: ignore[arg-type]  # a list will do
        if decoding:
            verified = pair.cycle([sequence.next_cycle() for sequence in decoding])
            pair.commit([sequence.take(its) for sequence, its in zip(decoding, verified.sequences, strict=True)])
        for sequence in [sequence for sequence in running if sequence.is_done]:
            running.remove(sequence)
            free.append(sequence.slot)
            if rng.random() < 0.5:  # the others keep their rows until the slot is wanted again
                pair.truncate(sequence.slot, 0)
    return [sequence.record for sequence in all_of_them]


def assert_same(found: Record, expected: Record, *, atol: float) -> None:
    """The same drafts, and logits that differ by at most `atol`; of prompts, those of as many last rows as were found."""
    assert [drafts for drafts, _ in found.cycles] == [drafts for drafts, _ in expected.cycles]
    logits = [*found.prefills, *(rows for _, rows in found.cycles)]
    prefills = [theirs[-len(its) :] for its, theirs in zip(found.prefills, expected.prefills, strict=True)]
    wanted = [*prefills, *(rows for _, rows in expected.cycles)]
    for one, other in zip(logits, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)
