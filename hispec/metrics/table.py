"""The table of metrics, whose names stats, reports and Prometheus share; docs/metrics.md has it, with the
formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# Seconds, by 1, 2.5 and 5: the upper ends of buckets, and one bucket more has what is above the last.
TOKEN_BOUNDS = (0.0, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BOUNDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
)
# Tokens that a round commits: an exact count of each up to 8.
LENGTH_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    name      its key in stats
    unit      of what it counts or measures; "" = nothing but a number of the events that it is named after
    bounds    of a histogram: inclusive upper ends of its buckets
    label     the metric is a number for each value of this label, in stats a dictionary
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    bounds: tuple[float, ...] = ()
    label: str = ""

    @property
    def exposed_name(self) -> str:
        """Its name in Prometheus: the prefix hispec_, the name, its unit, and _total of a counter."""
        stem = self.name.removesuffix("_s") if self.unit == "seconds" else self.name
        stem = stem.removesuffix("_histogram")
        unit = f"_{self.unit}" if self.unit and self.unit not in stem else ""
        return f"hispec_{stem}{unit}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, meaning: str, label: str = "") -> Metric:
    return Metric(name, "counter", unit, meaning, label=label)


def _gauge(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name, "gauge", unit, meaning)


def _times(name: str, bounds: tuple[float, ...], meaning: str) -> Metric:
    return Metric(name, "histogram", "seconds", meaning, bounds)


METRICS = (
    # of requests
    _times("queue_time_s", REQUEST_BOUNDS, "arrival to first row of a batch; counted with the first token"),
    _times("prefill_time_s", REQUEST_BOUNDS, "first row to first token: the prompt's passes, and a round"),
    _times("ttft_s", REQUEST_BOUNDS, "arrival to first token: queue_time_s + prefill_time_s"),
    _times("tpot_s", TOKEN_BOUNDS, "time per output token after the first, one value per request"),
    _times("e2e_s", REQUEST_BOUNDS, "arrival to end, of requests that ended by stop or length"),
    _times("inter_token_s", TOKEN_BOUNDS, "time between tokens, per token: those of a round share its time"),
    _times("token_gap_s", TOKEN_BOUNDS, "time between moments at which a request gained tokens"),
    _counter("finished", "requests", "requests that ended, for whatever reason"),
    _counter("finished_by_reason", "requests", "the same, by finish_reason", label="reason"),
    _counter("errors", "", "requests refused or failed, by kind", label="kind"),
    _counter("preemptions", "", "times that a request lost its row to another"),
    _counter("tokens", "", "output tokens of requests"),
    _counter("prefill_tokens", "", "prompt positions computed, those computed again included"),
    _counter("cache_queried_tokens", "", "positions looked for in the prefix cache"),
    _counter("cached_tokens", "", "positions found there"),
    # of tiers
    _counter("rounds", "", "rows times rounds"),
    _counter("cycles", "", "rows times draft cycles"),
    _counter("drafted", "tokens", "drafts that could be judged"),
    _counter("draft_kept", "tokens", "drafts that the tier above kept: check, or verify without a check"),
    _counter("looked_up", "tokens", "drafts that prompt lookup proposed"),
    _counter("looked_up_kept", "tokens", "those of them that the tier above kept"),
    _counter("check_judged", "tokens", "drafts that a check judged"),
    _counter("check_kept", "tokens", "drafts that it kept"),
    _counter("check_corrected", "tokens", "check's own tokens in place of rejected drafts"),
    _counter("check_bonus", "tokens", "check's own tokens after cycles whose drafts were all kept"),
    _counter("check_undrafted", "tokens", "check's own tokens in cycles without drafts"),
    _counter("tentative", "tokens", "tokens that verify judged"),
    _counter("accepted", "tokens", "tentative tokens that it kept"),
    _counter("verify_corrected", "tokens", "verify's own tokens in place of rejected ones"),
    _counter("verify_bonus", "tokens", "verify's own tokens after all tentative ones were accepted"),
    _counter("verify_undrafted", "tokens", "verify's own tokens where nothing was tentative: plain decoding"),
    _counter("committed", "tokens", "tokens that rounds committed, those beyond a request's end included"),
    Metric(
        "accept_length_histogram", "histogram", "tokens", "tokens committed per row and round", LENGTH_BOUNDS
    ),
    # of the engine
    _counter("steps", "", "engine steps that ran a round, or several together"),
    _counter("rounds_ahead", "", "rounds launched before the host had read the one before; on a GPU"),
    _counter("prefill_s", "seconds", "time in prefill; on a GPU only until it is queued"),
    _counter("round_s", "seconds", "time in rounds"),
    _counter("draft_pass_s", "seconds", "of round_s: passes that drafted; on a CPU"),
    _counter("check_pass_s", "seconds", "of round_s: passes that checked; on a CPU"),
    _counter("verify_pass_s", "seconds", "of round_s: passes that verified, or decoded plainly; on a CPU"),
    _counter("row_layer_passes", "", "layers that rounds ran, once for each row in them"),
    _counter("row_draft_model_layer_passes", "", "the same of a draft model's layers"),
    _counter("layer_passes", "", "layers run, once for a whole batch; those of prompts included"),
    _counter("prefill_layer_passes", "", "those of prompts among them"),
    _gauge("num_layers", "", "layers of the model"),
    _counter("drafter_failures", "", "times that a drafter failed, so that requests went on plainly"),
    _counter("caught_up_tokens", "", "positions whose KV was backfilled for an exit or a draft model"),
    _gauge("waiting", "requests", "requests without a row now: the depth of the queue"),
    _gauge("running", "requests", "requests with a row now"),
    _gauge("kv_blocks_used", "", "KV blocks that requests hold now"),
    _gauge("kv_blocks_cached", "", "KV blocks that only the prefix cache has: they can be taken"),
    _gauge("kv_blocks_free", "", "KV blocks with nothing in them"),
    _gauge("kv_blocks", "", "KV blocks: used + cached + free"),
    _counter("kv_moved_out", "requests", "requests whose KV went to host memory"),
    _counter("kv_moved_in", "requests", "requests whose KV came back from there"),
    _counter("workers_replaced", "", "workers that died and were replaced, since the start"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in METRICS}

FINISH_REASONS = ("stop", "length", "abort", "error")
ERROR_KINDS = {
    "refused": "can never be served: add_request raised RequestError",
    "text": "its text hook raised",
    "not_finite": "the model's logits were no numbers, twice",
    "out_of_memory": "memory ran out, even for it alone",
    "worker_deaths": "three workers died while they served it, or one, and its stream could not go on",
}


def table_lines() -> list[str]:
    """The table in Markdown, for docs/metrics.md."""
    lines = ["| in stats | in Prometheus | kind | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        label = f"{{{metric.label}}}" if metric.label else ""
        lines.append(
            f"| `{metric.name}` | `{metric.exposed_name}{label}` | {metric.kind} | {metric.meaning} |"
        )
    return lines
