"""`/metrics`: vLLM's names, types and labels, counters that add up with the answers, gauges of the moment, the acceptance floor."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from domino_deploy import __version__
from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.engine_settings import EngineSettings
from domino_deploy.runtime.protocols import TermsMs
from domino_deploy.runtime.requests import CycleRecord, EngineSnapshot, GenerationParams, Output, Request, RequestStatistics
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.server.acceptance_floor import WINDOW_DRAFTS
from domino_deploy.server.app import create_app
from domino_deploy.server.metrics import Metrics
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine

# Of vLLM, as its benchmark, NeMo's and AIPerf read them: name in the text -> type, labels beside model_name and engine.
VLLM: Mapping[str, tuple[str, frozenset[str]]] = {
    "vllm:spec_decode_num_drafts_total": ("counter", frozenset()),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", frozenset()),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", frozenset()),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("counter", frozenset({"position"})),
    "vllm:num_requests_running": ("gauge", frozenset()),
    "vllm:num_requests_waiting": ("gauge", frozenset()),
    "vllm:kv_cache_usage_perc": ("gauge", frozenset()),
    "vllm:prompt_tokens_total": ("counter", frozenset()),
    "vllm:generation_tokens_total": ("counter", frozenset()),
    "vllm:request_success_total": ("counter", frozenset({"finished_reason"})),
    **dict.fromkeys(
        (
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
            "vllm:request_inference_time_seconds",
            "vllm:iteration_tokens_total",
            "vllm:request_prompt_tokens",
            "vllm:request_generation_tokens",
            "vllm:request_max_num_generation_tokens",
            "vllm:request_params_max_tokens",
        ),
        ("histogram", frozenset()),
    ),
    "vllm:prefix_cache_queries_total": ("counter", frozenset()),
    "vllm:prefix_cache_hits_total": ("counter", frozenset()),
    "vllm:num_preemptions_total": ("counter", frozenset()),
    "vllm:cache_config_info": ("gauge", frozenset({"block_size", "num_gpu_blocks"})),
}
OWN: Mapping[str, tuple[str, frozenset[str]]] = {
    "domino_draft_seconds": ("histogram", frozenset()),
    "domino_head_seconds": ("histogram", frozenset()),
    "domino_verify_seconds": ("histogram", frozenset()),
    "domino_other_seconds": ("histogram", frozenset()),
    "domino_cached_prompt_tokens_total": ("counter", frozenset()),
    "domino_speculation_disabled_total": ("counter", frozenset({"reason"})),
    "domino_acceptance_length": ("gauge", frozenset()),
    "domino_acceptance_below_floor": ("gauge", frozenset()),
    "domino_speculation_width": ("gauge", frozenset()),
    "domino_build_info": ("gauge", frozenset({"version", "target", "draft", "provider", "precision"})),
}
RECORD = CycleRecord(
    batch=2,
    width=6,
    drafts=2,
    proposed=12,
    accepted=5,
    accepted_per_position=(2, 2, 1, 0, 0, 0),
    tokens=7,
    terms_ms=TermsMs(draft=2.0, head=1.0, verify=30.0, other=0.5),
)


@pytest.fixture
def engine(tiny_bundle: Path) -> IdleEngine:
    engine = IdleEngine(tiny_bundle)
    engine.state = EngineSnapshot(running=3, waiting=2, used_rows=30, total_rows=120, width=4, acceptance_length=2.5)
    return engine


def text_of(engine: Any, metrics: Metrics, accept: str = "*/*") -> str:
    client = TestClient(create_app(engine, ServerSettings(allowed_hosts=("testserver",)), metrics))
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain; version=")
    return answer.text


def watched(engine: IdleEngine) -> Metrics:
    metrics = Metrics("m")
    metrics.watch(engine, provider="cpu", drafter="bundle")  # type: ignore[arg-type]
    return metrics


def samples(engine: Any, metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels beside model and engine) -> value."""
    found = {}
    for family in text_string_to_metric_families(text_of(engine, metrics)):
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")
            others = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, frozenset(others.items())] = sample.value
    return found


def value(engine: Any, metrics: Metrics, name: str, **labels: str) -> float:
    return samples(engine, metrics)[name, frozenset(labels.items())]


class TestNames:
    def test_the_text_has_exactly_the_promised_names_with_their_types_and_labels(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        metrics.cycled(RECORD)
        metrics.width_chosen(0, "low_acceptance")
        text = text_of(engine, metrics)
        declared = dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
        # `_created` is the client library's, one for each of its counters and histograms.
        declared = {name: kind for name, kind in declared.items() if not name.endswith("_created")}
        assert declared == {name: kind for name, (kind, _) in {**VLLM, **OWN}.items()}
        for (name, labels), _ in samples(engine, metrics).items():
            base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count").removesuffix("_created")
            expected = next((found for known, (_, found) in {**VLLM, **OWN}.items() if known in (base, f"{base}_total")), None)
            assert expected is not None, name
            assert {label for label, _ in labels} - {"le"} == expected, name

    def test_openmetrics_is_given_to_who_asks_for_it(self, engine: IdleEngine) -> None:
        assert text_of(engine, watched(engine), "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")

    def test_every_finish_reason_is_there_from_the_start(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        for reason in ("stop", "length", "abort", "error"):
            assert value(engine, metrics, "vllm:request_success_total", finished_reason=reason) == 0

    def test_two_servers_in_one_process_do_not_share_them(self, engine: IdleEngine) -> None:
        one, other = watched(engine), watched(engine)
        one.cycled(RECORD)
        assert value(engine, other, "vllm:spec_decode_num_drafts_total") == 0


class TestGauges:
    def test_they_are_those_of_the_moment(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        expected = {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.25}
        expected |= {"domino_speculation_width": 4, "domino_acceptance_length": 2.5}
        assert {name: value(engine, metrics, name) for name in expected} == expected
        engine.state = EngineSnapshot(running=0, waiting=0, used_rows=0, total_rows=120)
        assert value(engine, metrics, "vllm:num_requests_running") == 0
        assert ("domino_acceptance_length", frozenset()) not in samples(engine, metrics)

    def test_blocks_of_the_cache_are_rows(self, engine: IdleEngine) -> None:
        assert value(engine, watched(engine), "vllm:cache_config_info", block_size="1", num_gpu_blocks="120") == 1

    def test_what_is_served_is_told(self, engine: IdleEngine) -> None:
        labels = {"version": __version__, "provider": "cpu", "precision": "float32"}
        # Folders, by their names: a path would tell of the machine they were exported on.
        sources = engine.bundle.manifest.sources
        labels |= {"target": Path(sources["target"].source).name, "draft": Path(sources["drafter"].source).name}
        assert value(engine, watched(engine), "domino_build_info", **labels) == 1


class TestCounters:
    def test_acceptance_comes_out_as_vllms_documentation_computes_it(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        metrics.cycled(RECORD)
        metrics.cycled(CycleRecord(batch=2, width=0, tokens=2))  # plain: no draft
        names = ("drafts", "draft_tokens", "accepted_tokens")
        found = {name: value(engine, metrics, f"vllm:spec_decode_num_{name}_total") for name in names}
        assert found == {"drafts": 2, "draft_tokens": 12, "accepted_tokens": 5}
        assert 1 + found["accepted_tokens"] / found["drafts"] == 3.5
        per_position = [value(engine, metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(6)]
        assert per_position == [2, 2, 1, 0, 0, 0]

    def test_terms_are_in_seconds_and_plain_cycles_have_no_draft(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        metrics.cycled(RECORD)
        metrics.cycled(CycleRecord(batch=1, width=0, tokens=1, terms_ms=TermsMs(verify=20.0, other=0.25)))
        counts = {term: value(engine, metrics, f"domino_{term}_seconds_count") for term in ("draft", "head", "verify", "other")}
        assert counts == {"draft": 1, "head": 1, "verify": 2, "other": 2}
        assert value(engine, metrics, "domino_verify_seconds_sum") == pytest.approx(0.05)
        assert value(engine, metrics, "domino_draft_seconds_sum") == pytest.approx(0.002)
        assert value(engine, metrics, "vllm:iteration_tokens_total_sum") == 8

    def test_a_request_that_never_began_has_a_finish_but_no_tokens(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        request = Request(request_id="1", prompt_ids=[1], params=GenerationParams(), deliver=lambda output: None)
        metrics.finished(request, "abort", RequestStatistics(prompt_tokens=9, queue_seconds=2.0, total_seconds=2.0))
        assert value(engine, metrics, "vllm:request_success_total", finished_reason="abort") == 1
        assert value(engine, metrics, "vllm:prompt_tokens_total") == 0
        assert value(engine, metrics, "vllm:time_to_first_token_seconds_count") == 0

    @pytest.mark.parametrize("reason", ["abort", "error"])
    def test_one_that_ended_behind_its_prompt_has_the_prompts_tokens_but_no_first_one(self, engine: IdleEngine, reason: str) -> None:
        metrics = watched(engine)
        request = Request(request_id="1", prompt_ids=[1], params=GenerationParams(), deliver=lambda output: None)
        found = RequestStatistics(prompt_tokens=9, cached_tokens=4, has_run_prompt=True, prefill_seconds=0.5, total_seconds=0.5)
        metrics.finished(request, reason, found)
        assert value(engine, metrics, "vllm:prompt_tokens_total") == 9
        assert value(engine, metrics, "domino_cached_prompt_tokens_total") == 4
        assert value(engine, metrics, "vllm:request_prefill_time_seconds_sum") == 0.5
        assert value(engine, metrics, "vllm:time_to_first_token_seconds_count") == 0

    def test_sizes_of_requests_fall_into_vllms_buckets(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        for prompt, generated, wanted in [(3, 5, 5), (60, 1, 96)]:
            request = Request(request_id="1", prompt_ids=[1], params=GenerationParams(max_new_tokens=wanted), deliver=lambda output: None)
            metrics.finished(
                request,
                "length",
                RequestStatistics(prompt_tokens=prompt, generated_tokens=generated, has_run_prompt=True, first_token_seconds=0.5),
            )
        found = samples(engine, metrics)
        steps = [1, 2, 5, 10, 20, 50]  # up to the model's length, 96
        expected = {
            "prompt_tokens": [0, 0, 1, 1, 1, 1],
            "generation_tokens": [1, 1, 2, 2, 2, 2],
            "max_num_generation_tokens": [1, 1, 2, 2, 2, 2],
            "params_max_tokens": [0, 0, 1, 1, 1, 2],  # the second one is cut to the 36 that fit
        }
        for name, counts in expected.items():
            buckets = {dict(labels)["le"]: number for (sample, labels), number in found.items() if sample == f"vllm:request_{name}_bucket"}
            assert buckets == {**{str(float(step)): count for step, count in zip(steps, counts, strict=True)}, "+Inf": 2}

    def test_only_prompts_that_may_use_a_cache_ask_one(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        for params, cached in [(GenerationParams(), 32), (GenerationParams(prompt_logprobs=0), 0)]:
            request = Request(request_id="1", prompt_ids=[1], params=params, deliver=lambda output: None)
            metrics.finished(request, "stop", RequestStatistics(prompt_tokens=40, cached_tokens=cached, has_run_prompt=True))
        assert value(engine, metrics, "vllm:prefix_cache_queries_total") == 40
        assert value(engine, metrics, "vllm:prefix_cache_hits_total") == 32
        assert value(engine, metrics, "vllm:num_preemptions_total") == 0

    def test_time_per_token_leaves_the_first_one_out(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        request = Request(request_id="1", prompt_ids=[1], params=GenerationParams(), deliver=lambda output: None)
        times = {"first_token_seconds": 0.5, "prefill_seconds": 0.5, "decode_seconds": 2.0, "total_seconds": 2.5}
        counts = {"prompt_tokens": 3, "cached_tokens": 1, "generated_tokens": 5}
        metrics.finished(request, "length", RequestStatistics(has_run_prompt=True, **counts, **times))
        assert value(engine, metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.5)
        assert value(engine, metrics, "vllm:request_inference_time_seconds_sum") == pytest.approx(2.5)
        assert value(engine, metrics, "domino_cached_prompt_tokens_total") == 1

    def test_going_over_to_plain_decoding_is_counted_once_and_probes_are_not(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        for width, reason in [(6, "pays"), (0, "low_acceptance"), (6, "speculation_probe"), (0, "low_acceptance"), (6, "pays")]:
            metrics.width_chosen(width, reason)
        metrics.width_chosen(0, "costly_batch")
        assert value(engine, metrics, "domino_speculation_disabled_total", reason="low_acceptance") == 1
        assert value(engine, metrics, "domino_speculation_disabled_total", reason="costly_batch") == 1

    def test_cycles_that_let_others_join_are_counted_and_not_logged(self, engine: IdleEngine, caplog: pytest.LogCaptureFixture) -> None:
        metrics = watched(engine)
        with caplog.at_level(logging.DEBUG):
            for width, reason in [(6, "pays"), (0, "others_join"), (6, "pays"), (0, "others_join"), (0, "low_acceptance"), (6, "pays")]:
                metrics.width_chosen(width, reason)
        assert value(engine, metrics, "domino_speculation_disabled_total", reason="others_join") == 2
        assert value(engine, metrics, "domino_speculation_disabled_total", reason="low_acceptance") == 1
        assert [record.message for record in caplog.records] == ["Speculation is off: low acceptance", "Speculation is on: pays"]

    def test_they_add_up_with_what_requests_were_given(self, tiny_bundle: Path) -> None:
        """A real engine: ends by length, stop token, stop string and abort, several at a time."""
        metrics, ends = Metrics("m"), []

        def submit(engine: Engine, number: int, **fields: Any) -> None:
            def deliver(output: Output) -> None:
                if output.finish_reason is not None:
                    ends.append((output.finish_reason, output.statistics))

            sampling = SamplingParams(temperature=fields.pop("temperature", 0.0), seed=number)
            params = GenerationParams(sampling=sampling, **fields)
            engine.submit(Request(request_id=str(number), prompt_ids=[3 + number, 5, 7, 9], params=params, deliver=deliver))

        settings = EngineSettings(max_sequences=3, adaptive=False)
        with Engine.open(tiny_bundle, max_model_len=96, settings=settings, observer=metrics) as engine:
            metrics.watch(engine, provider="cpu", drafter="bundle")
            for number in range(4):
                submit(engine, number, max_new_tokens=7 + number, ignore_eos=True)
            for number in range(4, 8):
                submit(engine, number, max_new_tokens=40, temperature=1.5)
            submit(engine, 8, max_new_tokens=40, ignore_eos=True, stop_strings=("e", "a", " "))
            submit(engine, 9, max_new_tokens=80, ignore_eos=True)
            engine.cancel("9")
            assert engine.drain(60)
            deadline = time.monotonic() + 60
            while sum(found for (name, _), found in samples(engine, metrics).items() if name == "vllm:request_success_total") < 10:
                assert time.monotonic() < deadline  # counted just after the last output went out
                time.sleep(0.01)
            found = samples(engine, metrics)

        def total(name: str) -> float:
            return sum(number for (sample, _), number in found.items() if sample == name)

        statistics = [of_request for _, of_request in ends]
        steps = [step for of_request in statistics for step in of_request.steps]
        begun = [of_request for of_request in statistics if of_request.has_run_prompt]
        assert total("vllm:generation_tokens_total") == sum(of_request.generated_tokens for of_request in statistics)
        assert total("vllm:prompt_tokens_total") == 4 * len(begun)
        assert total("vllm:time_to_first_token_seconds_count") == len(begun)
        assert total("vllm:spec_decode_num_drafts_total") == len(steps) > 0
        assert total("vllm:spec_decode_num_draft_tokens_total") == sum(proposed for proposed, _ in steps)
        accepted = total("vllm:spec_decode_num_accepted_tokens_total")
        assert accepted == sum(accepted for _, accepted in steps) == total("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        for reason in ("stop", "length", "abort", "error"):
            expected = sum(finish_reason == reason for finish_reason, _ in ends)
            assert found["vllm:request_success_total", frozenset({("finished_reason", reason)})] == expected
        assert found["vllm:num_requests_running", frozenset()] == found["vllm:num_requests_waiting", frozenset()] == 0


class TestAcceptanceFloor:
    """T-31: text stays right when a drafter is of no use, so something else has to say it."""

    @staticmethod
    def cycles(metrics: Metrics, drafts: int, accepted: int) -> None:
        for index in range(drafts):
            metrics.cycled(CycleRecord(batch=1, width=4, drafts=1, proposed=4, accepted=int(index < accepted), tokens=1))

    def test_a_drafter_that_is_hardly_ever_right_is_warned_of_once(self, engine: IdleEngine, caplog: pytest.LogCaptureFixture) -> None:
        metrics = watched(engine)
        with caplog.at_level(logging.WARNING):
            self.cycles(metrics, WINDOW_DRAFTS - 1, 1)
            assert value(engine, metrics, "domino_acceptance_below_floor") == 0
            assert not caplog.records
            self.cycles(metrics, WINDOW_DRAFTS, 1)
        assert value(engine, metrics, "domino_acceptance_below_floor") == 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "mean acceptance length of 1.0" in caplog.text

    def test_the_metric_goes_back_when_drafts_are_accepted_again(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        self.cycles(metrics, WINDOW_DRAFTS, 0)
        self.cycles(metrics, WINDOW_DRAFTS, WINDOW_DRAFTS // 2)
        assert value(engine, metrics, "domino_acceptance_below_floor") == 0

    def test_plain_cycles_say_nothing_about_the_drafter(self, engine: IdleEngine) -> None:
        metrics = watched(engine)
        for _ in range(2 * WINDOW_DRAFTS):
            metrics.cycled(CycleRecord(batch=1, width=0, tokens=1))
        assert value(engine, metrics, "domino_acceptance_below_floor") == 0
