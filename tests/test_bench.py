"""The benchmark's arithmetic on scripted steps and a clock that is moved by hand, and its reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from domino_deploy.bench import machine, measure, report
from domino_deploy.bench.measure import Difference, Mode, Prompt
from domino_deploy.bench.settings import Settings
from domino_deploy.runtime.protocols import Step, TermsMs
from domino_deploy.training.looping import is_looping

PLAIN, OURS, LOOKUP = Mode.PLAIN, Mode.SPECULATIVE, Mode.PROMPT_LOOKUP


class Clock:
    """Seconds that pass only when a script says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """A mode that answers each prompt with the given (seconds, step) pairs; remembers its prompts and their order."""

    def __init__(
        self, mode: Mode, clock: Clock, log: list[tuple[Mode, tuple[int, ...]]], answers: dict[tuple[int, ...], list[tuple[float, Step]]]
    ) -> None:
        self.mode, self.clock, self.log, self.answers = mode, clock, log, answers

    def __call__(self, prompt_ids: Sequence[int]) -> Iterator[Step]:
        self.log.append((self.mode, tuple(prompt_ids)))
        for seconds, step in self.answers[tuple(prompt_ids)]:
            self.clock.now += seconds
            yield step


def step(*token_ids: int, proposed: int = 0, accepted: int = 0, terms: tuple[float, float, float, float] = (0, 0, 0, 0)) -> Step:
    draft, head, verify, other = terms
    return Step(
        token_ids=token_ids, proposed=proposed, accepted=accepted, terms_ms=TermsMs(draft=draft, head=head, verify=verify, other=other)
    )


WARM_UP = (99,)
IDLE = {WARM_UP: [(1000.0, step(0))]}
# Prompt A (kind x): five tokens; plain 4 cycles of 0.5 s; speculative 2 cycles, 1 s in all; lookup 3 cycles, 2 s.
# Prompt B (kind y): three tokens; plain 2 cycles of 0.5 s; speculative 1 cycle of 1.25 s; lookup 2 cycles, 1 s.
A, B = (1, 2), (3,)
SCRIPTS: dict[Mode, dict[tuple[int, ...], list[tuple[float, Step]]]] = {
    PLAIN: {
        A: [(0.25, step(10)), *[(0.5, step(token, terms=(0, 0, 480, 20))) for token in (11, 12, 13, 14)]],
        B: [(0.125, step(20)), (0.5, step(21, terms=(0, 0, 400, 100))), (0.5, step(22, terms=(0, 0, 460, 40)))],
    },
    OURS: {
        A: [
            (0.5, step(10)),
            (0.75, step(11, 12, 13, proposed=4, accepted=2, terms=(100, 20, 600, 30))),
            (0.25, step(14, proposed=1, accepted=1, terms=(50, 10, 180, 10))),
        ],
        B: [(0.25, step(20)), (1.25, step(21, 22, proposed=3, accepted=1, terms=(60, 30, 1100, 60)))],
    },
    LOOKUP: {
        A: [(0.25, step(10)), (0.5, step(11)), (1.0, step(12, 13, proposed=2, accepted=1)), (0.5, step(14))],
        B: [(0.25, step(20)), (0.5, step(21)), (0.5, step(22))],
    },
}
PROMPTS = [Prompt(kind="x", index=0, token_ids=A), Prompt(kind="y", index=0, token_ids=B)]


def results_of(
    scripts: dict[Mode, dict[tuple[int, ...], list[tuple[float, Step]]]], prompts: Sequence[Prompt] = PROMPTS
) -> list[measure.Result]:
    clock, log = Clock(), []
    decoders = {mode: Scripted(mode, clock, log, answers | IDLE) for mode, answers in scripts.items()}
    return measure.run(decoders, prompts, warm_up=WARM_UP, clock=clock)


def with_change(
    mode: Mode, prompt: tuple[int, ...], answer: list[tuple[float, Step]]
) -> dict[Mode, dict[tuple[int, ...], list[tuple[float, Step]]]]:
    return SCRIPTS | {mode: SCRIPTS[mode] | {prompt: answer}}


class TestRun:
    def test_every_mode_warms_up_and_then_takes_turns_at_being_first(self) -> None:
        clock, log, told = Clock(), [], []
        decoders = {mode: Scripted(mode, clock, log, answers | IDLE) for mode, answers in SCRIPTS.items()}
        measure.run(decoders, [*PROMPTS, *PROMPTS], warm_up=WARM_UP, clock=clock, on_prompt=told.append)
        expected = [(PLAIN, WARM_UP), (OURS, WARM_UP), (LOOKUP, WARM_UP)]
        expected += [
            (PLAIN, A),
            (OURS, A),
            (LOOKUP, A),
            (OURS, B),
            (LOOKUP, B),
            (PLAIN, B),
            (LOOKUP, A),
            (PLAIN, A),
            (OURS, A),
            (PLAIN, B),
            (OURS, B),
            (LOOKUP, B),
        ]
        assert log == expected
        assert told == [*PROMPTS, *PROMPTS]

    def test_prefill_and_decoding_are_timed_apart(self) -> None:
        first, second = results_of(SCRIPTS)
        assert [(first.responses[mode].prefill_ms, first.responses[mode].decode_ms) for mode in SCRIPTS] == [
            (250, 2000),
            (500, 1000),
            (250, 2000),
        ]
        assert [(second.responses[mode].prefill_ms, second.responses[mode].decode_ms) for mode in SCRIPTS] == [
            (125, 1000),
            (250, 1250),
            (250, 1000),
        ]

    def test_responses_hold_all_tokens_in_order(self) -> None:
        first, second = results_of(SCRIPTS)
        assert {response.token_ids for response in first.responses.values()} == {(10, 11, 12, 13, 14)}
        assert {response.token_ids for response in second.responses.values()} == {(20, 21, 22)}


class TestFigures:
    def test_tau_is_tokens_per_pass_behind_the_prefill(self) -> None:
        modes = measure.figures(results_of(SCRIPTS)).modes
        assert modes[PLAIN].tau == 1.0
        assert modes[OURS].tau == (3 + 1 + 2) / 3
        assert modes[LOOKUP].tau == 6 / 5  # passes without a proposal count too

    def test_acceptance_rate_is_of_all_proposals(self) -> None:
        modes = measure.figures(results_of(SCRIPTS)).modes
        assert modes[OURS].acceptance_rate == (2 + 1 + 1) / (4 + 1 + 3)
        assert modes[LOOKUP].acceptance_rate == 1 / 2
        assert modes[PLAIN].acceptance_rate is None

    def test_rates_count_decoding_alone(self) -> None:
        modes = measure.figures(results_of(SCRIPTS)).modes
        assert modes[PLAIN].tokens_per_second == 6 / 3
        assert modes[OURS].tokens_per_second == 6 / 2.25
        assert modes[LOOKUP].tokens_per_second == 6 / 3
        assert [modes[mode].prefill_ms for mode in SCRIPTS] == [(250 + 125) / 2, (500 + 250) / 2, 250]

    def test_speedup_is_the_ratio_of_total_decode_times_and_the_median_is_over_prompts(self) -> None:
        modes = measure.figures(results_of(SCRIPTS)).modes
        assert modes[OURS].speedup == pytest.approx(3 / 2.25, rel=1e-12)
        assert modes[OURS].speedup_median == pytest.approx((2 / 1 + 1 / 1.25) / 2, rel=1e-12)
        assert modes[LOOKUP].speedup == modes[LOOKUP].speedup_median == 1.0
        assert modes[PLAIN].speedup == 1.0

    def test_terms_are_medians_over_cycles_and_other_a_share_of_their_sum(self) -> None:
        ours = measure.figures(results_of(SCRIPTS)).modes[OURS]
        assert ours.terms_ms == TermsMs(draft=60, head=20, verify=600, other=30)
        assert ours.other_share == (30 + 10 + 60) / (750 + 250 + 1250)

    def test_plain_step_is_a_median_pass_of_the_target_alone(self) -> None:
        assert measure.figures(results_of(SCRIPTS)).plain_step_ms == 500

    def test_kinds_have_figures_of_their_own(self) -> None:
        kinds = measure.figures_by_kind(results_of(SCRIPTS))
        assert list(kinds) == ["x", "y"]
        assert (kinds["x"].modes[OURS].tau, kinds["x"].modes[OURS].speedup) == (2.0, 2.0)
        assert (kinds["y"].modes[OURS].tau, kinds["y"].modes[OURS].speedup) == (2.0, pytest.approx(1 / 1.25, rel=1e-12))
        assert (kinds["x"].prompts, kinds["x"].tokens, kinds["y"].prompts, kinds["y"].tokens) == (1, 5, 1, 3)

    def test_equal_responses_are_identical(self) -> None:
        figures = measure.figures(results_of(SCRIPTS))
        assert figures.is_identical
        assert figures.differences == ()

    @pytest.mark.parametrize(
        ("mode", "answer", "position"),
        [
            (OURS, [(0.5, step(10)), (1.0, step(11, 12, 77, 14))], 3),
            (OURS, [(0.5, step(77)), (1.0, step(11, 12, 13, 14))], 0),
            (LOOKUP, [(0.5, step(10)), (1.0, step(11, 12))], 3),
            (LOOKUP, [(0.5, step(10)), (1.0, step(11, 12, 13, 14, 15))], 5),
        ],
        ids=["one token", "the first token", "too short", "too long"],
    )
    def test_a_different_response_is_listed_with_its_first_difference(
        self, mode: Mode, answer: list[tuple[float, Step]], position: int
    ) -> None:
        results = results_of(with_change(mode, A, answer))
        assert measure.figures(results).differences == (Difference(kind="x", index=0, mode=mode, position=position),)
        kinds = measure.figures_by_kind(results)
        assert not kinds["x"].is_identical
        assert kinds["y"].is_identical

    def test_a_response_of_the_prefill_alone_counts_nowhere(self) -> None:
        ended = {mode: answers | {B: [(0.25, step(20))]} for mode, answers in SCRIPTS.items()}
        figures = measure.figures(results_of(ended))
        assert figures.modes[OURS].tau == 2.0
        assert figures.modes[OURS].speedup == figures.modes[OURS].speedup_median == 2.0
        alone = measure.figures_by_kind(results_of(ended))["y"]
        assert alone.is_identical
        assert alone.plain_step_ms is None
        ours = alone.modes[OURS]
        assert (ours.tau, ours.speedup, ours.speedup_median, ours.tokens_per_second, ours.acceptance_rate, ours.other_share) == (None,) * 6

    def test_looping_share_counts_responses_that_end_in_circles(self) -> None:
        circle = [(0.25, step(10)), (1.0, step(*[1, 2, 3] * 20))]
        looping = {mode: answers | {A: circle} for mode, answers in SCRIPTS.items()}
        assert measure.figures(results_of(looping)).looping_share == 0.5
        assert measure.figures(results_of(SCRIPTS)).looping_share == 0.0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5] * 32, True),
        ([5] * 31, False),
        ([*range(50), *[1, 2, 3, 4, 5, 6, 7, 8] * 4], True),
        ([*range(50), *[1, 2, 3, 4, 5, 6, 7, 8, 9] * 4], False),
        ([*[1, 2] * 40, 3], False),
        (list(range(100)), False),
        ([], False),
    ],
    ids=["one token", "too short to tell", "period 8", "period 9", "circle left again", "no circle", "empty"],
)
def test_looping_is_a_short_period_at_the_end(tokens: list[int], expected: bool) -> None:
    assert is_looping(tokens) is expected


def report_of(scripts: dict[Mode, dict[tuple[int, ...], list[tuple[float, Step]]]]) -> report.Report:
    results = results_of(scripts)
    return report.Report(
        overall=measure.figures(results),
        kinds=measure.figures_by_kind(results),
        machine=machine.Machine(cpu="Example 9000", cores=2, threads=4, memory_bytes=8 * 2**30, os="Linux 6"),
        versions={"python": "3.11"},
        settings=Settings(kinds=("x", "y")).to_dict(),
        command="domino-deploy bench b",
    )


class TestReport:
    def test_json_has_the_promised_keys_with_the_overall_figures(self) -> None:
        made = json.loads(json.dumps(report_of(SCRIPTS).to_dict(), allow_nan=False))
        assert (made["tau"], made["speedup"], made["identical"]) == (2.0, pytest.approx(4 / 3), True)
        assert made["terms_ms"] == {"draft": 60, "head": 20, "verify": 600, "other": 30}
        assert made["plain"] == {"tokens_per_second": 2.0, "step_ms": 500, "prefill_ms": 187.5}
        assert made["prompt_lookup"]["tau"] == 1.2
        assert set(made["kinds"]) == {"x", "y"}
        assert made["kinds"]["x"]["speedup"] == 2.0
        assert set(made["kinds"]["x"]) == set(made) - {"kinds", "machine", "versions", "command", "settings"}
        assert made["machine"] == {"cpu": "Example 9000", "cores": 2, "threads": 4, "memory_bytes": 8 * 2**30, "os": "Linux 6"}
        assert (made["versions"], made["command"], made["settings"]["kinds"]) == ({"python": "3.11"}, "domino-deploy bench b", ["x", "y"])

    def test_json_lists_differences(self) -> None:
        made = report_of(with_change(OURS, A, [(0.5, step(10)), (1.0, step(11, 77))])).to_dict()
        assert made["identical"] is False
        assert made["differences"] == [{"kind": "x", "index": 0, "mode": "speculative", "position": 2}]

    def test_tables_have_a_row_per_kind_and_one_for_all(self) -> None:
        speed, times = report.tables(report_of(SCRIPTS))
        everything = dict(zip(speed.columns, speed.rows[-1], strict=True))
        assert everything == {
            "prompts": "all",
            "number": "2",
            "tau": "2.00",
            "accepted": "50%",
            "plain tok/s": "2.0",
            "tok/s": "2.7",
            "speed-up": "1.33",
            "median speed-up": "1.40",
            "identical": "yes",
            "looping": "0%",
            "lookup tau": "1.20",
            "lookup tok/s": "2.0",
            "lookup speed-up": "1.00",
        }
        assert [row[0] for row in times.rows] == ["x", "y", "all"]
        assert times.rows[-1] == ("all", "60.00", "20.00", "600.00", "30.00", "4%", "500.00", "375.00")

    def test_without_prompt_lookup_its_columns_and_figures_are_absent(self) -> None:
        made = report_of({mode: SCRIPTS[mode] for mode in (PLAIN, OURS)})
        speed, _ = report.tables(made)
        assert not [column for column in speed.columns if "lookup" in column]
        assert made.to_dict()["prompt_lookup"] is None

    def test_a_candidate_pool_has_a_column_of_its_own(self) -> None:
        assert "uncertified" not in report.tables(report_of(SCRIPTS))[0].columns
        pooled = [(seconds, replace(step, pooled=step.proposed, uncertified=step.accepted)) for seconds, step in SCRIPTS[OURS][A]]
        made = report_of(SCRIPTS | {OURS: SCRIPTS[OURS] | {A: pooled}})
        speed, _ = report.tables(made)
        shares = [row[speed.columns.index("uncertified")] for row in speed.rows]
        assert shares == ["60.0%", "-", "60.0%"]  # 2 of 4 and 1 of 1; the other kind has none that were pooled
        assert made.to_dict()["uncertified_share"] == 0.6
        assert made.kinds["y"].modes[OURS].uncertified_share is None

    def test_a_single_kind_needs_no_row_for_all(self) -> None:
        results = results_of(SCRIPTS, PROMPTS[:1])
        made = report.Report(
            overall=measure.figures(results),
            kinds=measure.figures_by_kind(results),
            machine=machine.this_machine(),
            versions={},
            settings={},
            command="",
        )
        assert [row[0] for row in report.tables(made)[0].rows] == ["x"]

    def test_what_was_not_measured_is_a_dash(self) -> None:
        ended = {mode: answers | {B: [(0.25, step(20))]} for mode, answers in SCRIPTS.items()}
        speed, _ = report.tables(report_of(ended))
        assert speed.rows[1][:8] == ("y", "1", "-", "-", "-", "-", "-", "-")

    def test_markdown_is_two_tables_and_what_they_belong_to(self) -> None:
        made = report_of(SCRIPTS)
        text = report.as_markdown(report.tables(made), report.footnotes(made))
        lines = text.splitlines()
        assert lines[0].startswith("| prompts | number | tau |")
        assert set(lines[1]) <= set("|-: ")
        widths = [line.count("|") for line in lines if line.startswith("|")]
        assert widths == [widths[0]] * 5 + [widths[-1]] * 5
        assert "- machine: Example 9000, 2 cores, 4 threads, 8 GiB, Linux 6" in lines
        assert "- command: `domino-deploy bench b`" in lines


def test_machine_reads_model_and_physical_cores(tmp_path: Path) -> None:
    block = "processor\t: {0}\nmodel name\t: Example 9000\nphysical id\t: 0\ncore id\t\t: {1}\n\n"
    (tmp_path / "cpuinfo").write_text("".join(block.format(processor, processor // 2) for processor in range(8)))
    found = machine.this_machine(tmp_path / "cpuinfo")
    assert (found.cpu, found.cores) == ("Example 9000", 4)
    assert machine.this_machine(tmp_path / "nowhere").cores is None


def test_versions_are_those_of_the_installed_packages() -> None:
    import numpy

    from domino_deploy import __version__

    assert machine.versions()["numpy"] == numpy.__version__
    assert machine.versions()["domino-deploy"] == __version__
    assert {"python", "onnxruntime"} <= machine.versions().keys()
