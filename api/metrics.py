"""GET /metrics, for Prometheus: vLLM's names with the prefix "qengine:", so that dashboards
made for vLLM need to change nothing else.

As in vLLM, every series has the label model_name. It is empty for a request that was refused before it came to a model.
vLLM has no counterpart for the series about checkpoints and refusals, for drafts_checked and drafts_accepted (by the
position of a draft in its check, from 1 on), and for those about experts (of models whose experts do not all lie on the
cards).
Of a model on several machines, the series qengine:replica_... say the same of each replica.
The engine's counts are read when somebody asks; the times of a request are taken when it has ended.
"""

import flask
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from .endpoint import Endpoint
from .log import POLLED, Exchange, finish_of
from .openai import PROTOCOL

# name, meaning, name of the count in TextEngine.stats(). Those that PoolingEngine.stats() has, too, are told of such
# engines as well.
GAUGES = [
    ("num_requests_running", "Requests that are being answered", "requests_running"),
    ("num_requests_waiting", "Requests that wait for a slot", "requests_waiting"),
    ("checkpoints", "Kept states of prompts and answers, to resume from", "checkpoints"),
    ("checkpoints_on_card", "Those of them in the memory of the card", "checkpoints_on_card"),
]
COUNTERS = [
    ("prompt_tokens", "Tokens of prompts", "prompt_tokens"),
    ("texts", "Texts of which embeddings or scores were made", "texts"),
    ("prefix_cache_queries", "Tokens of prompts, as they are looked up in the cache", "looked_up"),
    ("prefix_cache_hits", "Tokens of prompts that the cache had, and that were not processed", "cached_tokens"),
    ("generation_tokens", "Tokens of answers", "generated_tokens"),
    ("sparse_keys_seen", "Pages of keys before the queries of sparse prompts, over layers and KV heads", "keys_seen"),
    ("sparse_keys_read", "Those of them that were read", "keys_read"),
    ("checkpoints_spilled", "Checkpoints moved from the card to the host's memory", "checkpoints_spilled"),
    ("checkpoints_fetched", "Checkpoints moved back", "checkpoints_fetched"),
    ("checkpoints_dropped", "Checkpoints forgotten for want of memory", "checkpoints_dropped"),
    ("expert_hits", "Experts of rows of decode steps that lay on the card", "expert_hits"),
    ("expert_misses", "Those that did not", "expert_misses"),
    ("experts_promoted", "Experts that got a slot on the card", "expert_promoted"),
    ("experts_computed", "Experts of rows that the host's processor has computed", "expert_computed"),
    ("expert_host_seconds", "Seconds of the host's processor for that", "expert_host_seconds"),
    ("expert_bytes_read", "Bytes of experts that decode steps read over the link", "expert_bytes_read"),
    ("expert_bytes_promoted", "Bytes of experts copied into slots", "expert_bytes_promoted"),
    ("expert_bytes_staged", "Bytes of experts copied for prompts", "expert_bytes_staged"),
    ("expert_bytes_from_file", "Bytes of experts that answers needed and that were read from a file",
     "expert_bytes_from_file"),
    ("spec_decode_num_drafts", "Steps of answers in which drafts were checked", "checks"),
    ("spec_decode_num_draft_tokens", "Drafts that were checked", "drafts"),
    ("spec_decode_num_accepted_tokens", "Those of them that were right", "drafts_right"),
]
BY_POSITION = [
    ("drafts_checked", "Drafts that were checked, right or wrong", "drafts_checked"),
    ("drafts_accepted", "Drafts that were right, so that they became tokens of answers", "drafts_accepted"),
]
FIRST_TOKEN = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
NEXT_TOKEN = [.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 10, 20, 40, 80]
WHOLE = [.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]


class Metrics:
    """The series of a service; `observe` takes each request that has ended."""

    def __init__(self, service):
        self.service = service
        self.registry = CollectorRegistry()         # not the global one, in which names would be taken at a second app
        self.registry.register(self)
        own = {"labelnames": ["model_name"], "registry": self.registry}
        self.finished = Counter("qengine:request_success", "Requests that ended, by how they did",
                                ["model_name", "finished_reason"], registry=self.registry)
        self.refused = Counter("qengine:request_refused", "Requests answered with an error, by its status",
                               ["model_name", "status"], registry=self.registry)
        self.first_token = Histogram("qengine:time_to_first_token_seconds",
                                     "From a request's arrival to its first token", buckets=FIRST_TOKEN, **own)
        self.next_token = Histogram("qengine:inter_token_latency_seconds", "From a token of an answer to the next",
                                    buckets=NEXT_TOKEN, **own)
        self.whole = Histogram("qengine:e2e_request_latency_seconds", "From a request's arrival to its end",
                               buckets=WHOLE, **own)

    def collect(self):
        """The engines' counts. prometheus_client calls this whenever somebody asks."""
        if self.service.models is None:
            return
        yield from self.loads()
        with self.service.models.held() as engines:
            counted = [(engine.name, counts_of(engine)) for engine in engines]
            replicas = [(engine.name, one) for engine in engines for one in engine.replicas]
        yield from by_replica(replicas)
        usage = "kv_cache_usage_perc", "Share of the KV pages that running requests hold, 1 is all", "kv_used"
        for family, metrics in (GaugeMetricFamily, [*GAUGES, usage]), (CounterMetricFamily, COUNTERS):
            for name, meaning, count in metrics:
                metric = family(f"qengine:{name}", meaning, labels=["model_name"])
                for model, counts in counted:
                    if count in counts:
                        metric.add_metric([model], counts[count])
                if metric.samples:
                    yield metric
        for name, meaning, count in BY_POSITION:
            metric = CounterMetricFamily(f"qengine:{name}", meaning, labels=["model_name", "position"])
            for model, counts in counted:
                for position, n in enumerate(counts.get(count, ()), start=1):
                    metric.add_metric([model, str(position)], n)
            if metric.samples:
                yield metric

    def loads(self):
        """Which models are loaded, and how often those were loaded that are not always."""
        own = {"labels": ["model_name"]}
        loaded = GaugeMetricFamily("qengine:model_loaded", "Whether the model is loaded: 1, or 0", **own)
        loads = CounterMetricFamily("qengine:model_loads", "How often a request had the model loaded", **own)
        for served in self.service.models.served:
            loaded.add_metric([served.name], served.state == "loaded")
            loads.add_metric([served.name], served.n_loads)
        return loaded, loads

    def observe(self, exchange: Exchange):
        if exchange.status >= 400 and exchange.path not in POLLED:
            self.refused.labels(exchange.served.name if exchange.served else "", str(exchange.status)).inc()
        if not exchange.generations:
            return
        name = exchange.engine.name
        next_token = self.next_token.labels(name)
        for generation in exchange.generations:
            times = generation.token_times
            self.finished.labels(name, finish_of(generation)).inc()
            if times:
                self.first_token.labels(name).observe(times[0] - generation.started)
            for before, after in zip(times, times[1:]):
                next_token.observe(after - before)
            self.whole.labels(name).observe(exchange.ended - generation.started)


def by_replica(replicas: list):
    """The counts above of each replica of a model. replicas: (model, a Replica of engine/replicas/table.py)."""
    labels = ["model_name", "replica", "node"]
    for family, metrics in (GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS):
        for name, meaning, count in metrics:
            metric = family(f"qengine:replica_{name}", f"{meaning}, by replica", labels=labels)
            for model, one in replicas:
                if count in one.stats:
                    metric.add_metric([model, one.id, one.node], one.stats[count])
            if metric.samples:
                yield metric
    state = GaugeMetricFamily("qengine:replica_up", "Whether the replica takes requests: 1, or 0", labels=labels)
    for model, one in replicas:
        state.add_metric([model, one.id, one.node], one.state == "up")
    if state.samples:
        yield state


def counts_of(engine) -> dict:
    """The counts of an engine, and what follows from them."""
    counts = engine.stats()
    counts["kv_used"] = counts["kv_pages_used"] / counts["kv_pages"]
    if engine.kind == "text":
        checked, accepted = counts["drafts_checked"], counts["drafts_accepted"]
        counts |= {"looked_up": counts["prompt_tokens"], "checks": checked[0], "drafts": sum(checked),
                   "drafts_right": sum(accepted)}
    return counts


def metrics(service):
    return flask.Response(generate_latest(service.metrics.registry), content_type=CONTENT_TYPE_LATEST)


ENDPOINTS = [Endpoint("GET", "/metrics", "Counts and times, for Prometheus", metrics, PROTOCOL)]
