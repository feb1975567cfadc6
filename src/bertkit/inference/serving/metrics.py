"""The contents of `/metrics` in Prometheus' text format: requests, batches, the queue and the process.

Not from a paper; names and units follow Prometheus' conventions (seconds, `_total`). Labels have values that the server
chooses: the route, never the path that a client sent.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from bertkit.inference.serving.batcher import BatchReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TOKENS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ServerMetrics:
    """The counters of one server.

    Args:
        waiting_tokens: called whenever the page is read.
    """

    def __init__(self, waiting_tokens: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "bertkit_requests", "Answers by route and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "bertkit_request_seconds",
            "From a request's headers to the last byte of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_work = Gauge("bertkit_requests_in_work", "Requests being read or answered.", registry=registry)
        self.gone = Counter("bertkit_clients_gone", "Clients that disconnected before their answer.", registry=registry)
        self._tokens = Counter("bertkit_tokens", "Tokens computed.", ["model", "ability"], registry=registry)
        self._batch_tokens = Histogram(
            "bertkit_batch_tokens", "Tokens per batch.", ["model"], buckets=_TOKENS, registry=registry
        )
        self._batch_requests = Histogram(
            "bertkit_batch_requests", "Requests per batch.", ["model"], buckets=_SEQUENCES, registry=registry
        )
        self._batch_seconds = Histogram(
            "bertkit_batch_seconds", "Seconds to compute a batch.", ["model"], buckets=_SECONDS, registry=registry
        )
        queue = Gauge("bertkit_queue_tokens", "Tokens waiting or being computed.", registry=registry)
        queue.set_function(waiting_tokens)

    def observe_batch(self, report: BatchReport) -> None:
        """Record a batch; called by the model's thread."""
        model = report.key.model
        self._tokens.labels(model, report.key.ability).inc(report.tokens)
        self._batch_tokens.labels(model).observe(report.tokens)
        self._batch_requests.labels(model).observe(report.requests)
        self._batch_seconds.labels(model).observe(report.seconds)

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        """Record an answer."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def answers_by_status(self) -> dict[str, int]:
        """Number of answers by status."""
        found: dict[str, int] = {}
        for metric in self.requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    status = sample.labels["status"]
                    found[status] = found.get(status, 0) + int(sample.value)
        return found

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
