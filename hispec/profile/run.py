"""`hispec profile` from a job to its result: answers, agreement, latency profile, predictions, and the best
plans run for real."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ee_models.decoder import Decoder

from ..config import SpeculativeConfig
from ..control.candidates import trained_paths
from ..errors import ConfigError
from ..jobs.bench_inputs import TokenIds, good_rows, task_of, warm_up
from ..jobs.rows import count_rows
from ..jobs.schema import Job
from ..loading.target_model import select_device
from ..loading.whole_paths import with_whole_paths
from ..measure.latency import check_room, measure_latency
from ..measure.yardstick import Yardstick
from ..sampling_params import SamplingParams
from ..utils.environment import environment, watch_others
from ..utils.files import write_atomically, write_json
from .candidates import Candidates, exits_folder, find_candidates
from .options import ProfileOptions, Targets
from .plans import all_plans, lookups_of
from .predict import Predictor, best_by_layers, best_of_each_kind, calibrate, search
from .record_answers import record
from .recording import Answer
from .results import agreement, best_of_kind, choose, measured_plans
from .round_cost import PassTimes
from .timed_runs import check_served, generate_in_steps, one_engine, time_plans

if TYPE_CHECKING:
    from ..llm import LLM


def profile_to_files(
    job: Job, options: ProfileOptions, targets: Targets, *, progress: bool = True
) -> dict[str, Any]:
    """As `run_profile`, and writes what `targets` asks for. Whatever fails, no file is left half-written."""
    targets.check(job)
    try:
        result = run_profile(job, options, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Nothing was written; the same command starts again") from None
    if targets.json is not None:
        write_json(targets.json, result)
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
    # Now, so that its load is that of others.
    measured_on, others = environment(select_device(job.engine.device)), watch_others()
    from ..llm import LLM

    settings = job.engine.model_dump() | {
        "max_num_seqs": options.batch_size,
        "enable_prefix_caching": False,
        "trace": None,  # that of the job is of its own rows
    }
    own = with_whole_paths(job.speculative)
    # A draft model is loaded with the target, or refused; of trained exits others may be profiled than the
    # job's.
    with LLM(
        job.model,
        speculative=_fixed(own) if own is not None and own.draft.traits.has_model else None,
        scheduling=job.scheduling,
        **settings,
    ) as llm:
        if own is not None:  # raises ConfigError for layers that the model lacks, which are not run here
            own.plan(llm.decoder.config.num_layers)
        draft_model = llm.draft_models.load(own, llm.decoder, llm.tokenizer, llm.engine.max_model_len)
        llm.set_speculative(None)
        # None: as many as there is room for, which the admission knows.
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=options.max_tokens or job.sampling.max_tokens,
            ignore_eos=job.sampling.ignore_eos,
        )
        candidates = find_candidates(
            llm.engine.pretrained, folder, own, must_be_trained=None in trained_paths(own)
        )
        plans = all_plans(options, candidates, own)
        prompts = [llm.encode(row.prompt, chat=row.is_chat) for row in rows]
        check_served(llm, prompts, sampling)
        most = max(llm.engine.admission.most_tokens(len(prompt), sampling) for prompt in prompts)
        options = options.model_copy(update={"max_tokens": most})
        session = Session(llm, draft_model, candidates, plans, options, progress)
        result = session.profile(prompts, [task_of(row) for row in rows], sampling)
    return {
        "model": job.model,
        "date": datetime.date.today().isoformat(),
        "environment": measured_on | {"others": others()},
        "options": options.model_dump(),
        "exits": candidates.as_dict(),
        "draft_model": own.draft.path if draft_model is not None and own is not None else None,
        **result,
    }


def _fixed(own: SpeculativeConfig) -> SpeculativeConfig:
    """The plan without a controller, for which a latency profile would be measured that nothing here uses."""
    return own.model_copy(update={"control": "fixed", "goodput": None})


@dataclass(frozen=True)
class Session:
    """The profile of one loaded model: what is measured, and with which plans."""

    llm: LLM
    draft_model: Decoder | None
    candidates: Candidates
    plans: Sequence[SpeculativeConfig]
    options: ProfileOptions
    progress: bool

    def profile(self, prompts: list[TokenIds], tasks: list[str], sampling: SamplingParams) -> dict[str, Any]:
        """The part of the result that is measured or predicted with the model; it can serve all prompts."""
        llm, decoder, options, progress = self.llm, self.llm.decoder, self.options, self.progress
        engine, batch_size = one_engine(llm), options.batch_size or 1
        self._check_window()
        warm_up(llm, prompts[:batch_size], sampling)
        yard = decoder, prompts, options.max_tokens or 1, batch_size, options.max_window
        with Yardstick(*yard) as yardstick:
            outputs, steps = generate_in_steps(
                llm, prompts, sampling, progress=progress, between=yardstick.measure
            )
        answers = [
            Answer(prompt, output, engine.admission.most_tokens(len(prompt), sampling), task)
            for prompt, output, task in zip(prompts, outputs, tasks, strict=True)
        ]
        ngrams, most_looked_up = lookups_of(self.plans)
        recording = record(
            decoder,
            self.candidates.layers,
            self.candidates.exits,
            answers,
            ngrams=ngrams,
            most_looked_up=most_looked_up,
            tables=self.candidates.tables,
            draft_model=self.draft_model,
            batch_size=batch_size,
            progress=progress,
        )
        latency = measure_latency(
            decoder,
            self.candidates.layers,
            self.candidates.exits,
            max_num_seqs=batch_size,
            max_window=options.max_window,
            max_context=max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers),
            draft_model=self.draft_model,
            progress=progress,
        )
        # Of rows in the middle of an average answer to an average prompt.
        context_len = round(
            statistics.fmean(len(answer.prompt_token_ids) + len(answer.token_ids) / 2 for answer in answers)
        )
        times, num_layers = PassTimes(latency.model(), context_len), decoder.config.num_layers
        calibration = calibrate(
            steps,
            times,
            batch_size,
            engine.max_run_ms,
            links=decoder.passes is not None,
            max_prefill_tokens=engine.max_prefill_tokens,
            drift=yardstick.drift(latency.model()),
        )
        predictor = Predictor(
            recording,
            times,
            calibration,
            batch_size,
            num_layers,
            draft_model_share=self.draft_model.num_bytes / decoder.num_bytes if self.draft_model else 0.0,
        )
        predictions, num_predicted = search(predictor, self.plans)
        chosen = [predictor.predict(None), *best_of_each_kind(predictions, options.top)]
        with Yardstick(*yard) as yardstick:
            runs = time_plans(
                llm,
                [prediction.plan for prediction in chosen],
                prompts,
                tasks,
                sampling,
                options.repeats,
                batch_size=batch_size,
                progress=progress,
                between=yardstick.measure_all,
            )
        # The machine's speed has changed since stages were timed, and is no fault of what was predicted.
        meanwhile = yardstick.drift(latency.model())
        then = predictor.during(meanwhile)
        chosen = [then.predict(each.plan) for each in chosen]
        measured = measured_plans(chosen, runs, num_layers)
        best, best_reason = choose(measured)
        lengths = list(map(len, prompts))
        return {
            "num_layers": num_layers,
            "prompts": {
                "num": len(prompts),
                "tokens_min": min(lengths),
                "tokens_mean": statistics.fmean(lengths),
                "tokens_max": max(lengths),
            },
            "agreement": agreement(recording, self.candidates, options.max_drafts),
            "costs": {
                "context_len": context_len,
                **latency.model_dump(mode="json", include={"stages", "is_static", "row_buckets"}),
            },
            "calibration": asdict(calibration),
            "drift": asdict(meanwhile),
            "num_predicted": num_predicted,
            "predictions": [prediction.as_dict() for prediction in best_by_layers(predictions)],
            "measured": measured,
            "best": best["plan_text"],
            "best_reason": best_reason,
            "best_of_kind": best_of_kind(measured),
            "row_invariant": llm.row_invariant,
        }

    def _check_window(self) -> None:
        room, window = self.llm.engine.max_model_len, self.options.max_window
        check_room(room)
        if window >= room:
            raise ConfigError(
                f"max_window={window} leaves no room for a prompt in max_model_len={room}; lower max_window"
                " (and max_drafts), or raise engine.max_model_len"
            )
