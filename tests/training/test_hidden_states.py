"""The trunk's hidden states at the exits: the decoder's own, computed once, kept on disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ee_models.training.hidden_states as states_module
from ee_models.decoder import Decoder
from ee_models.errors import TrainingError
from ee_models.training.examples import Example
from ee_models.training.hidden_states import FINAL, num_bytes, trunk_states
from tests.helpers import training_adapters
from tests.helpers.training_adapters import LAYERS, make_examples, make_store
from tests.laws.test_layers import CountingDecoder, make_kv, whole_view

checkpoint, decoder = training_adapters.checkpoint, training_adapters.decoder  # fixtures


def test_states_are_the_decoders_own(decoder: Decoder) -> None:
    examples = make_examples(5)
    states = trunk_states(decoder, (4, 2), examples)
    start = 0
    for example in examples:
        length = len(example.token_ids)
        hidden, kv = decoder.embed(torch.tensor(example.token_ids)), make_kv(decoder)
        for lo, hi in ((0, 2), (2, 4), (4, 6)):
            hidden = decoder.run_layers(hidden, lo, hi, kv, whole_view(length))
            expected = hidden if hi < 6 else decoder.normed(hidden)
            found = states[FINAL if hi == 6 else f"layer{hi}"][start : start + length]
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected.to(torch.bfloat16))
        start += length
    assert all(len(tensor) == start for tensor in states.values())
    with pytest.raises(ValueError, match="at least one example"):
        trunk_states(decoder, LAYERS, [])


def test_states_can_be_had_as_they_were_computed(decoder: Decoder) -> None:
    (example,) = make_examples(1)
    length = len(example.token_ids)
    hidden = decoder.embed(torch.tensor(example.token_ids))
    expected = decoder.normed(decoder.run_layers(hidden, 0, 6, make_kv(decoder), whole_view(length)))
    assert expected.dtype == torch.float32
    assert torch.equal(trunk_states(decoder, (), [example], torch.float32)[FINAL], expected)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards, and several passes per shard."""
    monkeypatch.setattr(states_module, "_EXAMPLES_PER_SHARD", 4)
    monkeypatch.setattr(states_module, "_TOKENS_PER_PASS", 25)


@pytest.mark.usefixtures("small_shards")
def test_a_store_gives_every_examples_states_and_computes_them_once(tmp_path: Path, decoder: Decoder) -> None:
    examples = make_examples(10)
    counting = CountingNormedDecoder(decoder)
    store = make_store(tmp_path, counting, examples)
    num_tokens = sum(len(example.token_ids) for example in examples)
    assert counting.layer_positions == 6 * num_tokens
    for index, example in enumerate(examples):
        expected = trunk_states(decoder, LAYERS, [example])
        found = store.read(index)
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in found
        )
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) - num_bytes(
        examples, 2, 48
    ) in range(3 * 3 * 200)

    again = make_store(tmp_path, counting, examples)
    assert counting.layer_positions == 6 * num_tokens, "what was there was computed again"
    assert all(torch.equal(again.read(7)[name], store.read(7)[name]) for name in (FINAL, "layer2", "layer4"))
    # Fewer exits, or the same shards with other examples after them: nothing that is there is computed again.
    make_store(tmp_path, counting, examples[:8], layers=(4,))
    assert counting.layer_positions == 6 * num_tokens


class CountingNormedDecoder(CountingDecoder):
    def normed(self, hidden: Tensor) -> Tensor:
        return self._decoder.normed(hidden)


@pytest.mark.usefixtures("small_shards")
def test_only_what_is_missing_is_computed(tmp_path: Path, decoder: Decoder) -> None:
    examples = make_examples(10)
    make_store(tmp_path, decoder, examples)
    shards = sorted(
        tmp_path.iterdir(), key=lambda folder: len(load_file(folder / "final.safetensors")[FINAL])
    )
    assert len(shards) == 3
    (shards[0] / "layer4.safetensors").unlink()
    (shards[1] / "final.safetensors").unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    counting = CountingNormedDecoder(decoder)
    store = make_store(tmp_path, counting, examples)
    lengths = [len(load_file(folder / "final.safetensors")[FINAL]) for folder in shards]
    assert counting.layer_positions == 6 * (lengths[0] + lengths[1])
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), (
        "what was there was written again"
    )
    for index, example in enumerate(examples):
        assert all(
            torch.equal(store.read(index)[name], tensor)
            for name, tensor in trunk_states(decoder, LAYERS, [example]).items()
        )
    # Another exit: its states only, beside the others.
    make_store(tmp_path, decoder, examples, layers=(1, 2, 4))
    assert (
        all((folder / "layer1.safetensors").exists() for folder in shards)
        and len(list(tmp_path.iterdir())) == 3
    )


def test_states_of_another_model_or_other_examples_are_kept_apart(tmp_path: Path, decoder: Decoder) -> None:
    examples = make_examples(3)
    make_store(tmp_path, decoder, examples)
    make_store(tmp_path, decoder, examples, model="model torch.bfloat16")
    make_store(tmp_path, decoder, [*examples[:2], Example([*examples[2].token_ids[:-1], 3], 1)])
    assert len(list(tmp_path.iterdir())) == 3
    # The same tokens with another border between them.
    one, two = Example([1, 2, 3], 1), Example([4, 5, 6, 7], 1)
    make_store(tmp_path, decoder, [one, two])
    make_store(tmp_path, decoder, [Example([1, 2, 3, 4], 1), Example([5, 6, 7], 1)])
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_store_goes_on_and_a_full_disk_leaves_no_half_file(
    tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = make_examples(10)
    calls = []

    def full(tensors: dict[str, Tensor], draft: Path) -> None:
        calls.append(draft)
        if len(calls) == 5:
            draft.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, draft)

    with monkeypatch.context() as patch:
        patch.setattr(states_module, "save_file", full)
        with pytest.raises(TrainingError, match=r"cannot write .*No space left on device"):
            make_store(tmp_path, decoder, examples)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4 and not any(
        path.name.startswith(".") for path in tmp_path.rglob("*")
    )
    counting = CountingNormedDecoder(decoder)
    store = make_store(tmp_path, counting, examples)
    assert counting.layer_positions < 6 * sum(len(example.token_ids) for example in examples), (
        "the first shard was computed again"
    )
    assert all(
        torch.equal(store.read(9)[name], tensor)
        for name, tensor in trunk_states(decoder, LAYERS, examples[9:]).items()
    )


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}      "], ids=["empty", "without tensors"])
def test_a_damaged_shard_is_a_training_error_or_computed_again(
    tmp_path: Path, decoder: Decoder, damage: bytes
) -> None:
    examples = make_examples(3)
    make_store(tmp_path, decoder, examples)
    next(tmp_path.rglob("layer4.safetensors")).write_bytes(damage)
    try:
        store = make_store(tmp_path, decoder, examples)
        found = store.read(1)
    except TrainingError as error:
        assert "layer4.safetensors" in str(error)
    else:
        assert all(
            torch.equal(found[name], tensor)
            for name, tensor in trunk_states(decoder, LAYERS, examples[1:2]).items()
        )
