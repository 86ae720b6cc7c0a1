"""Measures what every stage of a model costs on this machine, for controllers, simulations and the scheduler
[SmartSpec §4.2]."""

from __future__ import annotations

import datetime
import itertools
import logging
import platform
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ee_models.decoder import Decoder
from ee_models.exits import AdapterExit

from ..config import GoodputConfig, SpeculativeConfig
from ..control.candidates import exit_layers
from ..errors import ConfigError
from ..latency.fit import LEAST_POINTS, Point
from ..latency.joint_fit import cold_stages, fit_profile
from ..latency.model import LatencyModel
from ..latency.profile_file import Facts, LatencyProfile, StageCost, Subject, TimedPass, kept_path, load, save
from ..runner.buckets import row_buckets
from ..runner.cuda_graphs import GraphDevice
from ..utils.devices import on_device
from ..utils.environment import environment
from ..utils.files import expanded
from ..version import __version__
from .round_overhead import overheads
from .stage_bench import Rig, blocks_of
from .timing import Timed, quiet_times

_log = logging.getLogger(__name__)
_SAMPLES = 9
_BUDGET_S = 60.0  # that timing may take, as far as a first look at each pass leaves any
_LEAST_CONTEXT, _LEAST_ROOM = 8, 16  # positions
_MOST_LOOKED_UP = 8  # drafts of a proposal: a proposal costs next to nothing, whatever their number
_SHAPES_APART = 3  # where passes are fitted together, each stage has one wide shape of so many, in turn
_PERIOD = 61  # of the context: text that prompt lookup finds something in


@dataclass(frozen=True)
class Grid:
    """Sizes at which passes are measured.

    rows          of narrow passes, one position each; wide_rows: of those with more
    positions     of a row in a wide pass; most_tokens: of all rows
    contexts      tokens of every row, the shortest and the longest; most_kv: positions of all rows
    """

    rows: tuple[int, ...]
    wide_rows: tuple[int, ...]
    positions: tuple[int, ...]
    most_tokens: int
    contexts: tuple[int, int]
    most_kv: int

    @staticmethod
    def of(max_num_seqs: int, max_window: int, max_positions: int, *, is_cuda: bool, is_static: bool) -> Grid:
        """Sizes whose passes take a CPU at most a third of a second and leave a GPU room for their logits,
        within a few GB of KV."""
        most_kv = 2**15 if is_cuda else 2**13
        most_tokens = Grid.most_tokens_of(is_cuda=is_cuda)
        all_rows = sorted(row_buckets(max_num_seqs)) if is_static else list(range(1, max_num_seqs + 1))
        widest = Grid.widest(max_window, max_positions, is_cuda=is_cuda)
        positions = _powers(2, widest) if is_static else _ladder(widest)
        longest = Grid.longest(positions[-1], max_positions, is_cuda=is_cuda)
        shortest = min(longest, max(_LEAST_CONTEXT, min(64, longest // 8)))
        most_kv = max(most_kv, max_num_seqs * shortest)
        rows, wide_rows = _among(all_rows, 2), _among(all_rows, 4)
        return Grid(rows, wide_rows, positions, most_tokens, (shortest, longest), most_kv)

    @staticmethod
    def most_tokens_of(*, is_cuda: bool) -> int:
        return 2048 if is_cuda else 128

    @staticmethod
    def widest(max_window: int, max_positions: int, *, is_cuda: bool) -> int:
        """Positions of a row in the widest pass."""
        return min(max_window, Grid.most_tokens_of(is_cuda=is_cuda), max_positions - _LEAST_CONTEXT)

    @staticmethod
    def longest(widest: int, max_positions: int, *, is_cuda: bool) -> int:
        """Context tokens of a row at most, with room for the widest pass after them."""
        return min(4096 if is_cuda else 512, max_positions - widest)

    def context(self, rows: int, is_long: bool) -> int:
        """Context tokens of each of so many rows: the shortest, or the longest that memory allows."""
        shortest, longest = self.contexts
        return max(shortest, min(longest, self.most_kv // rows)) if is_long else shortest

    def narrow(self) -> Iterator[tuple[int, int]]:
        """(rows, context) of narrow passes."""
        return (
            (rows, context)
            for rows in self.rows
            for context in {self.context(rows, is_long) for is_long in (False, True)}
        )

    def wide(self) -> Iterator[tuple[int, int, int]]:
        """(rows, positions of each, context) of wide passes: of a few rows all sizes, of more the largest and
        some below it; where they take long, contexts take turns."""
        shapes = []
        for at, rows in enumerate(self.wide_rows):
            fitting = [q_len for q_len in self.positions if q_len == 1 or rows * q_len <= self.most_tokens]
            shapes += [(rows, q_len) for q_len in (fitting[::-2] if at else fitting)]
        for at, (rows, q_len) in enumerate(shapes):
            is_quick = 8 * rows * q_len <= self.most_tokens
            for context in {
                self.context(rows, is_long) for is_long in ((False, True) if is_quick else (at % 2 == 0,))
            }:
                yield rows, q_len, context


def measure_latency(
    decoder: Decoder,
    layers: Sequence[int],
    exits: Sequence[AdapterExit] = (),
    *,
    max_num_seqs: int,
    max_window: int,
    max_context: int | None = None,
    draft_model: Decoder | None = None,
    progress: bool = False,
    graph_device: GraphDevice | None = None,
) -> LatencyProfile:
    """Times all stages that `LatencyModel` names, for exits at `layers`.

    exits         the trained ones among them; the others are read through the model's own head
    max_num_seqs  rows of a round at most; max_window: places of a row in a round
    max_context   positions that a row attends to at most; None = as many as there is room for
    graph_device  where rounds of static shapes are captured; None = on a GPU there, on a CPU rounds are
                  packed
    Raises ConfigError for sizes below 1. Memory is taken for max_num_seqs rows of a short context, and given
    back.
    """
    _check_sizes(max_num_seqs, max_window, layers, exits, decoder)
    started, about = time.monotonic(), environment(decoder.device)
    is_cuda = decoder.device.type == "cuda"
    is_static = is_cuda or graph_device is not None
    room = _room(decoder, draft_model)
    if max_context is not None:
        room = max(_LEAST_ROOM, min(room, max_context + max_window))
    grid = Grid.of(max_num_seqs, max_window, room, is_cuda=is_cuda, is_static=is_static)
    rng, window = random.Random(0), max(grid.positions[-1], _MOST_LOOKED_UP + 1)
    words = [rng.randrange(decoder.config.vocab_size) for _ in range(_PERIOD)]
    sizes = [*grid.narrow(), *((rows, context) for rows, _, context in grid.wide()), (1, grid.contexts[1])]
    needed = max(rows * blocks_of(context, window) for rows, context in sizes)
    length = grid.context(max_num_seqs, True)
    while max_num_seqs * blocks_of(length, window) < needed:
        length += 1
    context = (words * grid.contexts[1])[: min(room, length)]  # beyond it a model has no positions
    with on_device(decoder.device), ExitStack() as rigs:
        rig = Rig(decoder, exits, context, max_num_seqs, window, graph_device, written=())
        rigs.callback(rig.close)
        of_model = None
        if draft_model is not None:
            of_model = Rig(draft_model, [], context, max_num_seqs, window, graph_device)
            rigs.callback(of_model.close)
        passes = dict(_passes(rig, of_model, layers, exits, grid))
        ms = quiet_times(
            passes,
            decoder.device,
            samples=_SAMPLES,
            what="latency",
            progress=progress,
            budget_s=_BUDGET_S,
            often=[key for key in passes if key[0] == "plain"],
        )
        points = [Point(*key, ms=max(value, 1e-4)) for key, value in ms.items()]
    with on_device(decoder.device):
        points += [
            Point("round", rows, rows, 0, ms=max(value, 1e-4))
            for rows, value in overheads(decoder, grid.rows, is_static, graph_device).items()
        ]
    subject = subject_of(decoder, layers, exits, draft_model)
    fits = fit_profile(points, decoder.config.num_layers)
    cold = cold_stages(fits, layers)
    stages = {name: StageCost.of(each) for name, each in (fits | cold).items()}
    return LatencyProfile(
        fingerprint=subject.fingerprint,
        subject=subject,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        load=about["load"],
        max_num_seqs=max_num_seqs,
        is_static=is_static,
        row_buckets=tuple(sorted(row_buckets(max_num_seqs))) if is_static else (),
        stages={name: stages[name] for name in (*subject.stage_names, *cold)},
        points=tuple(map(TimedPass.of, points)),
    )


def _room(decoder: Decoder, draft_model: Decoder | None) -> int:
    """Positions that both models have."""
    return min(model.max_positions for model in (decoder, draft_model) if model is not None)


def latency_for(
    decoder: Decoder,
    layers: Sequence[int],
    exits: Sequence[AdapterExit] = (),
    *,
    max_num_seqs: int,
    max_window: int,
    draft_model: Decoder | None = None,
    path: str | Path | None = None,
    progress: bool = True,
) -> LatencyProfile:
    """The profile at `path`, which must fit, but for rounds wider than its own; without a path the one that
    is kept for this model on this machine, which is measured first if there is none, or if it does not fit
    any more. As `measure_latency`; raises ConfigError."""
    expected = subject_of(decoder, layers, exits, draft_model)
    room, is_cuda = _room(decoder, draft_model), decoder.device.type == "cuda"
    wanted = Grid.widest(max_window, room, is_cuda=is_cuda)
    if path is not None:
        profile = load(expanded(path), expected, max_num_seqs)
        if profile.widest < wanted:
            _log.warning(
                "speculative.goodput.latency=%s is of rounds of %d positions a row, and plans may have %d:"
                " what these cost is a guess; measure again with `hispec profile JOB.yaml --latency %s`",
                *(path, profile.widest, wanted, path),
            )
        return profile
    kept = kept_path(expected)
    if kept.exists():
        try:
            profile = load(kept, expected)
        except ConfigError as error:
            _log.info("%s", error)
        else:
            longest = Grid.longest(profile.widest, room, is_cuda=is_cuda)
            if (
                profile.max_num_seqs >= max_num_seqs
                and profile.widest >= wanted
                and profile.longest >= longest
            ):
                return profile
            _log.info(
                "%s is of %d rows, rounds of %d positions a row and %d before them, not of %d, %d and %d",
                *(kept, profile.max_num_seqs, profile.widest, profile.longest),
                *(max_num_seqs, wanted, longest),
            )
            # Its rows and rounds are measured again: the job that it was made for finds them there the next
            # time, unless it has room for longer contexts than this one.
            max_num_seqs = max(max_num_seqs, profile.max_num_seqs)
            max_window = max(max_window, profile.widest)
    if progress:
        print(
            "Measuring what each stage of a round costs on this machine, about a minute, before anything is"
            f" decoded; kept for later starts in {kept} (`hispec profile JOB.yaml --latency FILE` and"
            " speculative.goodput.latency choose another file).",
            file=sys.stderr,
            flush=True,
        )
    profile = measure_latency(
        decoder,
        layers,
        exits,
        max_num_seqs=max_num_seqs,
        max_window=max_window,
        draft_model=draft_model,
        progress=progress,
    )
    try:
        save(profile, kept)
    except ConfigError as error:
        _log.warning("%s; it will be measured again the next time", error)
    return profile


def largest_window(speculative: SpeculativeConfig) -> int:
    """Places of a row in the largest round that control="goodput" may choose: with a check, whether the plan
    that it starts from has one or not."""
    return speculative.num_checks * (speculative.num_draft_tokens + 1)


def latency_for_control(
    speculative: SpeculativeConfig,
    decoder: Decoder,
    exits: Sequence[AdapterExit],
    draft_model: Decoder | None,
    max_num_seqs: int,
) -> LatencyModel:
    """What control="goodput" needs to choose between the plans that `speculative` allows, as
    `latency_for`."""
    goodput = speculative.goodput or GoodputConfig()
    return latency_for(
        decoder,
        exit_layers(speculative, [exit_.layer for exit_ in exits]),
        exits,
        max_num_seqs=max_num_seqs,
        max_window=largest_window(speculative),
        draft_model=draft_model,
        path=goodput.latency,
    ).model()


def subject_of(
    decoder: Decoder, layers: Sequence[int], exits: Sequence[AdapterExit], draft_model: Decoder | None
) -> Subject:
    """The subject of a profile of this model that is measured here and now."""
    about = environment(decoder.device)
    of_exits: dict[str, Facts] = {
        str(each.layer): {"num_kv_layers": each.num_kv_layers, "num_bytes": each.num_bytes} for each in exits
    }
    return Subject(
        model=_facts(decoder),
        layers=tuple(sorted(layers)),
        exits=of_exits,
        draft_model=None if draft_model is None else _facts(draft_model),
        machine={name: about[name] for name in ("cpu", "cores", "threads", "gpu")},
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "hispec": __version__,
        },
    )


def _facts(decoder: Decoder) -> Facts:
    """What the cost of a pass over the model depends on."""
    sizes: Facts = {
        name: value for name, value in asdict(decoder.config).items() if isinstance(value, int | str)
    }
    linear = decoder.make_linear
    return sizes | {
        "dtype": str(decoder.weights_dtype).removeprefix("torch."),
        "kv_cache_dtype": str(decoder.kv_dtype).removeprefix("torch."),
        "quantization": linear.quantization,
        "exact": linear.exact,
        "attention": decoder.attention.name,
        "attends_in_bfloat16": linear.attends_in_bfloat16,
        "kernels": type(decoder.kernels).__name__,
        "linears": type(decoder.head).__name__,
        "num_bytes": decoder.num_bytes,  # weights of bfloat16's numbers are held in it
        "device": decoder.device.type,
    }


def check_room(max_model_len: int) -> None:
    """Raises ConfigError if sequences of max_model_len tokens are too short to measure stages in."""
    if max_model_len < _LEAST_ROOM:
        raise ConfigError(
            f"max_model_len={max_model_len} leaves no room to measure in; a latency profile needs"
            f" {_LEAST_ROOM} positions"
        )


def _check_sizes(
    max_num_seqs: int, max_window: int, layers: Sequence[int], exits: Sequence[AdapterExit], decoder: Decoder
) -> None:
    for name, value in (("max_num_seqs", max_num_seqs), ("max_window", max_window)):
        if value < 1:
            raise ConfigError(f"{name}={value} of a latency profile must be at least 1")
    check_room(decoder.max_positions)
    num_layers = decoder.config.num_layers
    if bad := [layer for layer in layers if not 0 < layer < num_layers]:
        raise ConfigError(
            f"layers={bad} of a latency profile are no early exits of a model of {num_layers} layers; choose"
            f" 1 to {num_layers - 1}"
        )
    if stray := sorted({each.layer for each in exits} - set(layers)):
        raise ConfigError(
            f"trained exits at layers {stray} are not among layers={sorted(layers)} of a latency profile;"
            " name them too"
        )


def _powers(base: int, most: int) -> tuple[int, ...]:
    """1, base, base², ... up to `most`, and that."""
    found = [1]
    while found[-1] * base < most:
        found.append(found[-1] * base)
    if 2 * (most - found[-1]) < found[-1] > 1:
        found.pop()  # too near to `most` to tell more
    return tuple(dict.fromkeys((*found, most)))


def _ladder(most: int) -> tuple[int, ...]:
    """1, 2, 3 ..., in steps of a quarter where that is more, up to `most`, and that: kernels of a CPU compute
    in tiles of a few tokens, and between powers of two is most of what rounds verify."""
    found = [1]
    while (more := found[-1] + max(1, found[-1] // 4)) < most:
        found.append(more)
    return tuple(dict.fromkeys((*found, most)))


def _among(sizes: Sequence[int], base: int) -> tuple[int, ...]:
    """Of rising sizes, the ones at or next above the powers of `base`."""
    return tuple(
        dict.fromkeys(next(size for size in sizes if size >= power) for power in _powers(base, sizes[-1]))
    )


Key = tuple[str, int, int, int]  # stage, rows, tokens, context tokens


def _passes(
    rig: Rig, of_model: Rig | None, layers: Sequence[int], exits: Sequence[AdapterExit], grid: Grid
) -> Iterator[tuple[Key, Timed]]:
    """Each pass to time, by its point, with what runs it once: of every stage that `stage_names` names except
    `round`, and first/D, a cycle's first draft pass, which `cold` is told from. Where these are told apart,
    passes through layers are fitted together, and fewer of them are as good, but for those of the whole
    model: so each is timed more often within the same minute."""
    apart = 1
    for rows, context in grid.narrow():
        at = rig.laid_out(context, rows)
        key = rows, rows, rows * context
        yield ("plain", *key), at.plain(rows)
        yield ("lookup", *key), at.lookup(rows, _MOST_LOOKED_UP)
        for layer in layers:
            yield (f"draft/{layer}", *key), at.draft(rows, 1, layer)
            if (first := at.first(rows, layer)) is not None:
                apart = _SHAPES_APART
                yield (f"first/{layer}", *key), first
        if of_model is not None:
            yield ("draft_model", *key), of_model.laid_out(context, rows).draft(rows, 1, None)
            yield ("fill_model", *key), of_model.laid_out(context, rows).fill(rows, 1, None)
    shapes = list(grid.wide())
    if len(shapes) < LEAST_POINTS * apart:
        apart = 1
    for number, (rows, q_len, context) in enumerate(shapes):
        at = rig.laid_out(context, rows)
        key = rows, rows * q_len, rows * context
        turns = itertools.count(number)

        for layer in layers:
            yield (f"shadow/{layer}", *key), at.shadow(rows, q_len, layer)
        for each in exits:
            yield (f"along/{each.layer}", *key), at.along(rows, q_len, each.layer)
        yield ("verify/0", *key), at.verify(rows, q_len, 0)
        for layer in layers:
            if next(turns) % apart == 0:
                yield (f"fill/{layer}", *key), at.fill(rows, q_len, layer)
            if next(turns) % apart == 0:
                yield (f"verify/{layer}", *key), at.verify(rows, q_len, layer)
        for lo, hi in itertools.combinations((0, *sorted(layers)), 2):
            if hi > 1 and next(turns) % apart == 0:
                yield (f"check/{lo}-{hi}", *key), at.check(rows, q_len, lo, hi)
    for context in grid.contexts:
        at = rig.laid_out(context, 1)
        for num in _powers(4, min(context - 1, 2 * grid.most_tokens)):
            yield ("prefill", 1, num, context - 1), at.prefill(num)
            yield ("swap", 1, num, num), at.swap(num)
