"""`hispec profile --latency`: measures what stages of a job's model cost here, keeps it, and says how good it
is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from ee_models.checkpoint.exit_files import ExitsError
from ee_models.exits import AdapterExit

from ..config import SpeculativeConfig
from ..control.candidates import exit_layers, trained_path, uses_trained
from ..errors import ConfigError
from ..jobs.schema import Job
from ..latency.profile_file import LatencyProfile, StageCost, kept_path, save
from ..llm import LLM
from ..measure.latency import largest_window, measure_latency, subject_of
from ..utils.console import make_console, make_table, number, percent, print_if_busy
from ..utils.environment import hardware_text
from .options import Targets

_WINDOW = 32  # positions of a row's round, where the job says nothing of them
_COLUMNS: dict[str, Callable[[StageCost], str]] = {
    "constant": lambda stage: f"{stage.cost.least_ms:.3f}",
    "per token": lambda stage: f"{stage.token_ms:.4f}",
    "beyond tokens": lambda stage: f"{stage.knots[-1][0] if stage.knots else 0:g}",
    "per row": lambda stage: f"{stage.row_ms:.4f}",
    "per 1k context": lambda stage: f"{1e3 * stage.context_ms:.3f}",
    "per 1k pairs": lambda stage: f"{1e3 * stage.pair_ms:.4f}",
    "points": lambda stage: str(stage.num_points),
    "R²": lambda stage: number(stage.r2, 3),
    "mean error": lambda stage: percent(stage.mean_error),
}


def profile_latency(
    job: Job,
    path: Path | None,
    *,
    max_window: int | None = None,
    job_file: Path | None = None,
    progress: bool = True,
) -> tuple[LatencyProfile, Path]:
    """Measures the job's model with the exits and the draft model that its plans may use, and writes the
    profile -> it, and where it is.

    path        None = where it is kept for this model on this machine; not job_file, where the job is from
    max_window  places of a row's round at most; None = those of the job's plan
    Raises ConfigError and CheckpointError before anything is measured.
    """
    Targets(latency=path, job_file=job_file).check(job)
    if max_window is not None and max_window < 1:
        raise ConfigError(f"--max-window {max_window}: a round has one place at least; give 1 or more")
    own = job.speculative
    # The rows that are measured have KV of their own, and nothing is served meanwhile.
    settings = job.engine.model_dump() | {"num_kv_blocks": 1, "warm_up": False, "trace": None}
    with LLM(job.model, **settings) as llm:
        exits = _exits(llm, own)
        layers = [each.layer for each in exits] if exits or own is None else exit_layers(own, [])
        draft_model = llm.draft_models.load(own, llm.decoder, llm.tokenizer, llm.engine.max_model_len)
        place = path or kept_path(subject_of(llm.decoder, layers, exits, draft_model))
        Targets(latency=place, job_file=job_file).check(job)
        window = _window_of(own, llm.decoder.config.num_layers) if max_window is None else max_window
        profile = measure_latency(
            llm.decoder,
            layers,
            exits,
            max_num_seqs=job.engine.max_num_seqs,
            max_window=window,
            draft_model=draft_model,
            progress=progress,
        )
    save(profile, place)
    return profile, place


def _window_of(own: SpeculativeConfig | None, num_layers: int) -> int:
    """Places of a row's round at most, of all that the job's plan allows."""
    if own is None:
        return _WINDOW
    return largest_window(own) if own.control == "goodput" else own.plan(num_layers).window


def _exits(llm: LLM, speculative: SpeculativeConfig | None) -> list[AdapterExit]:
    """The trained exits that the job's plans may use; without a plan those that come with HiSpec, if there
    are any."""
    if speculative is not None and not uses_trained(speculative):
        return []
    path = None if speculative is None else trained_path(speculative)
    try:
        trained = llm.trained_exits.layers(path)
    except ExitsError:
        if speculative is not None:
            raise
        return []
    layers = trained if speculative is None else exit_layers(speculative, trained)
    return llm.trained_exits.load_layers(path, layers, llm.decoder)


def print_latency(profile: LatencyProfile, path: Path, file: IO[str] | None = None) -> None:
    """Prints a latency profile as a table, on stdout unless `file` is given."""
    console = make_console(file)
    console.print(
        f"{hardware_text(profile.subject.machine | profile.subject.versions)}; up to {profile.max_num_seqs}"
        " rows"
    )
    table = make_table("ms of a stage", *_COLUMNS)
    for name, stage in profile.stages.items():
        table.add_row(name, *(text_of(stage) for text_of in _COLUMNS.values()))
    console.print(table)
    console.print(
        "per token: beyond so many, below which a stage costs what was measured of each number. context:"
        " positions attended to, of all rows; pairs: of a token and such a position. R² and mean error are of"
        " points that were held out."
    )
    console.print(f"{len(profile.points)} passes timed in {profile.seconds:.0f} s; {path}")
    if poor := profile.poor_stages():
        console.print(
            f"Costs of these stages are not well foretold: {', '.join(poor)}. Measure again on a quiet"
            " machine."
        )
    print_if_busy(console, profile.subject.machine | {"load": profile.load}, "costs")
