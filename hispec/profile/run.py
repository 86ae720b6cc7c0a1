"""`hispec profile` from a job to its result: answers, agreement, costs, predictions, and the best plans run
for real."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ee_models.decoder import Decoder

from ..config import SpeculativeConfig
from ..errors import ConfigError
from ..jobs.bench_inputs import TokenIds, good_rows, task_of, warm_up
from ..jobs.rows import count_rows
from ..jobs.schema import Job
from ..sampling_params import SamplingParams
from ..utils.environment import environment
from ..utils.files import write_atomically
from .candidates import Candidates, exits_folder, find_candidates, wants_shipped
from .costs import StageCosts, measure_costs
from .options import ProfileOptions, Targets
from .plans import Reach, all_plans
from .predict import Predictor, calibrate
from .record import record
from .recording import Answer, Recording
from .results import agreement, best_of_kind, measured_plans
from .search import best_by_layers, best_of_each_kind, search
from .timed_runs import check_served, generate_in_steps, time_plans

if TYPE_CHECKING:
    from ..llm import LLM


def profile_to_files(
    job: Job, options: ProfileOptions, targets: Targets, *, progress: bool = True
) -> dict[str, Any]:
    """As `run_profile`, and writes what `targets` asks for. Whatever fails, no file is left half-written."""
    targets.check()
    try:
        result = run_profile(job, options, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written.") from None
    if targets.json is not None:
        write_atomically(
            targets.json, (json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
        )
    if targets.preset is not None:
        from .preset import preset_text

        write_atomically(targets.preset, preset_text(job, result).encode())
    if targets.plots is not None:
        from .plots import draw_plots

        draw_plots(result, targets.plots)
    return result


def run_profile(job: Job, options: ProfileOptions, *, progress: bool = True) -> dict[str, Any]:
    """Measures and returns what `--json` writes.

    Raises ConfigError for a bad setting or input row, CheckpointError (ExitsError among them), and
    RequestError if a prompt can't be served; all of them before anything is measured.
    """
    count_rows(job.input)
    rows = good_rows(job)
    folder = exits_folder(options.exits, job.speculative)
    options = options.model_copy(
        update={"batch_size": min(options.batch_size or job.engine.max_num_seqs, len(rows))}
    )
    measured_on = environment()  # now, so that its load is that of others
    from ..llm import LLM

    assert options.batch_size is not None
    settings = job.engine.model_dump() | {"max_num_seqs": options.batch_size, "enable_prefix_caching": False}
    own = job.speculative
    # A draft model is loaded with the target, or refused; of trained exits others may be profiled than the
    # job's.
    with LLM(
        job.model, speculative=own if own is not None and own.draft.traits.has_model else None, **settings
    ) as llm:
        draft_model = llm.draft_models.load(own, llm.decoder, llm.tokenizer, llm.engine.max_model_len)
        llm.set_speculative(None)
        candidates = find_candidates(
            llm.trained_exits, llm.decoder, folder, must_be_trained=wants_shipped(own)
        )
        plans = all_plans(options, candidates, own)
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        session = Session(
            llm, llm.decoder, draft_model, candidates, plans, options, options.batch_size, progress
        )
        result = session.profile(prompts, [task_of(row) for row in rows], ignore_eos=job.sampling.ignore_eos)
    about = {
        "model": job.model,
        "date": datetime.date.today().isoformat(),
        "environment": measured_on,
        "options": options.model_dump(),
    }
    return (
        about
        | {
            "exits": candidates.as_dict(),
            "draft_model": own.draft.path if draft_model is not None and own is not None else None,
        }
        | result
    )


@dataclass(frozen=True)
class Session:
    """One profile of a loaded model."""

    llm: LLM
    decoder: Decoder
    draft_model: Decoder | None
    candidates: Candidates
    plans: Sequence[SpeculativeConfig]
    options: ProfileOptions
    batch_size: int
    progress: bool

    def profile(self, prompts: list[TokenIds], tasks: list[str], *, ignore_eos: bool) -> dict[str, Any]:
        """Everything of the result that has to do with the model."""
        options = self.options
        self._check_window()
        sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=ignore_eos)
        check_served(self.llm, prompts, sampling)
        warm_up(self.llm, prompts[: self.batch_size], sampling)
        outputs, steps = generate_in_steps(self.llm, prompts, sampling, progress=self.progress)
        room = self.llm.engine.max_model_len
        answers = [
            Answer(prompt, output, min(options.max_tokens, room - len(prompt)), task)
            for prompt, output, task in zip(prompts, outputs, tasks, strict=True)
        ]
        recording, costs = self._record(answers), self._costs(answers)
        calibration = calibrate(steps, costs, self.batch_size)
        share = self.draft_model.num_bytes / self.decoder.num_bytes if self.draft_model is not None else 0.0
        predictor = Predictor(
            recording, costs, calibration, self.batch_size, self.decoder.config.num_layers, share
        )
        predictions, num_predicted = search(predictor, self.plans)
        chosen = [predictor.predict(None), *best_of_each_kind(predictions, options.top)]
        plans = [prediction.plan for prediction in chosen]
        runs = time_plans(
            self.llm,
            plans,
            prompts,
            tasks,
            sampling,
            options.repeats,
            batch_size=self.batch_size,
            progress=self.progress,
        )
        measured = measured_plans(chosen, runs, self.decoder.config.num_layers)
        lengths = list(map(len, prompts))
        return {
            "num_layers": self.decoder.config.num_layers,
            "prompts": {
                "num": len(prompts),
                "tokens_min": min(lengths),
                "tokens_mean": statistics.fmean(lengths),
                "tokens_max": max(lengths),
            },
            "agreement": agreement(recording, self.candidates, options.max_drafts),
            "costs": costs.as_dict(),
            "calibration": asdict(calibration),
            "num_predicted": num_predicted,
            "predictions": [prediction.as_dict() for prediction in best_by_layers(predictions)],
            "measured": measured,
            "best": max(measured, key=lambda run: run["tokens_per_s"])["plan_text"],
            "best_of_kind": best_of_kind(measured),
            "row_invariant": self.llm.row_invariant,
        }

    def _record(self, answers: Sequence[Answer]) -> Recording:
        sizes = dict.fromkeys(sizes for plan in self.plans if (sizes := plan.draft.lookup) is not None)
        return record(
            self.decoder,
            self.candidates.layers,
            self.candidates.exits,
            answers,
            ngrams=list(sizes),
            most_looked_up=Reach.of(self.plans).lookup,
            draft_model=self.draft_model,
            batch_size=self.batch_size,
            progress=self.progress,
        )

    def _costs(self, answers: Sequence[Answer]) -> StageCosts:
        """Of rows in the middle of an average answer to an average prompt."""
        length = statistics.fmean(
            len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in answers
        )
        length = max(1, min(round(length), self.llm.engine.max_model_len - self.options.max_window))
        longest = max((answer.prompt_token_ids + answer.token_ids for answer in answers), key=len)
        context = (longest * -(-length // len(longest)))[:length]
        return measure_costs(
            self.decoder,
            self.candidates.layers,
            self.candidates.exits,
            context,
            batch_size=self.batch_size,
            reach=Reach.of(self.plans),
            draft_model=self.draft_model,
            progress=self.progress,
        )

    def _check_window(self) -> None:
        room, window = self.llm.engine.max_model_len, self.options.max_window
        if window >= room:
            raise ConfigError(
                f"max_window={window} leaves no room for a prompt in max_model_len={room}; lower max_window"
                " (and max_drafts), or raise engine.max_model_len"
            )
