"""The LayerSkip recipe: what is dropped, what is learnt from, and that what comes out is a checkpoint like
any other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.errors import CheckpointError, TrainingError
from ee_models.training.examples import Example
from ee_models.training.layerskip import ExitLoss, LayerSkipTask
from ee_models.training.loop import train
from ee_models.training.settings import LayerSkipSettings, LoopSettings
from ee_models.training.trunk import Batch, _watched, collate, layers_kept, load_trainable, save_checkpoint
from tests.helpers.runs import but
from tests.helpers.tiny import TINY_VOCAB, tiny_checkpoint, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
LAYERS = 4
# All that is random is in use: layers are dropped often, and other exits learn in each step.
BUSY = LayerSkipSettings(dropout_max=0.5, exit_loss_scale=0.5, rotation=2)
ONLY_LAST = {LAYERS - 1: 1.0}


def small_model(family: str = "llama", **fields: Any) -> PreTrainedModel:
    return tiny_model(family, num_layers=LAYERS, matrix_std=0.15, **fields)


def make_examples(count: int = 8, seed: int = 0) -> list[Example]:
    """Of 5 to 11 tokens, 0 to 3 of them prompt."""
    generator = torch.Generator().manual_seed(seed)
    lens = [5 + index % 7 for index in range(count)]
    return [
        Example(torch.randint(TINY_VOCAB, (n,), generator=generator).tolist(), index % 4)
        for index, n in enumerate(lens)
    ]


def make_task(settings: LayerSkipSettings = BUSY, family: str = "llama", **fields: Any) -> LayerSkipTask:
    return LayerSkipTask(
        small_model(family),
        make_examples(),
        make_examples(5, seed=1),
        settings,
        num_steps=5,
        **{"batch_size": 3, **fields},
    )


def hidden_states(model: PreTrainedModel, example: Example) -> list[torch.Tensor]:
    """Of transformers: after 0, 1, .. layers [tokens, hidden]; its last one is normed."""
    with torch.no_grad():
        return [
            hidden[0]
            for hidden in model(torch.tensor([example.token_ids]), output_hidden_states=True).hidden_states
        ]


@pytest.mark.parametrize("family", ["llama", "smollm2", "mistral", "qwen2", "qwen3"])
def test_the_last_exits_loss_is_the_models_own(family: str) -> None:
    model = small_model(family)
    examples = make_examples()
    batch = replace(collate(examples, CPU), weights=ONLY_LAST)
    labels = torch.full(batch.token_ids.shape, -100)
    for row, example in enumerate(examples):
        labels[row, example.prompt_len : len(example.token_ids)] = torch.tensor(
            example.token_ids[example.prompt_len :]
        )
    with torch.no_grad():
        loss, values = ExitLoss(model)(batch)
        expected = model(batch.token_ids, attention_mask=batch.attention_mask, labels=labels).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(values["last_loss"], expected)
    assert "exits_loss" not in values


def test_an_exits_loss_is_that_of_its_hidden_state_through_the_models_norm_and_head() -> None:
    model, examples = small_model(), make_examples()
    weights = {0: 0.1, 2: 0.3, 3: 0.6}
    with torch.no_grad():
        loss, values = ExitLoss(model)(replace(collate(examples, CPU), weights=weights))
        sums, count = dict.fromkeys(weights, torch.zeros(())), 0
        for example in examples:
            first = max(1, example.prompt_len)
            targets = torch.tensor(example.token_ids[first:])
            count += len(targets)
            for layer in weights:
                hidden = hidden_states(model, example)[layer + 1]
                logits = model.lm_head(hidden if layer == LAYERS - 1 else model.model.norm(hidden))
                sums[layer] = sums[layer] + F.cross_entropy(logits[first - 1 : -1], targets, reduction="sum")
    torch.testing.assert_close(
        loss, torch.stack([weight * sums[layer] / count for layer, weight in weights.items()]).sum()
    )
    torch.testing.assert_close(values["exits_loss"], (sums[0] + sums[2]) / (2 * count))


def test_padding_and_prompts_have_no_say() -> None:
    module, examples = ExitLoss(small_model()), make_examples()
    batch = replace(collate(examples, CPU), weights={1: 0.4, 3: 0.6})
    loss, _ = module(batch)
    padded = torch.where(batch.attention_mask.bool(), batch.token_ids, 77)
    assert torch.equal(module(replace(batch, token_ids=padded))[0], loss)
    longer = Example([5] * 40, 39)  # one target, and 29 places of padding more for all others
    both = module(replace(collate([*examples, longer], CPU), weights=batch.weights))[0]
    alone = module(replace(collate([longer], CPU), weights=batch.weights))[0]
    torch.testing.assert_close(both, (loss * len(batch.targets) + alone) / (len(batch.targets) + 1))
    targets = [token for example in examples for token in example.token_ids[max(1, example.prompt_len) :]]
    assert batch.targets.tolist() == targets


def test_gradients_are_those_of_logits_made_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for tokens_at_once in (7, 10_000):
        monkeypatch.setattr("ee_models.training.losses._LOGITS", tokens_at_once * TINY_VOCAB)
        module = ExitLoss(small_model())
        module(replace(collate(make_examples(), CPU), weights={1: 0.4, 3: 0.6}))[0].backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def all_hidden(model: PreTrainedModel, batch: Batch) -> list[torch.Tensor]:
    """[rows, q_len, hidden] after each layer."""
    everywhere = replace(batch, places=torch.arange(batch.token_ids.numel()))
    with torch.no_grad():
        found = ExitLoss(model).hidden_at_places(range(LAYERS), everywhere)
    return [found[layer].unflatten(0, batch.token_ids.shape) for layer in range(LAYERS)]


def test_rows_pass_by_the_layers_that_are_dropped_for_them_and_no_others() -> None:
    model, batch = small_model(), collate(make_examples(3), CPU)
    plain = all_hidden(model, batch)
    everything_kept = all_hidden(model, replace(batch, keep=torch.ones(LAYERS, 3, dtype=torch.bool)))
    assert all(torch.equal(one, other) for one, other in zip(plain, everything_kept, strict=True))

    keep = torch.ones(LAYERS, 3, dtype=torch.bool)
    keep[2, 1] = False
    dropped = all_hidden(model, replace(batch, keep=keep))
    assert torch.equal(dropped[2][1], dropped[1][1])
    for layer in range(LAYERS):
        assert torch.equal(dropped[layer][[0, 2]], plain[layer][[0, 2]])
        assert torch.equal(dropped[layer][1], plain[layer][1]) == (layer < 2)
    # And with that layer taken out of the model, the row is what the others make of it.
    del model.model.layers[2]
    model.config.num_hidden_layers -= 1
    with torch.no_grad():
        found = ExitLoss(model).hidden_at_places(
            [2], replace(batch, places=torch.arange(batch.token_ids.numel()))
        )
    torch.testing.assert_close(dropped[3][1], found[2].unflatten(0, batch.token_ids.shape)[1])


class AddOne(torch.nn.Module):
    """A layer as in older transformers: its hidden state is the first of a tuple."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, str]:
        return hidden_states + 1, "more"


def test_layers_that_return_tuples_are_dropped_alike() -> None:
    layers = torch.nn.ModuleList([AddOne(), AddOne()])
    with _watched(layers, torch.tensor([[True, False], [True, True]]), [0, 1]) as found:
        hidden, more = layers[0](hidden_states=torch.zeros(2, 1, 1))
        hidden, more = layers[1](hidden)
    assert (hidden.flatten().tolist(), more) == ([2.0, 1.0], "more")
    assert (found[0].flatten().tolist(), found[1].flatten().tolist()) == ([1.0, 0.0], [2.0, 1.0])
    assert layers[1](torch.zeros(2, 1, 1))[0].flatten().tolist() == [1.0, 1.0], "still watched"


def test_dropout_is_as_frequent_as_its_rate_and_a_function_of_seed_step_and_process() -> None:
    settings = LayerSkipSettings(dropout_max=0.6)
    task = make_task(settings, batch_size=1000)
    keep = task.batch(3, 0, 1, CPU).keep
    assert keep is not None and keep.shape == (LAYERS, 1000)
    rates = settings.dropout_rates(LAYERS, 3, 5)
    assert (1 - keep.float().mean(1)).tolist() == pytest.approx(rates, abs=0.05)
    assert keep[0].all()
    again = make_task(settings, batch_size=1000).batch(3, 0, 1, CPU).keep
    assert again is not None and torch.equal(keep, again)
    state = torch.get_rng_state()
    task.module(task.batch(3, 0, 1, CPU))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was drawn from"
    halves = [task.batch(3, rank, 2, CPU).keep for rank in (0, 1)]
    others = [
        task.batch(4, 0, 1, CPU).keep,
        make_task(settings, batch_size=1000, seed=1).batch(3, 0, 1, CPU).keep,
    ]
    assert halves[0] is not None and halves[1] is not None
    assert not torch.equal(halves[0], halves[1])
    assert all(other is not None and not torch.equal(keep, other) for other in others)


def test_rates_of_0_and_1_are_never_and_always() -> None:
    assert make_task(LayerSkipSettings(dropout_max=0.0)).batch(0, 0, 1, CPU).keep is None
    keep = layers_kept([0.0, 1.0], 200, 0, 0, 0)
    assert keep is not None and keep[0].all() and not keep[-1].any()
    assert make_task(LayerSkipSettings(dropout_schedule="exponential")).batch(0, 0, 1, CPU).keep is None


def test_no_dropout_but_that_of_layers_is_drawn() -> None:
    """A config's attention dropout would take its noise from the global generator."""
    model = small_model(attention_dropout=0.5)
    task = LayerSkipTask(model, make_examples(), [], BUSY, batch_size=3, num_steps=5)
    batch = task.batch(0, 0, 1, CPU)
    assert task.module.training
    assert torch.equal(task.module(batch)[0], task.module(batch)[0])


def test_processes_share_a_batch() -> None:
    task = make_task()
    whole = task.batch(2, 0, 1, CPU)
    parts = [task.batch(2, rank, 2, CPU) for rank in (0, 1)]
    assert task.num_tokens(whole) == sum(map(task.num_tokens, parts)) < whole.token_ids.numel()
    assert sorted(whole.targets.tolist()) == sorted(
        token for part in parts for token in part.targets.tolist()
    )
    with pytest.raises(
        TrainingError, match="batch_size is 3; it must be at least the number of processes, 4"
    ):
        task.batch(2, 3, 4, CPU)


def run(task: LayerSkipTask, folder: Path, resume: bool = False) -> dict[str, float]:
    settings = LoopSettings(num_steps=5, learning_rate=1e-3, eval_every=2, checkpoint_every=2)
    folder.mkdir(exist_ok=True)
    return train(task, settings, folder, "this run", cpu=True, resume=resume, progress=False).metrics


@pytest.mark.parametrize("lora_rank", [None, 3])
def test_a_run_that_was_killed_and_resumed_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int | None
) -> None:
    settings = but(BUSY, lora_rank=lora_rank)
    whole = make_task(settings)
    started = {name: parameter.clone() for name, parameter in whole.module.named_parameters()}
    metrics = run(whole, tmp_path / "whole")

    killed = make_task(settings)
    make_batch = killed.batch

    def batch(step: int, *others: Any) -> Batch:
        if step == 3:
            raise KeyboardInterrupt
        return make_batch(step, *others)

    monkeypatch.setattr(killed, "batch", batch)
    with pytest.raises(KeyboardInterrupt):
        run(killed, tmp_path / "killed")
    torch.manual_seed(99)  # whatever the global generator says
    resumed = make_task(settings)
    assert run(resumed, tmp_path / "killed", resume=True) == metrics
    weights = dict(resumed.module.named_parameters())
    for name, parameter in whole.module.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert torch.equal(parameter, started[name]) != parameter.requires_grad, (
            f"{name} was not trained, or was not frozen"
        )


def test_evaluation_is_what_transformers_says_of_each_exit() -> None:
    task = make_task(eval_exits=[1, 3])
    model, examples = task.module.model.requires_grad_(False), make_examples(5, seed=1)
    with torch.no_grad():
        metrics = task.evaluate(CPU)
    sums, agreed, count = [0.0] * 3, [0] * 2, 0
    for example in examples:
        first = max(1, example.prompt_len)
        targets = torch.tensor(example.token_ids[first:])
        states = hidden_states(model, example)
        logits = [
            model.lm_head(hidden)[first - 1 : -1]
            for hidden in (model.model.norm(states[1]), model.model.norm(states[3]), states[4])
        ]
        sums = [
            total + float(F.cross_entropy(one, targets, reduction="sum"))
            for total, one in zip(sums, logits, strict=True)
        ]
        agreed = [
            total + int((one.argmax(-1) == logits[2].argmax(-1)).sum())
            for total, one in zip(agreed, logits[:2], strict=True)
        ]
        count += len(targets)
    assert metrics == pytest.approx(
        {
            "last_loss": sums[2] / count,
            "exit_1_loss": sums[0] / count,
            "exit_1_agreement": agreed[0] / count,
            "exit_3_loss": sums[1] / count,
            "exit_3_agreement": agreed[1] / count,
        }
    )
    assert sorted(make_task().evaluate(CPU)) == sorted(
        ["last_loss", *(f"exit_{n}_{what}" for n in (1, 2, 3) for what in ("loss", "agreement"))]
    )


def exit_logits(folder: Path, tokens: list[int]) -> list[torch.Tensor]:
    """Of the runtime's decoder: [tokens, vocab] after each layer."""
    decoder = Decoder.load(open_checkpoint(folder), torch.float32, CPU)
    config = decoder.config
    table, positions = torch.arange(4).unsqueeze(0), torch.arange(len(tokens))
    kv = PagedKV(config.num_layers, 4, 16, config.num_kv_heads, config.head_dim, decoder.dtype, CPU)
    view = BatchView(
        positions,
        slots_of(table, positions.unsqueeze(0), 16)[0],
        table,
        torch.tensor([0, len(tokens)]),
        len(tokens),
        len(tokens),
    )
    with torch.inference_mode():
        hidden, logits = decoder.embed(torch.tensor(tokens)), []
        for layer in range(config.num_layers):
            hidden = decoder.run_layers(hidden, layer, layer + 1, kv, view)
            logits.append(decoder.logits(hidden.clone(), layer + 1))
    return logits


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2"])
@pytest.mark.parametrize("lora_rank", [None, 3])
def test_what_is_saved_decodes_as_it_was_trained(tmp_path: Path, family: str, lora_rank: int | None) -> None:
    task = make_task(but(BUSY, lora_rank=lora_rank), family)
    run(task, tmp_path / "run")
    model, example = task.module.model, make_examples()[6]
    model.config.quantization_config = {
        "quant_method": "gguf"
    }  # of a model that was unpacked from such a file
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    before = [parameter.clone() for parameter in model.parameters()]
    task.save(tmp_path / "model", tokenizer=tiny_tokenizer(tmp_path / "tokenizer"))
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)), (
        "saving changed the model"
    )

    states = hidden_states(model, example)
    expected = [task.module.logits(hidden) for hidden in states[1:-1]] + [model.lm_head(states[-1])]
    for found, logits in zip(exit_logits(tmp_path / "model", example.token_ids), expected, strict=True):
        torch.testing.assert_close(found, logits.detach(), atol=1e-4, rtol=1e-4)
    reloaded = load_trainable(tmp_path / "model")
    assert not any("lora" in name for name, _ in reloaded.named_parameters())
    assert reloaded.config.tie_word_embeddings == tied
    torch.testing.assert_close(hidden_states(reloaded, example)[-1], states[-1], atol=1e-5, rtol=1e-5)
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    modes = {
        path.stat().st_mode
        for path in (tmp_path / "model").iterdir()
        if path.suffix in (".json", ".safetensors")
    }
    assert len(modes) == 1, "who may read the config may read the weights"
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())


def test_lora_starts_as_the_model_itself_and_leaves_norms_embeddings_and_head_alone() -> None:
    task = make_task(but(BUSY, lora_rank=2, lora_alpha=8))
    names = [name for name, parameter in task.module.named_parameters() if parameter.requires_grad]
    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert sorted(names) == sorted(
        f"model.model.layers.{layer}.{'self_attn' if projection[0] in 'qkvo' else 'mlp'}"
        f".{projection}.lora_{part}.default.weight"
        for layer in range(LAYERS)
        for projection in projections
        for part in "AB"
    )
    assert sum(len(group.parameters) for group in task.parameter_groups()) == len(names)
    batch = replace(collate(make_examples(), CPU), weights={1: 0.5, 3: 0.5})
    assert torch.equal(task.module(batch)[0], ExitLoss(small_model())(batch)[0])


def test_a_checkpoint_can_be_stored_in_another_type(tmp_path: Path) -> None:
    task = make_task(family="smollm2")
    task.save(tmp_path / "model", dtype=torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.dtype == torch.bfloat16 and checkpoint.config.tie_word_embeddings
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_trainable(tmp_path / "model").dtype == torch.float32


def test_a_models_own_defaults_of_sampling_are_written_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older models have a temperature without do_sample, which some versions of transformers do not write."""

    def refuse(config: GenerationConfig, *_: Any, **__: Any) -> None:
        if config.temperature not in (None, 1.0):
            raise ValueError("GenerationConfig is invalid")

    monkeypatch.setattr(GenerationConfig, "validate", refuse)
    model = tiny_model()
    model.generation_config.temperature, model.generation_config.eos_token_id = 0.6, [7, 9]
    save_checkpoint(tmp_path / "model", model, model.state_dict(), torch.float32, None)
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (written["temperature"], written["eos_token_id"]) == (0.6, [7, 9])
    assert model.generation_config.temperature == 0.6
    assert open_checkpoint(tmp_path / "model").config.eos_token_ids == (7, 9)


def test_saving_replaces_a_checkpoint_as_a_whole_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, folder = make_task(), tmp_path / "model"
    task.save(folder)
    (folder / "left over").touch()
    with torch.no_grad():
        task.module.model.model.norm.weight.fill_(2.0)
    task.save(folder)
    assert open_checkpoint(folder).tensor("model.norm.weight").eq(2).all()
    assert not (folder / "left over").exists()

    def fail(draft: Path, **_: Any) -> None:
        (draft / "config.json").touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(task.module.model, "save_pretrained", fail)
    with pytest.raises(TrainingError, match=r"cannot write .*model: no space left on device"):
        task.save(folder)
    assert open_checkpoint(folder).tensor("model.norm.weight").eq(2).all()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").touch()
    with pytest.raises(TrainingError, match="thesis exists and is no checkpoint"):
        task.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def test_a_model_is_loaded_for_training_only_if_it_can_be_decoded_afterwards(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "tied", "smollm2", num_layers=2)
    model = load_trainable(tmp_path / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fields = json.loads((tmp_path / "tied" / "config.json").read_text())
    shutil.copytree(tmp_path / "tied", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(fields | {"hidden_act": "gelu"}))
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'"):
        load_trainable(tmp_path / "other")


def test_what_cannot_be_trained_is_refused() -> None:
    def make(
        examples: list[Example],
        held_out: tuple[Example, ...] | list[Example] = (),
        model: PreTrainedModel | None = None,
        **others: Any,
    ) -> None:
        LayerSkipTask(model or small_model(), examples, held_out, BUSY, batch_size=3, num_steps=5, **others)

    good = make_examples()
    with pytest.raises(TrainingError, match="there are no examples to train on"):
        make([])
    with pytest.raises(
        TrainingError, match="training example 1 has 3 tokens, 3 of them prompt: none is left to predict"
    ):
        make([good[0], Example([1, 2, 3], 3)])
    with pytest.raises(TrainingError, match="held-out example 0 has 1 tokens, 0 of them prompt"):
        make(good, [Example([1], 0)])
    with pytest.raises(TrainingError, match=f"training example 0 has tokens outside 0 to {TINY_VOCAB - 1}"):
        make([Example([1, TINY_VOCAB], 0)])
    with pytest.raises(TrainingError, match=r"eval_exits is \[1, 4\]; early exits of this model are 1 to 3"):
        make(good, eval_exits=[4, 1])
    with pytest.raises(TrainingError, match="training all weights takes them in float32"):
        make(good, model=small_model().bfloat16())


def test_lora_trains_in_float32_beside_frozen_weights_of_any_type() -> None:
    task = LayerSkipTask(
        small_model().bfloat16(), make_examples(), [], but(BUSY, lora_rank=2), batch_size=3, num_steps=5
    )
    assert {parameter.dtype for group in task.parameter_groups() for parameter in group.parameters} == {
        torch.float32
    }
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = task.module(task.batch(0, 0, 1, CPU))
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(loss)
    assert all(
        parameter.grad is not None for group in task.parameter_groups() for parameter in group.parameters
    )


NUM_SYMBOLS = 24


def make_language(num_texts: int, length: int, seed: int) -> list[Example]:
    """Texts in which the last two symbols tell the next, with probability 0.8, or the two next likely ones:
    at best 0.64 nats a symbol."""
    table = torch.rand(
        NUM_SYMBOLS, NUM_SYMBOLS, NUM_SYMBOLS, generator=torch.Generator().manual_seed(7)
    ).argsort(-1)
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(NUM_SYMBOLS, (num_texts, 2), generator=generator)
    for _ in range(length - 2):
        choice = torch.multinomial(
            torch.tensor([0.8, 0.1, 0.1]), num_texts, replacement=True, generator=generator
        )
        following = table[texts[:, -2], texts[:, -1], choice]
        texts = torch.cat([texts, following[:, None]], 1)
    return [Example(text, 2) for text in texts.tolist()]


@pytest.mark.slow
def test_the_recipe_teaches_exits_at_little_cost_to_the_last_layer(tmp_path: Path) -> None:
    """From scratch, beside the same steps with the last layer's loss alone. Its loss, in nats a symbol, may
    be 0.03 above what it is then."""
    recipe = LayerSkipSettings(
        dropout_max=0.1, exit_loss_scale=0.2, rotation=2, dropout_schedule="exponential"
    )
    exits, num_steps = [1, 2, 3, 4, 5], 350
    found = {}
    for name, settings in (
        ("with", recipe),
        ("without", but(recipe, dropout_max=0.0, exit_loss_scale=0.0)),
    ):
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_SYMBOLS, **sizes))
        task = LayerSkipTask(
            model,
            make_language(2000, 64, 0),
            make_language(100, 64, 1),
            settings,
            batch_size=32,
            num_steps=num_steps,
            eval_exits=exits,
        )
        loop = LoopSettings(
            num_steps=num_steps, learning_rate=3e-3, eval_every=num_steps, checkpoint_every=num_steps
        )
        (tmp_path / name).mkdir()
        found[name] = train(task, loop, tmp_path / name, name, cpu=True, resume=False, progress=False).metrics
    with_it, without = found["with"], found["without"]
    assert without["last_loss"] < 0.8, "the language was not learnt, so exits could not be"
    assert with_it["last_loss"] < without["last_loss"] + 0.03
    gains = [without[f"exit_{layer}_loss"] - with_it[f"exit_{layer}_loss"] for layer in exits]
    assert all(gain > least for gain, least in zip(gains, [0.25, 0.5, 0.4, 0.25, 0.1], strict=True)), gains
    assert with_it["exit_2_agreement"] > without["exit_2_agreement"] + 0.2
