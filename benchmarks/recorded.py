"""What programs that count rounds over a model's own greedy answers have in common: the recorded answers, and
what a pass costs where weights are all that is read."""

from __future__ import annotations

from collections.abc import Sequence

from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit
from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError
from hispec.jobs.bench_inputs import TokenIds, generate, task_of
from hispec.jobs.rows import Row
from hispec.latency.model import LatencyModel, Linear
from hispec.llm import LLM
from hispec.profile.candidates import Candidates
from hispec.profile.plans import lookups_of
from hispec.profile.predict import Calibration
from hispec.profile.record_answers import record
from hispec.profile.recording import Answer, Recording
from hispec.profile.round_cost import PassTimes
from hispec.sampling_params import SamplingParams

PASSES_ALONE = Calibration(1, None, 1.0, 0.0, 0.0)  # a round takes what its passes do, and prompts nothing


def memory_bound(decoder: Decoder, exits: Sequence[AdapterExit]) -> PassTimes:
    """Shares of a plain step: a pass reads its layers, and a head where logits are asked for."""
    num_layers = decoder.config.num_layers
    head = decoder.head.num_bytes / decoder.num_bytes
    layer = (1.0 - head) / num_layers
    heads = {exit_.layer: exit_.num_bytes / decoder.num_bytes for exit_ in exits}
    costs = {"plain": 1.0}
    for lo in (0, *heads):
        costs[f"verify/{lo}"] = (num_layers - lo) * layer + head
        costs |= {f"check/{lo}-{hi}": (hi - lo) * layer + heads[hi] for hi in heads if hi > lo}
    for at, of_exit in heads.items():
        costs |= {f"draft/{at}": at * layer + of_exit, f"fill/{at}": at * layer, f"shadow/{at}": of_exit}
    return PassTimes(LatencyModel({name: Linear(constant_ms=cost) for name, cost in costs.items()}), 0)


def check_three_tiers(model: str, candidates: Candidates, plans: Sequence[SpeculativeConfig]) -> None:
    """Raises ConfigError if none of the plans has a check tier."""
    if all(plan.check is None for plan in plans):
        raise ConfigError(
            f"{model}: its exits, at {candidates.layers}, leave no room for a check tier; three tiers need"
            " one at layer 2 or above"
        )


def prompts_of(llm: LLM, rows: Sequence[Row]) -> list[TokenIds]:
    return [llm.encode(row.prompt, chat=row.is_chat) for row in rows]


def record_rows(
    llm: LLM,
    rows: Sequence[Row],
    candidates: Candidates,
    plans: Sequence[SpeculativeConfig],
    sampling: SamplingParams,
) -> Recording:
    """The greedy answers of `llm`, which decodes plainly, with all that `plans` need to know of them."""
    prompts, most = prompts_of(llm, rows), sampling.max_tokens or llm.engine.max_model_len
    answers = [
        Answer(prompt, output, min(most, llm.engine.max_model_len - len(prompt)), task_of(row))
        for prompt, output, row in zip(prompts, generate(llm, prompts, sampling), rows, strict=True)
    ]
    sizes, most_looked_up = lookups_of(plans)
    return record(
        llm.decoder,
        candidates.layers,
        candidates.exits,
        answers,
        ngrams=sizes,
        most_looked_up=most_looked_up,
        tables=candidates.tables,
        progress=True,
    )
