"""Sizes of requests and what caches knew of them, under vLLM's names: the part of the metrics that depends on the model's length."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram

from domino_deploy.runtime.requests import Request, RequestStatistics

# Of all metrics.
LABELS = ("model_name", "engine")


class RequestSizes:
    """Counts requests whose prompt ran to its end.

    Args:
        registry: of all metrics; values: of the labels that all have.
        max_model_len: prompt and answer together at most.
    """

    def __init__(self, registry: CollectorRegistry, values: tuple[str, str], max_model_len: int) -> None:
        buckets = tuple(_steps(max_model_len))

        def histogram(name: str, documentation: str) -> Histogram:
            return Histogram(f"vllm:request_{name}", documentation, LABELS, registry=registry, buckets=buckets).labels(*values)

        def counter(name: str, documentation: str) -> Counter:
            return Counter(f"vllm:{name}", documentation, LABELS, registry=registry).labels(*values)

        self._max_model_len = max_model_len
        self._prompt = histogram("prompt_tokens", "Tokens of a request's prompt.")
        self._generation = histogram("generation_tokens", "Tokens given out to a request.")
        self._most_generated = histogram("max_num_generation_tokens", "Tokens of a request's longest choice: each has one choice here.")
        self._wanted = histogram("params_max_tokens", "Tokens to generate at most, cut to what the model's length allows.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked for in a cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were found in a cache.")
        counter("num_preemptions", "Requests that had to give up their slot for another: none ever does.")

    def count(self, request: Request, statistics: RequestStatistics) -> None:
        """Take in a request that ended."""
        self._prompt.observe(statistics.prompt_tokens)
        self._generation.observe(statistics.generated_tokens)
        self._most_generated.observe(statistics.generated_tokens)
        self._wanted.observe(min(request.params.max_new_tokens, self._max_model_len - statistics.prompt_tokens))
        if request.params.prompt_logprobs is None:  # whose every row must be run
            self._queries.inc(statistics.prompt_tokens)
        self._hits.inc(statistics.cached_tokens)


def _steps(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 and so on, as vLLM's buckets of tokens."""
    decade = 1
    while decade <= most:
        yield from (decade * factor for factor in (1, 2, 5) if decade * factor <= most)
        decade *= 10
