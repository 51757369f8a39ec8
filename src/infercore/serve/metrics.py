"""What ``/metrics`` shows, in a registry of the application's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.serve.models import Models
    from infercore.values.session import Usage

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SESSIONS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class _Pools(Collector):
    """Gauges that are read from the pools when somebody asks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = {
            "n_running": ("sessions_running", "Sessions that have a place in a step"),
            "n_waiting": ("sessions_waiting", "Calls that wait for a place"),
            "n_cells_used": ("cells_used", "Cells of the KV cache that hold tokens"),
            "n_cells": ("cells", "Cells of the KV cache"),
        }
        stats = {
            name: pool.stats()
            for name, served in self._models.by_name.items()
            if (pool := served.pool) is not None and not pool.closed  # it may be unloaded meanwhile
        }
        for field, (name, text) in gauges.items():
            family = GaugeMetricFamily(f"infercore_{name}", text, labels=["model"])
            for model, found in stats.items():
                family.add_metric([model], getattr(found, field))
            yield family


class Metrics:
    """Counters and histograms of a server."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Pools(models))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"infercore_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"infercore_{name}", text, ["model"], registry=self.registry, buckets=buckets
            )

        self._prompt = counter(
            "prompt_tokens",
            "Tokens of prompts, once for each answer to them, and of texts embedded or ranked",
            "model",
        )
        self._cached = counter(
            "cached_tokens",
            "Tokens of prompts that were resident, once for each answer to them",
            "model",
        )
        self._generated = counter("generated_tokens", "Tokens generated", "model")
        self._requests = counter("requests", "Requests answered", "status")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token", _SECONDS
        )
        self.between = histogram(
            "time_between_tokens_seconds", "Between two pieces of an answer", _SECONDS
        )
        self._queue = histogram("queue_seconds", "Without a place in the pool", _SECONDS)
        self._batch = histogram("batch_size", "Sessions that shared an engine call", _SESSIONS)

    def count_request(self, status: int) -> None:
        """Count an answer."""
        self._requests.labels(str(status)).inc()

    def count_usage(self, model: str, usage: Usage) -> None:
        """Count what an answer took."""
        counts = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
        self.count_tokens(model, *counts)
        self._queue.labels(model).observe(usage.waited_ms / 1000)
        self._batch.labels(model).observe(usage.mean_batch)

    def count_tokens(self, model: str, n_prompt: int, n_cached: int, n_generated: int) -> None:
        """Count tokens of a prompt, of these the resident ones, and of its answer."""
        self._prompt.labels(model).inc(n_prompt)
        self._cached.labels(model).inc(n_cached)
        self._generated.labels(model).inc(n_generated)

    def text(self) -> bytes:
        """Return all in the text format of Prometheus."""
        shown: Any = generate_latest(self.registry)
        return bytes(shown)
