"""`/metrics`: what the engine does, under vLLM's names where vLLM has one and under `domino_*` where it has none.

The counters, as T-51 of the peer study asks, are defined once, in `CycleRecord`: a draft is a cycle of one sequence that proposed at
least one token; proposed and accepted tokens are counted after truncation and without the target's own token.  So
mean acceptance length = 1 + accepted / drafts, and acceptance rate = accepted / proposed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from domino_deploy import __version__
from domino_deploy.runtime.controller import Reason
from domino_deploy.runtime.protocols import TermsMs
from domino_deploy.runtime.requests import ABORT, ERROR, LENGTH, STOP, CycleRecord, Request, RequestStatistics
from domino_deploy.server.acceptance_floor import FLOOR, WINDOW_DRAFTS, AcceptanceFloor
from domino_deploy.server.activity import WorkDone
from domino_deploy.server.metrics_sizes import LABELS, RequestSizes
from domino_deploy.server.state import state_of

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine

_LOG = logging.getLogger(__name__)

_CACHE_LABELS = ("block_size", "num_gpu_blocks")
_ENGINE = "0"  # vLLM numbers its engines; there is one here
_PROBES = (Reason.PLAIN_PROBE, Reason.SPECULATION_PROBE)
_PLAIN_REASONS = (Reason.LOW_ACCEPTANCE, Reason.COSTLY_BATCH, Reason.OTHERS_JOIN)
_FINISH_REASONS = (STOP, LENGTH, ABORT, ERROR)
_TERMS = tuple(term.name for term in fields(TermsMs))

# Seconds, in steps of 1, 2.5, 5: cycles from a small model's graph on a GPU up, requests up to a long answer on a slow CPU.  Per token
# the steps are finer where a reader notices them; tokens of one pass come in powers of two.
_CYCLE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """All metrics, in a registry of their own, and the engine's observer that counts into them (`runtime.requests.Observer`).

    Args:
        model_name: the label that tells models apart.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, _ENGINE)
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Cycles of a sequence that proposed at least one token.")
        self._proposed = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed and verified.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.")
        self._accepted_per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens that were accepted, by their position in the block.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of the prompts that were answered.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens given out.")
        self._finished = Counter(
            "vllm:request_success", "Requests that ended, by how.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in _FINISH_REASONS:  # a rate needs the zero before the first one
            self._finished.labels(*self._values, reason)
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _REQUEST_BUCKETS)
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of a request; each may hold several tokens.", _TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Time to decode a request, per token after the first.", _TOKEN_BUCKETS
        )
        self._total = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to slot.", _REQUEST_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Slot to the prompt's end.", _REQUEST_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First token to last.", _REQUEST_BUCKETS)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Slot to last token.", _REQUEST_BUCKETS)
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Tokens of one pass: rows of a prefill, or committed tokens of a cycle.", _COUNT_BUCKETS
        )
        self._terms = {term: self._histogram(f"domino_{term}_seconds", f"The {term} part of a cycle.", _CYCLE_BUCKETS) for term in _TERMS}
        self._cached = self._counter("domino_cached_prompt_tokens", "Prompt tokens whose rows another request had left behind.")
        self._disabled = Counter(
            "domino_speculation_disabled",
            "How often the controller went over to plain decoding, by reason.",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        for reason in _PLAIN_REASONS:
            self._disabled.labels(*self._values, reason)
        self._is_below_floor = Gauge(
            "domino_acceptance_below_floor",
            f"1 while the mean acceptance length of the last {WINDOW_DRAFTS} drafts is below {FLOOR}.",
            LABELS,
            registry=self.registry,
        ).labels(*self._values)
        self._sizes: RequestSizes | None = None  # as soon as the model's length is known
        self._is_plain = False  # the controller's last word, probes apart
        self._floor = AcceptanceFloor()
        self.work = WorkDone()  # for the log

    def watch(self, engine: Engine, *, provider: str, drafter: str) -> None:
        """Read the gauges from this engine, at each scrape; say what it serves."""
        self.registry.register(_Gauges(engine, self._values))
        self._sizes = RequestSizes(self.registry, self._values, engine.max_model_len)
        for position in range(engine.max_speculative_tokens):  # as of the reasons above: the zero first
            self._accepted_per_position.labels(*self._values, str(position))
        sources = engine.bundle.manifest.sources
        names = ("version", "target", "draft", "provider", "precision")
        target, draft = sources["target"].name, sources["drafter"].name if drafter == "bundle" else drafter
        info = Gauge("domino_build_info", "What is served, as labels; always 1.", (*LABELS, *names), registry=self.registry)
        info.labels(*self._values, __version__, target, draft, provider, engine.bundle.precision.name).set(1)

    def queued(self, request: Request) -> None:
        """Nothing: waiting requests are a gauge."""

    def prefilled(self, rows: int, seconds: float) -> None:
        self._iteration.observe(rows)
        self.work.prompt_rows += rows

    def cycled(self, record: CycleRecord) -> None:
        self._iteration.observe(record.tokens)
        for term, histogram in self._terms.items():
            milliseconds = getattr(record.terms_ms, term)
            if record.width or term in ("verify", "other"):
                histogram.observe(milliseconds / 1e3)
        self.work.count_cycle(record)
        self._drafts.inc(record.drafts)
        self._proposed.inc(record.proposed)
        self._accepted.inc(record.accepted)
        for position, count in enumerate(record.accepted_per_position):
            self._accepted_per_position.labels(*self._values, str(position)).inc(count)
        self._is_below_floor.set(self._floor.observe(record.drafts, record.accepted))

    def delivered(self, request: Request, tokens: int, seconds_since_last: float | None) -> None:
        self._generation_tokens.inc(tokens)
        self.work.generated_tokens += tokens
        if seconds_since_last is not None:
            self._between.observe(seconds_since_last)

    def finished(self, request: Request, finish_reason: str, statistics: RequestStatistics) -> None:
        self._finished.labels(*self._values, finish_reason).inc()
        self._total.observe(statistics.total_seconds)
        self._queue.observe(statistics.queue_seconds)
        if not statistics.has_run_prompt:
            return
        self._prompt_tokens.inc(statistics.prompt_tokens)
        self._cached.inc(statistics.cached_tokens)
        if self._sizes is not None:
            self._sizes.count(request, statistics)
        self._prefill.observe(statistics.prefill_seconds)
        self._inference.observe(statistics.prefill_seconds + statistics.decode_seconds)
        if statistics.first_token_seconds is not None:  # it may have wanted the prompt alone, or failed behind it
            self._first_token.observe(statistics.first_token_seconds)
            self._decode.observe(statistics.decode_seconds)
        if statistics.generated_tokens > 1:
            self._per_token.observe(statistics.decode_seconds / (statistics.generated_tokens - 1))

    def width_chosen(self, width: int, reason: str) -> None:
        if reason in _PROBES:  # a look at the other side, not a change of mind
            return
        if width == 0 and not self._is_plain:
            self._disabled.labels(*self._values, reason).inc()
        if reason == Reason.OTHERS_JOIN:  # for some cycles, at every arrival: nothing to log
            return
        if (width == 0) is not self._is_plain:
            _LOG.debug("Speculation is %s: %s", "off" if width == 0 else "on", reason.replace("_", " "))
        self._is_plain = width == 0

    def _counter(self, name: str, documentation: str) -> Counter:
        """The client library adds `_total` to the name."""
        return Counter(name, documentation, LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, documentation, LABELS, registry=self.registry, buckets=buckets).labels(*self._values)


class _Gauges(Collector):
    """What is true at the moment of a scrape."""

    def __init__(self, engine: Engine, values: tuple[str, str]) -> None:
        self._engine = engine
        self._values = values

    def collect(self) -> Iterator[Metric]:
        found = self._engine.snapshot()
        yield self._gauge("vllm:num_requests_running", "Requests that have a slot.", found.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for one.", found.waiting)
        usage = found.used_rows / found.total_rows if found.total_rows else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the cache's rows in use, 0 to 1.", usage)
        # vLLM's words for a cache: here a block is one row, and a prompt takes over any number of them.
        cache = GaugeMetricFamily("vllm:cache_config_info", "The caches, as labels; always 1.", labels=(*LABELS, *_CACHE_LABELS))
        cache.add_metric((*self._values, "1", str(found.total_rows)), 1)
        yield cache
        yield self._gauge("domino_speculation_width", "Tokens drafted per cycle now, 0 for plain decoding.", found.width)
        yield self._gauge("domino_acceptance_length", "Mean acceptance length of recent cycles.", found.acceptance_length)

    def _gauge(self, name: str, documentation: str, value: float | None) -> Metric:
        gauge = GaugeMetricFamily(name, documentation, labels=LABELS)
        if value is not None:  # not known yet: no sample is truer than a number
            gauge.add_metric(self._values, value)
        return gauge


async def metrics(request: HttpRequest) -> Response:
    """In Prometheus' text format, or in OpenMetrics for who asks for that."""
    found = state_of(request).metrics
    assert found is not None, "there is no such route without metrics"
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(found.registry), headers={"content-type": content_type})


routes = [Route("/metrics", metrics)]
