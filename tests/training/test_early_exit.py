"""The recipe `ee`: what trunk and exits learn from, in passes of which shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ee_models.checkpoint.loader import Checkpoint
from ee_models.errors import TrainingError
from ee_models.training import trunk
from ee_models.training.early_exit import (
    EarlyExitTask,
    ExitingModel,
    MicroBatch,
)
from ee_models.training.examples import Example, grouped_indices
from ee_models.training.trunk import Batch, collate
from tests.helpers.ee_tasks import CPU, LAYERS, SETTINGS, make_checkpoint, make_examples, make_task, shaken
from tests.helpers.runs import but
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import TINY_VOCAB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("ee"))


def losses_by_hand(task: EarlyExitTask, examples: Sequence[Example]) -> dict[str, Tensor]:
    """Example by example, with the whole logits of each place: sums over places, as scalars."""
    module, sums = (
        task.module,
        {"last": torch.zeros(()), "exit_2": torch.zeros(()), "exit_4": torch.zeros(())},
    )
    for example in examples:
        places = slice(example.prompt_len - 1, len(example.token_ids) - 1)
        last, exits = module.states(collate([example], CPU))
        logits = F.linear(last, module.head)
        targets = torch.tensor(example.token_ids[example.prompt_len :])
        whole = module.model(torch.tensor([example.token_ids])).logits[0, places]
        torch.testing.assert_close(logits, whole)
        sums["last"] = sums["last"] + F.cross_entropy(logits, targets, reduction="sum")
        for adapter in module.adapters:
            ids = torch.arange(TINY_VOCAB) if adapter.vocabulary is None else adapter.vocabulary
            p = logits.detach()[:, ids].softmax(-1)
            q = F.linear(exits[adapter.info.layer], module.head.detach()[ids]).log_softmax(-1)
            sums[f"exit_{adapter.info.layer}"] = sums[f"exit_{adapter.info.layer}"] - (p * q).sum()
    return sums


def gradients(task: EarlyExitTask, loss: Tensor) -> list[list[Tensor]]:
    groups = [group.parameters for group in task.parameter_groups()]
    found = torch.autograd.grad(loss, [each for group in groups for each in group])
    sizes = [len(group) for group in groups]
    return [list(found[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]


def test_losses_are_those_of_every_place_by_hand(checkpoint: Checkpoint) -> None:
    task = shaken(make_task(checkpoint))
    parts = task.micro_batches(1, 0, 1, CPU)
    assert len(parts) > 1 and sum(part.share for part in parts) == pytest.approx(1.0)
    picked = grouped_indices([len(e.token_ids) for e in make_examples(13)], 4, 1, 0)
    examples = [make_examples(13)[index] for index in picked]
    count = sum(len(example.token_ids) - example.prompt_len for example in examples)
    with torch.no_grad():
        expected = losses_by_hand(task, examples)
        found = [task.module(part) for part in parts]
    for name, total in expected.items():
        torch.testing.assert_close(sum(values[name] for _, values in found), total / count)
    torch.testing.assert_close(
        sum(loss for loss, _ in found), torch.stack(list(expected.values())).sum() / count
    )


@pytest.mark.parametrize("rank", [3, None], ids=["lora", "all weights"])
@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_the_trunk_learns_from_exits_by_their_weights_and_exits_from_their_own_loss_alone(
    checkpoint: Checkpoint, scale: float, rank: int | None
) -> None:
    task = shaken(make_task(checkpoint, but(SETTINGS, exit_loss_scale=scale, lora_rank=rank)))
    # The same graph without the recipe's shares: all of an exit's gradient reaches the trunk.
    whole = shaken(make_task(checkpoint, but(SETTINGS, exit_loss_scale=2.0, lora_rank=rank)))
    whole.module._into_trunk = [1.0, 1.0]
    example = make_examples(3)[2]
    (part,) = task._split([example], CPU)
    found = gradients(task, task.module(part)[0])
    count = len(part.batch.targets)
    of = {}
    for name in ("last", "exit_2", "exit_4"):
        loss = losses_by_hand(whole, [example])[name] / count
        groups = [group.parameters for group in whole.parameter_groups()]
        flat = torch.autograd.grad(loss, [each for group in groups for each in group], allow_unused=True)
        of[name] = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip([each for group in groups for each in group], flat, strict=True)
        ]
    sizes = [len(group) for group in found]
    for place, gradient in enumerate(found[0]):
        expected = of["last"][place] + scale * (0.75 * of["exit_2"][place] + 0.25 * of["exit_4"][place])
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=1e-3)
    for group, name, start in ((1, "exit_2", sizes[0]), (2, "exit_4", sizes[0] + sizes[1])):
        for place, gradient in enumerate(found[group]):
            torch.testing.assert_close(gradient, of[name][start + place], atol=2e-5, rtol=1e-3)


def test_target_self_holds_the_last_layer_to_the_model_without_lora(checkpoint: Checkpoint) -> None:
    settings = but(SETTINGS, target="self")
    fresh = make_task(checkpoint, settings)
    figures = fresh.evaluate(CPU)
    assert figures["last_kl"] == pytest.approx(0.0, abs=1e-6) and figures["last_same"] == 1.0
    task = shaken(make_task(checkpoint, settings))
    (part,) = task._split(make_examples(1), CPU)
    with torch.no_grad():
        before = F.linear(fresh.module.states(part.batch)[0], fresh.module.head)
        after = F.linear(task.module.states(part.batch)[0], task.module.head)
        torch.testing.assert_close(task.module.original(part.batch), fresh.module.states(part.batch)[0])
        loss = task.module(part)[1]["last"]
    torch.testing.assert_close(loss, -(before.softmax(-1) * after.log_softmax(-1)).sum(-1).mean())
    changed = task.evaluate(CPU)
    assert changed["last_kl"] > 1e-3 and changed["last_same"] < 1.0


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_the_original_is_asked_about_a_share_of_rows(
    checkpoint: Checkpoint, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = but(SETTINGS, target="self", original_share=share, max_pass_tokens=256)
    task = shaken(make_task(checkpoint, settings, batch_size=13))
    parts = task.micro_batches(2, 0, 1, CPU)
    asked: list[int] = []
    original = task.module.original

    def watched(batch: Batch) -> Tensor:
        asked.append(len(batch.token_ids))
        return original(batch)

    monkeypatch.setattr(task.module, "original", watched)
    expected = 0.0
    with torch.no_grad():
        found = sum(task.module(part)[1]["last"] for part in parts)
        for part in parts:
            total, count = 0.0, 0
            assert part.compared is not None
            rows = zip(
                part.batch.token_ids,
                part.batch.attention_mask,
                prompt_lengths(part),
                part.compared,
                strict=True,
            )
            for row, mask, prompt_len, chosen in rows:
                if chosen:
                    batch = collate([Example(row[: int(mask.sum())].tolist(), prompt_len)], CPU)
                    of_original, now = original(batch), task.module.states(batch)[0]
                    p, q = (F.linear(each, task.module.head).log_softmax(-1) for each in (of_original, now))
                    total -= float((p.exp() * q).sum())
                    count += len(batch.targets)
            expected += part.share * total / count
    assert asked == [max(1, round(share * len(part.batch.token_ids))) for part in parts]
    assert float(found) == pytest.approx(expected, rel=1e-5)

    def drawn(parts: Sequence[MicroBatch]) -> list[list[bool]]:
        return [part.compared.tolist() for part in parts if part.compared is not None]

    assert drawn(make_task(checkpoint, settings, batch_size=13).micro_batches(2, 0, 1, CPU)) == drawn(parts)
    assert drawn(task.micro_batches(3, 0, 1, CPU)) != drawn(parts)


@pytest.mark.parametrize("dropout", [0.0, 0.6])
def test_rows_that_are_not_compared_pass_deep_layers_without_a_gradient(
    checkpoint: Checkpoint, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = but(SETTINGS, target="self", original_share=0.3, max_pass_tokens=512, dropout_max=dropout)
    task = shaken(make_task(checkpoint, settings, batch_size=13))
    module, passed = task.module, []
    for layer in module.model.base_model.layers:
        layer.register_forward_hook(lambda *call: passed.append(len(call[-1])))
    parts = task.micro_batches(1, 0, 1, CPU)
    assert len(parts) > 1 and max(len(part.batch.token_ids) for part in parts) >= 4
    found = [task.module(part) for part in parts]
    split = [len(part.batch.token_ids) for part in parts]
    num_compared = [
        rows if part.compared is None else int(part.compared.sum())
        for part, rows in zip(parts, split, strict=True)
    ]
    assert 0 < sum(num_compared) < sum(split) / 2
    # The original's pass, which is of the compared rows alone, follows each of the model's own.
    assert passed == [
        number
        for rows, compared in zip(split, num_compared, strict=True)
        for number in 4 * [rows] + [compared] + LAYERS * [compared]
    ]
    states = module.states
    monkeypatch.setattr(module, "states", lambda batch, chosen=None: states(batch))
    for part, (loss, values) in zip(parts, found, strict=True):
        expected, each = module(part)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(values, each)
        for group, other in zip(gradients(task, loss), gradients(task, expected), strict=True):
            torch.testing.assert_close(group, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("target", ["self", "labels"])
def test_lora_that_is_added_to_the_weights_learns_as_beside_them(
    checkpoint: Checkpoint, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = 0.3 if target == "self" else 1.0
    task = shaken(make_task(checkpoint, but(SETTINGS, target=target, original_share=share)))
    figures, learnt = [], []
    for merges in (False, True):
        monkeypatch.setattr(trunk, "_merges_lora", lambda batch, merges=merges: merges)
        losses = [task.module(part) for part in task.micro_batches(1, 0, 1, CPU)]
        figures.append([*losses, task.evaluate(CPU)])
        learnt.append([each for loss, _ in losses for group in gradients(task, loss) for each in group])
    torch.testing.assert_close(figures[1], figures[0], atol=1e-5, rtol=1e-5)
    for within, beside in zip(learnt[1], learnt[0], strict=True):  # sums in another order
        assert (within - beside).norm() <= 1e-3 * beside.norm()


def without_prompts(first: int) -> Callable[[ExitingModel], ExitStack]:
    """By the definition: in one pass, nothing that a layer makes of the first positions has a gradient."""

    def cut(*call: Any) -> Tensor:
        output = call[-1]
        return torch.cat((output[:, :first].detach(), output[:, first:]), dim=1)

    def hooked(module: ExitingModel) -> ExitStack:
        stack = ExitStack()
        for layer in module.model.base_model.layers:
            for part in (layer, layer.self_attn.k_proj, layer.self_attn.v_proj):
                stack.callback(part.register_forward_hook(cut).remove)
        return stack

    return hooked


@sweep(
    "target, share, dropout, merges",
    [
        (*targets, dropout, merges)
        for targets in (("labels", 1.0), ("self", 1.0), ("self", 0.3))
        for dropout in (0.0, 0.4)
        for merges in (False, True)
    ],
    lambda case: (case[2] > 0.0) == case[3],
)
def test_prompts_that_do_not_learn_pass_forward_only(
    checkpoint: Checkpoint,
    dropout: float,
    target: str,
    share: float,
    merges: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trunk, "_merges_lora", lambda batch: merges)
    settings = but(SETTINGS, target=target, original_share=share, dropout_max=dropout, max_pass_tokens=1024)
    whole, task = (
        shaken(make_task(checkpoint, but(settings, prompts_learn=learn))) for learn in (True, False)
    )
    generator = torch.Generator().manual_seed(2)
    lengths = [(70, 90), (66, 100), (90, 131), (68, 75)]
    examples = [
        Example(torch.randint(TINY_VOCAB, (n,), generator=generator).tolist(), prompt)
        for prompt, n in lengths
    ]
    keep = torch.rand(LAYERS, 4, generator=generator) >= dropout if dropout else None
    drawn = torch.rand(4, generator=generator) if share < 1 else None
    (of_whole,), (part,) = (each._split(examples, CPU, keep, drawn) for each in (whole, task))
    assert (of_whole.batch.forward_only, part.batch.forward_only) == (0, 64)  # 65 of all prompts, by 32
    passed = []
    for layer in task.module.model.base_model.layers:
        layer.register_forward_hook(lambda *call: passed.append(call[-1].requires_grad))
    loss, values = task.module(part)
    assert passed[: 2 * LAYERS] == LAYERS * [False] + LAYERS * [True]
    with without_prompts(64)(whole.module):
        expected, each = whole.module(of_whole)
        wanted = gradients(whole, expected)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(values, each)
    for group, other in zip(gradients(task, loss), wanted, strict=True):
        for one, another in zip(group, other, strict=True):
            assert (one - another).norm() <= 1e-4 * another.norm() + 1e-7
    in_full = gradients(whole, whole.module(of_whole)[0])
    assert any(
        (one - another).norm() > 1e-2 * one.norm() for one, another in zip(in_full[0], wanted[0], strict=True)
    )
    with torch.no_grad():  # nothing to save where nothing has a gradient
        torch.testing.assert_close(task.module(part)[0], whole.module(of_whole)[0])
    with torch.autocast("cpu", torch.bfloat16):  # weights that were cast for prompts learn all the same
        narrow = gradients(task, task.module(part)[0])
    for one, another in zip(narrow[0], wanted[0], strict=True):
        assert (one * another).sum() >= 0.7 * one.norm() * another.norm() and one.norm() > 0


def test_short_prompts_learn_whatever_is_said(checkpoint: Checkpoint) -> None:
    """Positions are left out by whole multiples of what rows are padded to, as far as all prompts reach."""
    examples = [Example(list(range(80)), prompt) for prompt in (60, 33)]
    assert collate(examples, CPU, pad_to=32, prompts_learn=False).forward_only == 32
    assert collate(examples, CPU, pad_to=1, prompts_learn=False).forward_only == 32
    assert collate([*examples, Example([1, 2], 0)], CPU, prompts_learn=False).forward_only == 0
    assert collate(examples, CPU, pad_to=32).forward_only == 0


@pytest.mark.parametrize(("target", "share"), [("self", 0.9), ("labels", 1.0)])
def test_where_the_last_layer_learns_from_all_rows_none_is_kept_apart(
    checkpoint: Checkpoint, target: str, share: float
) -> None:
    settings = but(SETTINGS, target=target, original_share=share, max_pass_tokens=256)
    parts = make_task(checkpoint, settings).micro_batches(0, 0, 1, CPU)
    assert [part.compared for part in parts] == [None] * len(parts)


def test_low_rank_changes_of_other_weights_are_no_beginning(checkpoint: Checkpoint) -> None:
    trunk, before = make_task(checkpoint).module, shaken(make_task(checkpoint)).module.low_rank()
    trunk.begin_as(before)
    assert all(torch.equal(change.b, before[name].b) for name, change in trunk.low_rank().items())
    name, _ = before.popitem()
    with pytest.raises(TrainingError, match=f"{name} is changed by these or by this training, not by both"):
        trunk.begin_as(before)


def test_batches_that_an_earlier_run_has_seen_are_passed_over(checkpoint: Checkpoint) -> None:
    settings = but(SETTINGS, dropout_max=0.5)
    whole, later = (make_task(checkpoint, but(settings, skip_batches=skipped)) for skipped in (0, 5))
    for one, other in zip(whole.micro_batches(7, 0, 1, CPU), later.micro_batches(2, 0, 1, CPU), strict=True):
        assert torch.equal(one.batch.token_ids, other.batch.token_ids)
        assert one.batch.keep is not None and other.batch.keep is not None
        assert torch.equal(one.batch.keep, other.batch.keep)


def prompt_lengths(part: MicroBatch) -> list[int]:
    """Of each row: where its first predicting place lies tells where its answer begins."""
    q_len = part.batch.token_ids.shape[1]
    places = part.batch.places
    return [int(places[places // q_len == row].min()) % q_len + 1 for row in range(len(part.batch.token_ids))]


def test_evaluation_counts_each_held_out_place_once(checkpoint: Checkpoint) -> None:
    task = shaken(make_task(checkpoint))
    held_out = make_examples(5, seed=1)
    count = sum(len(example.token_ids) - example.prompt_len for example in held_out)
    figures = task.evaluate(CPU)
    right = {2: 0, 4: 0}
    with torch.no_grad():
        sums = losses_by_hand(task, held_out)
        for example in held_out:
            last, exits = task.module.states(collate([example], CPU))
            chosen = F.linear(last, task.module.head).argmax(-1)
            for adapter in task.module.adapters:
                ids = torch.arange(TINY_VOCAB) if adapter.vocabulary is None else adapter.vocabulary
                own = ids[F.linear(exits[adapter.info.layer], task.module.head[ids]).argmax(-1)]
                right[adapter.info.layer] += int((own == chosen).sum())
    assert figures["last_loss"] == pytest.approx(float(sums["last"]) / count, rel=1e-5)
    for layer in (2, 4):
        assert figures[f"exit_{layer}_loss"] == pytest.approx(float(sums[f"exit_{layer}"]) / count, rel=1e-5)
        assert figures[f"exit_{layer}_agreement"] == pytest.approx(right[layer] / count)


# ---- which examples, in which passes ----


@pytest.mark.parametrize("num,batch_size", [(13, 4), (500, 3), (80, 8)])
def test_steps_of_similar_length_see_each_example_once_an_epoch(num: int, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(num)
    lengths = torch.randint(5, 200, (num,), generator=generator).tolist()
    steps = num // batch_size
    epochs = [
        [grouped_indices(lengths, batch_size, epoch * steps + step, seed=3) for step in range(steps)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        seen = [index for step in epoch for index in step]
        assert len(seen) == len(set(seen)) == steps * batch_size
    assert epochs[0] != epochs[1]
    assert (
        epochs[0][0]
        == grouped_indices(lengths, batch_size, 0, seed=3)
        != grouped_indices(lengths, batch_size, 0, seed=4)
    )
    halves = [grouped_indices(lengths, batch_size, 0, 3, rank, 2) for rank in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(epochs[0][0])
    if steps > 50:
        spread = [max(lengths[i] for i in step) - min(lengths[i] for i in step) for step in epochs[0]]
        assert sum(spread) / len(spread) < 10, "of lengths from 5 to 199"


def test_a_batch_smaller_than_the_processes_or_larger_than_the_data_is_refused() -> None:
    for lengths, batch_size, num_ranks in (([5] * 9, 2, 3), ([5] * 3, 4, 1)):
        with pytest.raises(TrainingError, match=f"batch_size is {batch_size}; it must be at least"):
            grouped_indices(lengths, batch_size, 0, 0, 0, num_ranks)


def test_passes_have_few_shapes_and_no_more_tokens_than_allowed(checkpoint: Checkpoint) -> None:
    task = make_task(checkpoint, but(SETTINGS, max_pass_tokens=600), batch_size=13)
    examples = make_examples(13)
    parts = task.micro_batches(0, 0, 1, CPU)
    shapes = [tuple(part.batch.token_ids.shape) for part in parts]
    assert all(q_len % 32 == 0 and rows * q_len <= 600 for rows, q_len in shapes), shapes
    assert all(rows & (rows - 1) == 0 for rows, _ in shapes), shapes
    seen = sorted(
        row[: int(mask.sum())].tolist()
        for part in parts
        for row, mask in zip(part.batch.token_ids, part.batch.attention_mask, strict=True)
    )
    assert seen == sorted(example.token_ids for example in examples)
    assert sum(map(task.num_tokens, parts)) == sum(map(len, seen))
    # An example that is longer than a pass may be has one of its own.
    alone = make_task(checkpoint, but(SETTINGS, max_pass_tokens=10))
    assert [part.batch.token_ids.shape[0] for part in alone.micro_batches(0, 0, 1, CPU)] == [1] * 4


def test_layers_dropped_are_the_same_for_a_row_whatever_pass_it_is_in(checkpoint: Checkpoint) -> None:
    kept = {}
    for size in (64, 100_000):
        task = make_task(checkpoint, but(SETTINGS, dropout_max=0.6, max_pass_tokens=size))
        kept[size] = {}
        for part in task.micro_batches(2, 0, 1, CPU):
            assert part.batch.keep is not None
            for row, keep in zip(part.batch.token_ids.tolist(), part.batch.keep.T.tolist(), strict=True):
                kept[size][tuple(row[:4])] = keep
    assert kept[64] == kept[100_000] and any(not all(keep) for keep in kept[64].values())
