"""`hispec profile` from a job to its result: answers, agreement, costs, predictions, and the best plans run for real."""
from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ee_models.decoder import Decoder

from ..config import PLAIN
from ..errors import ConfigError
from ..jobs.environment import environment
from ..jobs.measure import TokenIds, good_rows, task_of, warm_up
from ..jobs.rows import count_rows
from ..jobs.schema import Job
from ..jobs.stats import plan_text
from ..sampling_params import SamplingParams
from .candidates import Candidates, exits_folder, find_candidates, wants_shipped
from .costs import StageCosts, measure_costs
from .files import Targets, write_atomically
from .options import ProfileOptions
from .predict import Prediction, Predictor, calibrate
from .recording import Answer, Recording, record
from .runs import PlanRuns, check_served, generate_in_steps, time_plans

if TYPE_CHECKING:
    from ..llm import LLM


def profile_to_files(job: Job, options: ProfileOptions, targets: Targets, *, progress: bool = True) -> dict[str, Any]:
    """As `run_profile`, and writes what `targets` asks for. Whatever fails, no file is left half-written."""
    targets.check()
    try:
        result = run_profile(job, options, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written.") from None
    if targets.json is not None:
        write_atomically(targets.json, (json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    if targets.preset is not None:
        from .preset import preset_text

        write_atomically(targets.preset, preset_text(job, result).encode())
    if targets.plots is not None:
        from .plots import draw_plots

        draw_plots(result, targets.plots)
    return result


def run_profile(job: Job, options: ProfileOptions, *, progress: bool = True) -> dict[str, Any]:
    """Measures and returns what `--json` writes.

    Raises ConfigError for a bad setting or input row, CheckpointError (ExitsError among them), and RequestError if a
    prompt can't be served; all of them before anything is measured.
    """
    count_rows(job.input)
    rows = good_rows(job)
    folder = exits_folder(options.exits, job.speculative)
    options = options.model_copy(update={"batch_size": min(options.batch_size or job.engine.max_num_seqs, len(rows))})
    measured_on = environment()  # now, so that its load is that of others
    from ..llm import LLM

    assert options.batch_size is not None
    settings = job.engine.model_dump() | {"max_num_seqs": options.batch_size, "enable_prefix_caching": False}
    llm = LLM(job.model, **settings)
    try:
        candidates = find_candidates(llm.trained_exits, llm.decoder, folder, must_be_trained=wants_shipped(job.speculative))
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        session = Session(llm, llm.decoder, candidates, options, options.batch_size, progress)
        result = session.profile(prompts, [task_of(row) for row in rows], ignore_eos=job.sampling.ignore_eos)
    finally:
        llm.close()
    about = {"model": job.model, "date": datetime.date.today().isoformat(), "environment": measured_on, "options": options.model_dump()}
    return about | {"exits": candidates.as_dict()} | result


@dataclass(frozen=True)
class Session:
    """One profile of a loaded model."""

    llm: LLM
    decoder: Decoder
    candidates: Candidates
    options: ProfileOptions
    batch_size: int
    progress: bool

    def profile(self, prompts: list[TokenIds], tasks: list[str], *, ignore_eos: bool) -> dict[str, Any]:
        """Everything of the result that has to do with the model."""
        options, num_layers = self.options, self.decoder.config.num_layers
        self._check_window()
        sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=ignore_eos)
        check_served(self.llm, prompts, sampling)
        warm_up(self.llm, prompts[: self.batch_size], sampling)
        outputs, steps = generate_in_steps(self.llm, prompts, sampling, progress=self.progress)
        room = self.llm.engine.max_model_len
        answers = [
            Answer(prompt, output, min(options.max_tokens, room - len(prompt)), task) for prompt, output, task in zip(prompts, outputs, tasks, strict=True)
        ]
        recording = record(self.decoder, self.candidates.layers, self.candidates.exits, answers, progress=self.progress)
        costs = self._costs(answers)
        calibration = calibrate(steps, costs, self.batch_size)
        predictor = Predictor(recording, costs, calibration, self.batch_size, num_layers)
        predictions = predictor.predict_all(options.plans(self.candidates.layers))
        chosen = [predictor.predict(PLAIN), *best_of_each_kind(predictions, options.top)]
        plans = [self.candidates.speculative(prediction.plan) for prediction in chosen]
        runs = time_plans(self.llm, plans, prompts, sampling, options.repeats, batch_size=self.batch_size, progress=self.progress)
        measured = measured_plans(chosen, runs, num_layers)
        lengths = list(map(len, prompts))
        return {
            "num_layers": num_layers,
            "prompts": {"num": len(prompts), "tokens_min": min(lengths), "tokens_mean": statistics.fmean(lengths), "tokens_max": max(lengths)},
            "agreement": agreement(recording, self.candidates, options.max_drafts),
            "costs": costs.as_dict(),
            "calibration": asdict(calibration),
            "predictions": [prediction.as_dict() for prediction in predictions],
            "measured": measured,
            "best": max(measured, key=lambda run: run["tokens_per_s"])["plan_text"],
            "row_invariant": self.llm.row_invariant,
        }

    def _costs(self, answers: Sequence[Answer]) -> StageCosts:
        """Of rows in the middle of an average answer to an average prompt."""
        length = statistics.fmean(len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in answers)
        length = max(1, min(round(length), self.llm.engine.max_model_len - self.options.max_window))
        longest = max((answer.prompt_token_ids + answer.token_ids for answer in answers), key=len)
        context = (longest * -(-length // len(longest)))[:length]
        return measure_costs(
            self.decoder,
            self.candidates.layers,
            self.candidates.exits,
            context,
            batch_size=self.batch_size,
            max_drafts=self.options.max_drafts,
            max_window=self.options.max_window,
            progress=self.progress,
        )

    def _check_window(self) -> None:
        room, window = self.llm.engine.max_model_len, self.options.max_window
        if window >= room:
            raise ConfigError(
                f"max_window={window} leaves no room for a prompt in max_model_len={room}; lower max_window (and max_drafts), or raise engine.max_model_len"
            )


def best_of_each_kind(predictions: Sequence[Prediction], top: int) -> list[Prediction]:
    """The first `top` of two tiers, then the first `top` of three; `predictions` has the fastest first."""
    two = [prediction for prediction in predictions if prediction.plan.check_layer is None]
    three = [prediction for prediction in predictions if prediction.plan.check_layer is not None]
    return two[:top] + three[:top]


def agreement(recording: Recording, candidates: Candidates, max_drafts: int) -> dict[str, Any]:
    """Of each candidate, and of the model's own head after every layer; `full_model`: how much of the answers the pass itself gives."""
    tasks = recording.tasks()

    def shares(layer: int, tokens: Any) -> dict[str, Any]:
        by_task = {task: recording.agreement(tokens, task) for task in tasks}
        return {"layer": layer, "agreement": recording.agreement(tokens), "tasks": by_task}

    exits = [
        {"kind": candidates.kind, **shares(layer, tokens), "first_right": recording.first_right(tokens, max_drafts)} for layer, tokens in recording.said.items()
    ]
    *own, full = recording.own.items()
    return {
        "positions": int(recording.lengths.sum()),
        "tasks": {task: int(recording.places(task).sum()) for task in tasks},
        "exits": exits,
        "own_head": [shares(layer, tokens) for layer, tokens in own],
        "full_model": recording.agreement(full[1]),
    }


def measured_plans(chosen: Sequence[Prediction], runs: Sequence[PlanRuns], num_layers: int) -> list[dict[str, Any]]:
    """What was predicted of each plan that was run, and what came out; the first is plain decoding."""
    plain = runs[0]
    return [
        {
            "plan_text": plan_text(run.speculative, num_layers),
            "speculative": run.speculative.model_dump() if run.speculative else None,
            "tokens_per_s": run.tokens_per_s,
            "tokens_per_s_runs": run.tokens_per_s_runs,
            "seconds_runs": run.seconds,
            "tokens_per_round": run.tokens_per_round,
            "tokens_per_full_pass": run.stats["tokens"] * num_layers / run.stats["layer_passes"],
            "ratio_to_plain": run.tokens_per_s / plain.tokens_per_s,
            "exact_match": [run.num_identical(plain.outputs[0]), len(plain.outputs[0])],
            "predicted": prediction.as_dict(),
        }
        for prediction, run in zip(chosen, runs, strict=True)
    ]
