"""The loop that the recipes share: steps, learning rate, evaluation, checkpoints that survive a kill.

Everything random is a function of (seed, step), so a run on a CPU that is resumed from a checkpoint gives the
same weights as one that was never interrupted; on a GPU up to the order of sums in its attention's gradients.
Devices, processes and mixed precision are accelerate's work.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..errors import TrainingError
from .settings import LoopSettings

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter
LOG = "log.jsonl"
_BETAS = 0.9, 0.95  # of AdamW
_ANEW = "output.overwrite=true output.resume=false"
_RECENT = 25  # steps by which the speed is told while it runs
Metrics = dict[str, float]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose gradients are clipped together, at `lr_scale` times the run's learning rate."""

    parameters: list[nn.Parameter]
    lr_scale: float = 1.0


class Task(Protocol):
    """A model to train and its data. `module.forward(micro_batch)` returns (loss, metrics): a scalar tensor
    and a dict of them; those of a step's micro-batches, of one process, add up to the step's mean over
    predicting positions.

    parameter_groups   one per exit, so that exits trained together get the weights that each would have got
                       alone
    """

    @property
    def module(self) -> nn.Module: ...

    def parameter_groups(self) -> list[ParameterGroup]: ...

    def compile_layers(self) -> None:
        """Has what repeats in the module compiled; raises TrainingError, see `compile_methods`."""

    def micro_batches(self, step: int, rank: int, num_ranks: int, device: torch.device) -> Sequence[Any]:
        """What process `rank` of `num_ranks` is to pass through in optimizer step `step`, at least one: a
        function of these and the seed."""

    def num_places(self, micro_batch: Any) -> int:
        """Its predicting positions."""

    def num_tokens(self, micro_batch: Any) -> int:
        """Its tokens, padding left out."""

    def evaluate(self, device: torch.device) -> Metrics:
        """Figures on held-out data, which training never sees."""


@dataclass(frozen=True)
class Outcome:
    """steps_run: steps of this run, without those before a resume; step: how many there are with these;
    metrics: of the last evaluation; tokens_per_s: in the median step of this run, without evaluations; of
    several processes, about; None without any step."""

    steps_run: int
    step: int
    seconds: float
    metrics: Metrics
    tokens_per_s: float | None = None


def train(
    task: Task,
    settings: LoopSettings,
    folder: Path,
    identity: str,
    *,
    cpu: bool,
    resume: bool,
    only_evaluate: bool = False,
    progress: bool = True,
    forget: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains `task` to the last step; checkpoints and a log of evaluations go to `folder`.

    identity   tells this run from any other: a checkpoint is resumed only if it was written under the same
    resume     go on from the checkpoint in `folder`, if there is one; otherwise one that is there is an error
    only_evaluate   take no further step; without a checkpoint to evaluate that is an error
    forget     removes what an earlier training has reached; called once nothing is refused any more
    Raises TrainingError; whatever is raised, the last checkpoint on disk is whole.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # or the first precision that a process trained in would be its last
    if settings.compile:
        task.compile_layers()
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=cpu, mixed_precision=settings.mixed_precision)
    for stale in folder.glob(f".{CHECKPOINT}.*") if accelerator.is_main_process else ():
        with suppress(OSError):  # of a process that was killed, and as large as a checkpoint
            stale.unlink()
    forget()
    module = accelerator.prepare(task.module)
    groups = task.parameter_groups()
    optimizer = torch.optim.AdamW(
        [{"params": group.parameters} for group in groups],
        lr=settings.learning_rate,
        betas=_BETAS,
        weight_decay=settings.weight_decay,
    )
    task.module.train()
    step = _restore(task.module, optimizer, folder / CHECKPOINT, identity, resume)
    if only_evaluate and step == 0:
        raise TrainingError(f"{folder} has no checkpoint yet; train up to the first one")
    first, started, metrics = step, time.perf_counter(), Metrics()
    rank, num_ranks, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    if accelerator.is_main_process and not only_evaluate:
        _rewind_log(folder, step)
    shows = progress and accelerator.is_main_process
    rates: list[float] = []
    with progress_bar("training", "step", settings.num_steps, step, shows) as bar:
        while step < settings.num_steps and not only_evaluate:
            for group, of_group in zip(groups, optimizer.param_groups, strict=True):
                of_group["lr"] = group.lr_scale * settings.learning_rate_at(step)
            began = time.perf_counter()
            parts = task.micro_batches(step, rank, num_ranks, device)
            weight = _weight_of(accelerator, sum(map(task.num_places, parts)))
            values = _accumulate(accelerator, module, parts, step, weight)
            norms = [nn.utils.clip_grad_norm_(group.parameters, settings.max_grad_norm) for group in groups]
            # Checked before it can reach the weights, and with them a checkpoint.
            if not bool(torch.isfinite(torch.stack(norms)).all()):
                raise _diverged(f"the gradient of step {step} is not finite")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            num_tokens = num_ranks * sum(map(task.num_tokens, parts))  # about: ranks have other examples
            rates.append(num_tokens / max(time.perf_counter() - began, 1e-9))
            shown = " ".join(f"{name} {value:.3g}" for name, value in values.items())
            shown += f" {statistics.median(rates[-_RECENT:]):.0f} tokens/s"
            bar.set_postfix_str(shown, refresh=False)
            bar.update()
            if step == settings.num_steps or step % settings.eval_every == 0:
                metrics = _evaluate(task, accelerator)
                _log(folder, step, metrics, accelerator, bar)
            if step == settings.num_steps or step % settings.checkpoint_every == 0:
                if accelerator.is_main_process:
                    _save(task.module, optimizer, folder / CHECKPOINT, identity, step)
                accelerator.wait_for_everyone()
    if not metrics:
        metrics = _evaluate(task, accelerator)
    seconds = time.perf_counter() - started
    return Outcome(step - first, step, seconds, metrics, statistics.median(rates) if rates else None)


def _weight_of(accelerator: Accelerator, num_places: int) -> float:
    """What this process's loss, a mean over its positions, counts in that of a step, which is the mean over
    the positions of all processes, though gradients are averaged over processes."""
    if accelerator.num_processes == 1:
        return 1.0
    own = torch.tensor(float(num_places), device=accelerator.device)
    return float(own / accelerator.reduce(own, "mean"))


def _accumulate(
    accelerator: Accelerator, module: nn.Module, parts: Sequence[Any], step: int, weight: float
) -> Metrics:
    """Adds up the gradients of a step's micro-batches -> their metrics, added up. Raises TrainingError."""
    values = defaultdict[str, float](float)
    for number, part in enumerate(parts, start=1):
        # Processes exchange gradients once a step, with the last.
        with nullcontext() if number == len(parts) else accelerator.no_sync(module):
            with accelerator.autocast():
                loss, of_part = module(part)
            if not bool(torch.isfinite(loss)):
                raise _diverged(f"the loss of step {step} is {float(loss.detach())}")
            accelerator.backward(loss if weight == 1.0 else weight * loss)
        for name, value in of_part.items():
            values[name] += float(value)
    return values


def _diverged(what: str) -> TrainingError:
    return TrainingError(f"{what}; lower loop.learning_rate, and start anew with {_ANEW}")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a path beside `path`, then moves what it wrote into place: `path` is never
    half-written.

    Raises TrainingError if the disk is full or not writable; what was at `path` is then still there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        with draft.open("rb") as written:  # or a power failure could leave a name without what it names
            os.fsync(written.fileno())
        os.replace(draft, path)
    except (OSError, SafetensorError) as error:
        kept = "; the previous one is unharmed" if path.exists() else ""
        raise TrainingError(
            f"cannot write {path}: {error}{kept}; free some space, or choose another folder"
        ) from error
    finally:  # after an interrupt, too: nobody would remove it later, and it is as large as a checkpoint
        with suppress(OSError):
            draft.unlink()


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _save(module: nn.Module, optimizer: torch.optim.Optimizer, path: Path, identity: str, step: int) -> None:
    """Weights and the optimizer's two moments of each, in one file without pickles."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trainable(module).items():
        tensors[name] = parameter.detach().contiguous()
        state = optimizer.state[parameter]
        tensors |= {f"{name}:{moment}": state[moment].contiguous() for moment in _MOMENTS}
    write_atomically(path, lambda draft: save_file(tensors, draft, {"identity": identity, "step": str(step)}))


def _restore(
    module: nn.Module, optimizer: torch.optim.Optimizer, path: Path, identity: str, resume: bool
) -> int:
    """Loads the checkpoint at `path`, if there is one -> the number of steps done by then."""
    if not path.exists():
        return 0
    if not resume:
        raise TrainingError(
            f"{path} exists: set output.resume=true to go on from it, {_ANEW} to start anew, or choose"
            " another output.path"
        )
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("identity") != identity:
                raise TrainingError(
                    f"{path} belongs to another run (other data, model or settings); set"
                    f" {_ANEW} to start anew, or choose another output.path"
                )
            step = int(about["step"])
            with torch.no_grad():
                for name, parameter in _trainable(module).items():
                    parameter.copy_(file.get_tensor(name))
                    moments = {
                        moment: file.get_tensor(f"{name}:{moment}").to(parameter.device)
                        for moment in _MOMENTS
                    }
                    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    except TrainingError:
        raise
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); set {_ANEW} to start anew") from error
    return step


def _evaluate(task: Task, accelerator: Accelerator) -> Metrics:
    task.module.eval()
    with torch.no_grad(), accelerator.autocast():
        metrics = task.evaluate(accelerator.device)
    task.module.train()
    return metrics


def _log(folder: Path, step: int, metrics: Metrics, accelerator: Accelerator, bar: tqdm[Any]) -> None:
    """Writes the metrics of an evaluation to the log and above the bar. Raises TrainingError."""
    if not accelerator.is_main_process:
        return
    try:
        with (folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
    except OSError as error:
        raise TrainingError(
            f"cannot write {folder / LOG}: {error}; free some space, and go on with output.resume=true"
        ) from error
    figures = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    bar.write(f"step {step}: {figures}", file=sys.stderr)


def _rewind_log(folder: Path, step: int) -> None:
    """Takes out of the log what was evaluated after `step`, from which a run goes on and will be evaluated
    again. Raises TrainingError."""

    def is_kept(line: str) -> bool:
        try:
            return line.endswith("\n") and bool(json.loads(line)["step"] <= step)
        except (ValueError, TypeError, KeyError):
            return False

    path = folder / LOG
    if not path.is_file():
        return
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error}; mend that, or delete it") from error
    kept = list(filter(is_kept, lines))  # not half a line, of a process that was killed
    if len(kept) < len(lines):
        write_atomically(path, lambda draft: draft.write_text("".join(kept), encoding="utf-8"))


def progress_bar(desc: str, unit: str, total: int, done: int, shows: bool) -> tqdm[Any]:
    """A bar on stderr that stands at `done` of `total`; a log file gets a line of it every 30 seconds."""
    interval = 0.5 if sys.stderr.isatty() else 30.0
    look: dict[str, Any] = {"mininterval": interval, "file": sys.stderr, "dynamic_ncols": True}
    return tqdm(desc=desc, unit=unit, total=total, initial=done, disable=not shows, **look)
