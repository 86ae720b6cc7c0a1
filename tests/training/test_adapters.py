"""Training exits on a frozen trunk: what they learn from, and at which places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ee_models.training.loop as loop
from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import Checkpoint
from ee_models.decoder import Decoder
from ee_models.exits import head_name
from ee_models.training.adapters import (
    AdapterModule,
    AdaptersTask,
    Exits,
    StatesBatch,
    frequent_tokens,
    init_from_trunk,
)
from ee_models.training.examples import Example
from ee_models.training.hidden_states import FINAL, trunk_states
from ee_models.training.loop import train
from ee_models.training.settings import LoopSettings
from tests.helpers import training_adapters
from tests.helpers.adapters import TINY_MLP, make_module
from tests.helpers.runs import but
from tests.helpers.scripted import tiny_config
from tests.helpers.tiny import TINY_VOCAB
from tests.helpers.training_adapters import (
    CPU,
    LAYERS,
    batch_of,
    make_examples,
    make_exits,
    make_modules,
    make_store,
    places_of,
)

checkpoint, decoder = training_adapters.checkpoint, training_adapters.decoder  # fixtures

# ---- the loss ----


class NormOnly:
    """Exits of width 2 over a head of three tokens, small enough for hand calculation."""

    def __init__(self, vocabulary: list[int] | None) -> None:
        model = replace(tiny_config(2, 3), hidden_size=2, rms_norm_eps=0.0)
        info = ExitInfo(layer=1, num_blocks=0, vocabulary_size=vocabulary and len(vocabulary))
        module = AdapterModule(info, model, None if vocabulary is None else torch.tensor(vocabulary))
        self.head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        self.exits = Exits([module], self.head, torch.ones(1))


@pytest.mark.parametrize("vocabulary", [None, [2, 0]])
def test_the_loss_is_the_cross_entropy_to_the_full_models_distribution(vocabulary: list[int] | None) -> None:
    """By hand: a state of (3, 4) is normed to (3, 4) / sqrt(12.5); with a reduced vocabulary both sides are
    renormalised over it."""
    case = NormOnly(vocabulary)
    hidden, final = [3.0, 4.0], [0.5, -1.0]
    batch = StatesBatch(
        {"layer1": torch.tensor([hidden, [9.0, 9.0]]), FINAL: torch.tensor([final, [9.0, -9.0]])},
        torch.tensor([0, 1]),
        torch.tensor([True, False]),
        [],
    )
    with torch.no_grad():
        loss, losses = case.exits(batch)
    tokens = vocabulary or [0, 1, 2]
    normed = [value / math.sqrt(12.5) for value in hidden]

    def distribution(x: list[float]) -> list[float]:
        exponentials = [
            math.exp(x[0] * float(case.head[token, 0]) + x[1] * float(case.head[token, 1]))
            for token in tokens
        ]
        return [value / sum(exponentials) for value in exponentials]

    expected = -sum(p * math.log(q) for p, q in zip(distribution(final), distribution(normed), strict=True))
    assert float(loss) == pytest.approx(expected, rel=1e-5) and float(losses["layer1"]) == pytest.approx(
        expected, rel=1e-5
    )
    # The full model says token 0 (0.5 against -1 and -0.5), the exit token 2 of all and of {2, 0}.
    assert case.exits.agreements(batch)["layer1"].tolist() == [False]
    batch.states[FINAL][0] = torch.tensor([0.5, 1.0])
    assert case.exits.agreements(batch)["layer1"].tolist() == [True]


INFOS = [
    ExitInfo(layer=2, intermediate_size=20),
    ExitInfo(layer=4, num_blocks=2, intermediate_size=20, vocabulary_size=90),
]


@pytest.fixture(scope="module")
def exits(checkpoint: Checkpoint) -> Exits:
    return make_exits(checkpoint, make_modules(checkpoint, INFOS))


def test_the_loss_of_a_whole_batch_is_that_of_each_place(
    checkpoint: Checkpoint, decoder: Decoder, exits: Exits
) -> None:
    """Written out place by place, with logits of the full model and of the exit."""
    examples = make_examples(3)
    states = [trunk_states(decoder, LAYERS, [example]) for example in examples]
    loss, losses = exits(batch_of(examples, states))
    head, model = checkpoint.tensor(head_name(checkpoint)), checkpoint.config
    for info in INFOS:
        module = exits.adapters[f"layer{info.layer}"]
        values = []
        for example, state in zip(examples, states, strict=True):
            whole = batch_of([example], [state])
            angles = torch.outer(whole.positions.float(), model.rope.inv_freq(model.head_dim))
            rotation, everywhere = (angles.cos()[:, None], angles.sin()[:, None]), torch.arange(len(angles))
            logits = F.linear(module(state[f"layer{info.layer}"], rotation, whole.groups, everywhere), head)
            full = F.linear(state[FINAL].float(), head)
            allowed = torch.arange(TINY_VOCAB) if module.vocabulary is None else module.vocabulary
            for place in range(example.prompt_len - 1, len(example.token_ids) - 1):
                values.append(
                    -(full[place, allowed].softmax(-1) * logits[place, allowed].log_softmax(-1)).sum()
                )
        torch.testing.assert_close(losses[f"layer{info.layer}"], torch.stack(values).mean().detach())
    torch.testing.assert_close(loss, sum(losses.values(), torch.zeros(())))


def test_only_places_that_predict_the_response_count(decoder: Decoder, exits: Exits) -> None:
    """What the full model says elsewhere changes nothing; at a place that counts, it does."""
    example = Example(make_examples(1)[0].token_ids + [5, 6, 7, 8], 3)  # noqa: RUF005
    length = len(example.token_ids)
    state = trunk_states(decoder, LAYERS, [example])
    loss = exits(batch_of([example], [state]))[0]
    for place in range(length):
        changed = {**state, FINAL: state[FINAL].clone()}
        changed[FINAL][place] = -changed[FINAL][place]
        assert (exits(batch_of([example], [changed]))[0] == loss) == (
            place < example.prompt_len - 1 or place == length - 1
        ), place
    # Nor does an exit learn from its own outputs there: a norm alone has no other way to them.
    module = AdapterModule(
        ExitInfo(layer=2, num_blocks=0), replace(tiny_config(6, TINY_VOCAB), hidden_size=48), None
    )
    norm_only = Exits([module], exits.get_buffer("head"), torch.ones(1))
    loss = norm_only(batch_of([example], [state]))[0]
    for place in range(length):
        changed = {**state, "layer2": state["layer2"].clone()}
        changed["layer2"][place] = changed["layer2"][place].flip(0)
        assert (norm_only(batch_of([example], [changed]))[0] == loss) == (
            place < example.prompt_len - 1 or place == length - 1
        ), place


def test_examples_in_one_batch_do_not_see_each_other(decoder: Decoder, exits: Exits) -> None:
    examples = make_examples(4)
    states = [trunk_states(decoder, LAYERS, [example]) for example in examples]
    with torch.no_grad():
        together = exits.outputs(batch_of(examples, states))
        for name, outputs in together.items():
            alone = [
                exits.outputs(batch_of([example], [state]))[name]
                for example, state in zip(examples, states, strict=True)
            ]
            torch.testing.assert_close(outputs, torch.cat(alone), atol=1e-5, rtol=1e-5)
        # And another neighbour changes nothing.
        other = [*states[:3], {name: -tensor for name, tensor in states[3].items()}]
        count = sum(len(example.token_ids) - example.prompt_len for example in examples[:3])
        for name, outputs in exits.outputs(batch_of(examples, other)).items():
            assert torch.equal(outputs[:count], together[name][:count])


def test_a_place_sees_what_came_before_it_and_nothing_after(decoder: Decoder, exits: Exits) -> None:
    example = Example(make_examples(2)[1].token_ids, 1)
    state = trunk_states(decoder, LAYERS, [example])
    with torch.no_grad():
        before = exits.outputs(batch_of([example], [state]))["layer2"]
        changed = {**state, "layer2": state["layer2"].clone()}
        changed["layer2"][4] = -changed["layer2"][4]
        after = exits.outputs(batch_of([example], [changed]))["layer2"]
    assert [bool(torch.equal(one, other)) for one, other in zip(before, after, strict=True)] == [
        place < 4 for place in range(len(before))
    ]


def test_the_frozen_head_gets_no_gradient_and_every_weight_of_an_exit_does(
    decoder: Decoder, exits: Exits
) -> None:
    examples = make_examples(3)
    exits(batch_of(examples, [trunk_states(decoder, LAYERS, [example]) for example in examples]))[
        0
    ].backward()
    names = [name for name, _ in exits.named_parameters()]
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in exits.parameters())
    assert not any("head" in name for name in names) and not any(
        "head" in name for name in exits.state_dict()
    )
    exits.zero_grad()


# ---- vocabulary, start, export ----


def test_frequent_tokens_are_counted_in_responses_and_ties_go_by_token() -> None:
    examples = [Example([7, 7, 7, 7, 3, 5, 5], 4), Example([7, 5, 2, 3, 0], 1), Example([9, 0, 0, 0, 0], 4)]
    order = frequent_tokens(examples, 10)
    assert order.tolist() == [5, 0, 3, 2, 1, 4, 6, 7, 8, 9]


def test_the_end_of_an_answer_is_in_every_vocabulary() -> None:
    """Also if no answer has it, because all were cut."""
    order = frequent_tokens([Example([7, 5, 5, 3], 1)], 10, ends=(8, 3, 10, 99))
    assert order.tolist() == [3, 8, 5, 0, 1, 2, 4, 6, 7, 9]


@pytest.mark.parametrize(("layer", "num_blocks"), [(2, 1), (3, 3), (4, 3)])
def test_blocks_start_as_the_layers_after_the_exit(
    checkpoint: Checkpoint, layer: int, num_blocks: int
) -> None:
    module = make_module(
        ExitInfo(layer=layer, num_blocks=num_blocks, intermediate_size=TINY_MLP), checkpoint.config
    )
    init_from_trunk(module, checkpoint)
    tensors = module.state_dict()
    assert torch.equal(tensors["norm"], checkpoint.tensor("model.norm.weight"))
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    names |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert len(tensors) == 1 + len(names) * num_blocks
    for index in range(num_blocks):
        source = min(layer + index, 5)  # there are six layers; the last one serves again
        for name, of_trunk in names.items():
            assert torch.equal(
                tensors[f"blocks.{index}.{name}"],
                checkpoint.tensor(f"model.layers.{source}.{of_trunk}.weight"),
            ), name


def test_what_has_no_counterpart_of_its_shape_starts_small(checkpoint: Checkpoint) -> None:
    torch.manual_seed(0)
    module = AdapterModule(ExitInfo(layer=2, intermediate_size=20), checkpoint.config, None)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert 0.01 < float(before["blocks.0.gate_proj"].std()) < 0.03
    init_from_trunk(module, checkpoint)
    after = module.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    narrow = {f"blocks.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    assert changed == set(before) - narrow


def test_exports_are_the_tensors_of_the_file_format(checkpoint: Checkpoint) -> None:
    info = ExitInfo(layer=4, num_blocks=2, intermediate_size=20, vocabulary_size=30)
    module = make_module(info, checkpoint.config)
    exported = module.export()
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == info.shapes(checkpoint.config)
    vocabulary = exported.pop("vocabulary")
    assert (
        vocabulary.dtype == torch.int32
        and module.vocabulary is not None
        and vocabulary.tolist() == module.vocabulary.tolist()
    )
    assert all(
        tensor.dtype == torch.bfloat16 and torch.equal(tensor, module.state_dict()[name].bfloat16())
        for name, tensor in exported.items()
    )


# ---- the task ----


def make_task(
    folder: Path, checkpoint: Checkpoint, decoder: Decoder, infos: Sequence[ExitInfo], **fields: Any
) -> AdaptersTask:
    examples = make_examples(20)
    store = make_store(folder, decoder, examples, layers=[info.layer for info in infos])
    settings = {"held_out": range(15, 20), "batch_size": 4, "seed": 1} | fields
    return AdaptersTask(make_exits(checkpoint, make_modules(checkpoint, infos)), store, examples, **settings)


def test_a_batch_is_what_the_step_says_and_never_held_out(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder
) -> None:
    task = make_task(tmp_path, checkpoint, decoder, INFOS, batch_size=5)
    examples = make_examples(20)
    alone = [batch_of([example], [trunk_states(decoder, LAYERS, [example])]) for example in examples]
    seen = []
    for step in range(6):
        batch = task.batch(step, 0, 1, CPU)
        assert torch.equal(task.batch(step, 0, 1, CPU).states[FINAL], batch.states[FINAL])
        parts = places_of(batch)
        for places in parts:
            (index,) = [
                index
                for index, one in enumerate(alone)
                if torch.equal(one.states[FINAL], batch.states[FINAL][places])
            ]
            assert all(
                torch.equal(batch.states[name][places], tensor)
                for name, tensor in alone[index].states.items()
            )
            assert torch.equal(batch.positions[places], alone[index].positions) and torch.equal(
                batch.predicts[places], alone[index].predicts
            )
            seen.append(index)
        is_padding = torch.ones_like(batch.predicts)
        is_padding[torch.cat(parts)] = False
        assert int((~is_padding).sum()) == sum(map(len, parts)), "two examples share a place"
        assert task.num_tokens(batch) == sum(map(len, parts))
        assert not batch.predicts[is_padding].any() and len(batch.predicts) % 512 == 0
    assert sorted(seen[:15]) == sorted(seen[15:]) == list(range(15))
    split = [len(places) for rank in range(2) for places in places_of(task.batch(2, rank, 2, CPU))]
    assert sorted(split) == sorted(len(places) for places in places_of(task.batch(2, 0, 1, CPU)))


def test_padding_and_groups_change_no_loss_and_no_gradient(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder
) -> None:
    """Six examples, in groups of four at most, against each of them alone, weighted by its places."""
    task = make_task(tmp_path, checkpoint, decoder, INFOS, batch_size=6)
    batch = task.batch(1, 0, 1, CPU)
    assert len(batch.groups) == 2
    task.module(batch)[0].backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in task.module.named_parameters()
        if parameter.grad is not None
    }
    task.module.zero_grad()
    total, count = torch.zeros(()), int(batch.predicts.sum())
    for places in places_of(batch):
        states = {name: tensor[places] for name, tensor in batch.states.items()}
        group = [(torch.arange(len(places)), torch.zeros_like(places), batch.positions[places])]
        loss = (
            task.module(StatesBatch(states, batch.positions[places], batch.predicts[places], group))[0]
            * batch.predicts[places].sum()
            / count
        )
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(task.module(batch)[0].detach(), total)
    assert gradients.keys() == {name for name, _ in task.module.named_parameters()}
    for name, parameter in task.module.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            gradients[name],
            atol=1e-4,
            rtol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_evaluation_counts_each_held_out_place_once(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ee_models.training.adapters._EVAL_EXAMPLES", 2)  # passes of unequal size
    task = make_task(tmp_path, checkpoint, decoder, INFOS)
    examples = make_examples(20)[15:]
    whole = batch_of(examples, [trunk_states(decoder, LAYERS, [example]) for example in examples])
    with torch.no_grad():
        metrics = task.evaluate(CPU)
        losses, right = task.module(whole)[1], task.module.agreements(whole)
        expected = {f"{name}_loss": float(loss) for name, loss in losses.items()} | {
            f"{name}_agreement": float(x.float().mean()) for name, x in right.items()
        }
    assert metrics == pytest.approx(expected, rel=1e-4)
    # An exit agrees where its likeliest token is the full model's, told from logits over all tokens.
    head = checkpoint.tensor(head_name(checkpoint))
    said = F.linear(whole.states[FINAL][whole.predicts].float(), head).argmax(-1)
    with torch.no_grad():
        logits = F.linear(task.module.outputs(whole)["layer4"], head)
    outside = torch.ones(TINY_VOCAB, dtype=torch.bool)
    outside[task.module.adapters["layer4"].vocabulary] = False
    assert torch.equal(right["layer4"], logits.masked_fill(outside, -torch.inf).argmax(-1) == said)
    assert make_task(tmp_path, checkpoint, decoder, INFOS, held_out=range(20, 20)).evaluate(CPU) == {}


SETTINGS = LoopSettings(
    num_steps=6, learning_rate=3e-3, max_grad_norm=0.5, eval_every=100, checkpoint_every=2
)


def trained(task: AdaptersTask, folder: Path, resume: bool = False) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    train(task, SETTINGS, folder, "run", cpu=True, resume=resume, progress=False)
    return {name: tensor.clone() for name, tensor in task.module.state_dict().items()}


def test_exits_trained_together_are_those_trained_alone(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder
) -> None:
    together = trained(make_task(tmp_path / "states", checkpoint, decoder, INFOS), tmp_path / "together")
    for info in INFOS:
        alone = trained(
            make_task(tmp_path / "states", checkpoint, decoder, [info]), tmp_path / f"layer{info.layer}"
        )
        assert alone and all(torch.equal(together[name], tensor) for name, tensor in alone.items())
    start = make_task(tmp_path / "states", checkpoint, decoder, INFOS).module.state_dict()
    assert not any(torch.equal(start[name], tensor) for name, tensor in together.items()), (
        "a weight was not trained"
    )


def test_a_killed_training_of_exits_ends_with_the_same_weights(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    whole = trained(make_task(tmp_path / "states", checkpoint, decoder, INFOS), tmp_path / "whole")
    task = make_task(tmp_path / "states", checkpoint, decoder, INFOS)
    gather, steps = task.batch, []

    def batch(step: int, *others: Any) -> StatesBatch:
        steps.append(step)
        if step == 5:
            raise Killed
        return gather(step, *others)

    monkeypatch.setattr(task, "batch", batch)
    with pytest.raises(Killed):
        trained(task, tmp_path / "killed")
    again = trained(
        make_task(tmp_path / "states", checkpoint, decoder, INFOS), tmp_path / "killed", resume=True
    )
    assert steps == [0, 1, 2, 3, 4, 5] and all(
        torch.equal(again[name], tensor) for name, tensor in whole.items()
    )
    assert (tmp_path / "killed" / loop.CHECKPOINT).exists()


def test_training_lowers_the_loss_and_raises_agreement(
    tmp_path: Path, checkpoint: Checkpoint, decoder: Decoder
) -> None:
    """On the examples themselves: whether it generalises is a question of data."""
    infos = [ExitInfo(layer=4, intermediate_size=TINY_MLP)]
    task = make_task(tmp_path / "states", checkpoint, decoder, infos, held_out=range(20, 20), batch_size=20)
    init_from_trunk(task.module.adapters["layer4"], checkpoint)
    batch = task.batch(0, 0, 1, CPU)

    def measure() -> tuple[float, float]:
        with torch.no_grad():
            return float(task.module(batch)[0]), float(task.module.agreements(batch)["layer4"].float().mean())

    before = measure()
    (tmp_path / "run").mkdir()
    train(
        task,
        but(SETTINGS, num_steps=40, learning_rate=1e-2),
        tmp_path / "run",
        "run",
        cpu=True,
        resume=False,
        progress=False,
    )
    after = measure()
    assert after[0] < 0.5 * before[0] and after[1] > before[1] + 0.2, (before, after)


def test_bfloat16_products_are_those_of_float32_but_for_rounding(decoder: Decoder, exits: Exits) -> None:
    examples = make_examples(4)
    batch = batch_of(examples, [trunk_states(decoder, LAYERS, [example]) for example in examples])
    with torch.no_grad():
        wide = exits(batch)[1]
        with torch.autocast("cpu", torch.bfloat16):
            narrow = exits(batch)[1]
    for name, loss in wide.items():
        assert narrow[name].dtype == torch.float32 and float(narrow[name]) == pytest.approx(
            float(loss), rel=0.05
        )


def test_the_pages_of_one_pass_hold_every_example(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of different tokens never fall together, whatever the lengths."""
    seen: list[BatchView] = []
    run_layers = Decoder.run_layers

    def watched(self: Decoder, hidden: Tensor, lo: int, hi: int, kv: PagedKV, view: BatchView) -> Tensor:
        seen.append(view)
        return run_layers(self, hidden, lo, hi, kv, view)

    monkeypatch.setattr(Decoder, "run_layers", watched)
    examples = [Example([1] * length, 1) for length in (1, 16, 17, 40, 2)]
    trunk_states(decoder, LAYERS, examples)
    slots = seen[0].slots.tolist()
    assert len(set(slots)) == len(slots) == 76 and seen[0].max_q_len == 40
