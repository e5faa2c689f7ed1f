"""One run over prompt sets, each prompt decoded in every mode, and the figures of that run.

Definitions.  A response's first token is the prefill's and counts nowhere but in its length: tau is the tokens committed
behind it per target pass behind the prefill, tok/s the same tokens per second of the same passes.  Speed-up is the ratio
of two modes' tok/s over the same prompts, which for identical responses is the ratio of their total decode times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.training.looping import is_looping

Decode = Callable[[Sequence[int]], Iterator[Step]]
Clock = Callable[[], float]


class Mode(StrEnum):
    """PLAIN: the target alone.  SPECULATIVE: with the drafter that is measured.  PROMPT_LOOKUP: with copied n-grams."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"
    PROMPT_LOOKUP = "prompt-lookup"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenised prompt; `index` counts within its kind."""

    kind: str
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Response:
    """What one mode made of one prompt; `cycles` are the target passes behind the prefill."""

    prefill: Step
    cycles: tuple[Step, ...]
    prefill_ms: float
    decode_ms: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        return sum((step.token_ids for step in (self.prefill, *self.cycles)), ())

    @property
    def decoded_tokens(self) -> int:
        return sum(len(step.token_ids) for step in self.cycles)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One prompt in all modes."""

    prompt: Prompt
    responses: Mapping[Mode, Response]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A response that is not plain decoding's: its first differing token, counted from the response's start."""

    kind: str
    index: int
    mode: Mode
    position: int


@dataclass(frozen=True, kw_only=True)
class ModeFigures:
    """One mode over some prompts; None where nothing was decoded, proposed or compared.

    uncertified_share: of the proposals chosen out of a candidate pool, those for which a token outside of it could have won.
    """

    tau: float | None
    acceptance_rate: float | None
    tokens_per_second: float | None
    prefill_ms: float
    speedup: float | None
    speedup_median: float | None
    terms_ms: TermsMs
    other_share: float | None
    uncertified_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All modes over some prompts.

    plain_step_ms: median of a plain pass, T(1); looping_share: plain responses whose end repeats itself.
    """

    prompts: int
    tokens: int
    modes: Mapping[Mode, ModeFigures]
    differences: tuple[Difference, ...]
    plain_step_ms: float | None
    looping_share: float

    @property
    def is_identical(self) -> bool:
        return not self.differences


def run(
    decoders: Mapping[Mode, Decode],
    prompts: Sequence[Prompt],
    *,
    warm_up: Sequence[int],
    clock: Clock = time.perf_counter,
    on_prompt: Callable[[Prompt], None] = lambda prompt: None,
) -> list[Result]:
    """Decode every prompt in every mode.

    Args:
        decoders: PLAIN among them; each gives the steps of one prompt.
        prompts: in the order in which they are run.
        warm_up: a prompt that every mode decodes first and that counts nowhere, since first passes allocate.
        clock: seconds.
        on_prompt: told before each prompt.
    """
    for decode in decoders.values():
        _respond(decode, warm_up, clock)
    modes = list(decoders)
    results = []
    for turn, prompt in enumerate(prompts):
        on_prompt(prompt)
        # Each mode is first, second, ... equally often: what drifts (heat, other processes) hits all alike.
        shift = turn % len(modes)
        responses = {mode: _respond(decoders[mode], prompt.token_ids, clock) for mode in (*modes[shift:], *modes[:shift])}
        results.append(Result(prompt=prompt, responses=responses))
    return results


def figures(results: Sequence[Result]) -> Figures:
    """The figures of some prompts' results; at least one."""
    plain = [result.responses[Mode.PLAIN] for result in results]
    modes = {mode: _mode_figures([result.responses[mode] for result in results], plain) for mode in results[0].responses}
    plain_steps = [step.terms_ms.total for response in plain for step in response.cycles]
    return Figures(
        prompts=len(results),
        tokens=sum(len(response.token_ids) for response in plain),
        modes=modes,
        differences=tuple(difference for result in results for difference in _differences(result)),
        plain_step_ms=median(plain_steps) if plain_steps else None,
        looping_share=sum(is_looping(response.token_ids) for response in plain) / len(plain),
    )


def figures_by_kind(results: Sequence[Result]) -> dict[str, Figures]:
    """Figures of each kind, in the order of first appearance."""
    kinds = dict.fromkeys(result.prompt.kind for result in results)
    return {kind: figures([result for result in results if result.prompt.kind == kind]) for kind in kinds}


def _respond(decode: Decode, prompt_ids: Sequence[int], clock: Clock) -> Response:
    started = clock()
    steps = decode(prompt_ids)
    prefill = next(steps)
    prefilled = clock()
    cycles = tuple(steps)
    return Response(prefill=prefill, cycles=cycles, prefill_ms=(prefilled - started) * 1e3, decode_ms=(clock() - prefilled) * 1e3)


def _mode_figures(responses: Sequence[Response], plain: Sequence[Response]) -> ModeFigures:
    cycles = [step for response in responses for step in response.cycles]
    rate, plain_rate = _rate(responses), _rate(plain)
    pairs = [(_rate([ours]), _rate([theirs])) for ours, theirs in zip(responses, plain, strict=True)]
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    return ModeFigures(
        tau=_ratio(sum(response.decoded_tokens for response in responses), len(cycles)),
        acceptance_rate=_ratio(sum(step.accepted for step in cycles), sum(step.proposed for step in cycles)),
        tokens_per_second=rate,
        prefill_ms=median(response.prefill_ms for response in responses),
        speedup=rate / plain_rate if rate is not None and plain_rate is not None else None,
        speedup_median=median(ratios) if ratios else None,
        terms_ms=_medians(cycles),
        other_share=_ratio(sum(step.terms_ms.other for step in cycles), sum(step.terms_ms.total for step in cycles)),
        uncertified_share=_ratio(sum(step.uncertified for step in cycles), sum(step.pooled for step in cycles)),
    )


def _rate(responses: Sequence[Response]) -> float | None:
    """Tokens per second behind the prefill, all responses together."""
    decoding = [response for response in responses if response.cycles]
    tokens = sum(response.decoded_tokens for response in decoding)
    return _ratio(1e3 * tokens, sum(response.decode_ms for response in decoding))


def _medians(cycles: Sequence[Step]) -> TermsMs:
    def of(term: Callable[[TermsMs], float]) -> float:
        return median(term(step.terms_ms) for step in cycles) if cycles else 0.0

    return TermsMs(
        draft=of(lambda terms: terms.draft), head=of(lambda terms: terms.head), verify=of(lambda t: t.verify), other=of(lambda t: t.other)
    )


def _ratio(amount: float, base: float) -> float | None:
    return amount / base if base else None


def _differences(result: Result) -> Iterator[Difference]:
    expected = result.responses[Mode.PLAIN].token_ids
    for mode, response in result.responses.items():
        found = response.token_ids
        if found != expected:
            common = (position for position, (ours, theirs) in enumerate(zip(found, expected, strict=False)) if ours != theirs)
            position = next(common, min(len(found), len(expected)))
            yield Difference(kind=result.prompt.kind, index=result.prompt.index, mode=mode, position=position)
