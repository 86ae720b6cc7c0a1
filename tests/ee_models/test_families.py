"""Every family's logits are those of transformers' own modules, and no split of the layers changes a bit of
them."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of
from ee_models import families
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.config import ModelConfig, UnsupportedModelError, make_transformers_config
from ee_models.decoder import Decoder
from ee_models.families import Family
from hispec.loading.known_models import resolve_model
from tests.helpers.tiny import FAMILIES, TINY_VOCAB, tiny_checkpoint, tiny_model

CPU = torch.device("cpu")
LENS = (21, 6)  # two rows, neither a whole number of blocks
BLOCK_SIZE = 4
# At the usual 0.35, nine layers make 1e-4 out of the last bit, in transformers' arithmetic as in ours.
CALM = {"matrix_std": 0.15}


def make_view(starts: tuple[int, ...], ends: tuple[int, ...]) -> BatchView:
    """Row r's positions starts[r] to ends[r] - 1. Blocks are handed out from the last to the first."""
    num_blocks = -(-max(LENS) // BLOCK_SIZE)
    block_tables = torch.arange(len(LENS) * num_blocks).flip(0).reshape(len(LENS), num_blocks)
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [
        slots_of(block_tables[row : row + 1], own.unsqueeze(0), BLOCK_SIZE)[0]
        for row, own in enumerate(positions)
    ]
    q_lens = torch.tensor([0, *(len(own) for own in positions)])
    return BatchView(
        torch.cat(positions), torch.cat(slots), block_tables, q_lens.cumsum(0), int(q_lens.max()), max(ends)
    )


def make_kv(decoder: Decoder) -> PagedKV:
    config = decoder.config
    num_blocks = len(LENS) * -(-max(LENS) // BLOCK_SIZE)
    return PagedKV(
        config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, decoder.dtype, CPU
    )


def make_prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(TINY_VOCAB, (length,), generator=generator) for length in LENS]


@torch.inference_mode()
def prefill(decoder: Decoder, kv: PagedKV) -> Tensor:
    """Logits [tokens, vocab] of both prompts, in one pass."""
    view = make_view((0, 0), LENS)
    return decoder.logits(
        decoder.run_layers(decoder.embed(torch.cat(make_prompts())), 0, decoder.config.num_layers, kv, view),
        decoder.config.num_layers,
    )


@torch.inference_mode()
def reference(model: PreTrainedModel) -> Tensor:
    """The same from transformers, prompt by prompt."""
    return torch.cat([model(prompt.unsqueeze(0)).logits[0] for prompt in make_prompts()]).float()


def load(path: Path, family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return Decoder.load(open_checkpoint(tiny_checkpoint(path, family, dtype=dtype, **options)), dtype, CPU)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def decoder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(tmp_path_factory.mktemp(family), family, **CALM)


@pytest.fixture(scope="module")
def expected(family: str) -> Tensor:
    return reference(tiny_model(family, **CALM))


def test_logits_equal_transformers(decoder: Decoder, expected: Tensor) -> None:
    torch.testing.assert_close(prefill(decoder, make_kv(decoder)), expected, atol=1e-4, rtol=1e-4)


def test_tied_and_untied_heads_both_equal_transformers(tmp_path: Path, family: str) -> None:
    model = {
        "num_layers": 2,
        "tie_word_embeddings": not FAMILIES[family].get("tie_word_embeddings", False),
        **CALM,
    }
    decoder = load(tmp_path, family, **model)
    assert decoder.config.tie_word_embeddings == model["tie_word_embeddings"]
    torch.testing.assert_close(
        prefill(decoder, make_kv(decoder)), reference(tiny_model(family, **model)), atol=1e-4, rtol=1e-4
    )


@torch.inference_mode()
def test_every_split_of_the_layers_gives_the_same_bits(decoder: Decoder) -> None:
    num_layers = decoder.config.num_layers
    whole_kv = make_kv(decoder)
    whole = prefill(decoder, whole_kv)
    view, token_ids = make_view((0, 0), LENS), torch.cat(make_prompts())
    for draft, check in combinations_with_replacement(range(num_layers + 1), 2):
        kv, hidden = make_kv(decoder), decoder.embed(token_ids)
        for lo, hi in ((0, draft), (draft, check), (check, num_layers)):
            hidden = decoder.run_layers(hidden, lo, hi, kv, view)
        assert torch.equal(decoder.logits(hidden, num_layers), whole), (draft, check)
        assert torch.equal(kv.data, whole_kv.data), (draft, check)


@torch.inference_mode()
def test_a_prompt_in_pieces_equals_transformers(decoder: Decoder, expected: Tensor) -> None:
    """Each row goes on from its own position, a few tokens at a time, over the KV left by the passes
    before."""
    kv, num_layers = make_kv(decoder), decoder.config.num_layers
    starts = (0, 0)
    for ends in ((4, 1), (13, 2), (14, 5), (21, 6)):
        token_ids = torch.cat(
            [prompt[start:end] for prompt, start, end in zip(make_prompts(), starts, ends, strict=True)]
        )
        hidden = decoder.run_layers(decoder.embed(token_ids), 0, num_layers, kv, make_view(starts, ends))
        wanted = torch.cat(
            [row[start:end] for row, start, end in zip(expected.split(LENS), starts, ends, strict=True)]
        )
        torch.testing.assert_close(decoder.logits(hidden, num_layers), wanted, atol=1e-4, rtol=1e-4)
        starts = ends


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_half_precision_is_as_near_to_float32_as_transformers_is(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    decoder = load(tmp_path, name, dtype, num_layers=3)
    model = tiny_model(name, num_layers=3).to(dtype)
    exact = reference(model.float())  # of the rounded weights, so that only the arithmetic differs
    own_error = (prefill(decoder, make_kv(decoder)).float() - exact).abs().mean()
    their_error = (reference(model.to(dtype)) - exact).abs().mean()
    assert own_error < 1.5 * their_error


def test_rotary_frequencies_are_those_of_transformers(family: str) -> None:
    model = tiny_model(family, num_layers=1)
    config = ModelConfig.from_transformers(model.config)
    assert torch.equal(config.rope.inv_freq(config.head_dim), model.model.rotary_emb.inv_freq)
    if config.rope.kind != "default":
        assert torch.equal(
            config.rope.inv_freq(config.head_dim), ROPE_INIT_FUNCTIONS[config.rope.kind](model.config, CPU)[0]
        )


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 64}], ids=str)
def test_an_original_length_at_the_top_of_a_config_is_the_one_that_counts(inner: dict[str, Any]) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **inner}
    own = dict.fromkeys(("rope_scaling", "rope_parameters"), scaling)
    fields = tiny_model("llama3", num_layers=1).config.to_dict() | own
    config = make_transformers_config(fields | {"original_max_position_embeddings": 16})
    rope = ModelConfig.from_transformers(config).rope
    theirs = LlamaRotaryEmbedding(config).inv_freq
    assert rope.original_max_position_embeddings == 16 and torch.equal(rope.inv_freq(len(theirs) * 2), theirs)


WINDOWS: list[tuple[str, dict[str, Any], int | None]] = [
    ("mistral", {}, 256),
    ("mistral", {"sliding_window": None}, None),
    ("llama", {"sliding_window": 16}, None),
    ("qwen2", {"sliding_window": 16}, None),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, 16),
    (
        "qwen3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 16,
        },
        16,
    ),
]


@pytest.mark.parametrize(("name", "fields", "window"), WINDOWS)
def test_a_window_is_reported_where_a_layer_has_one(
    name: str, fields: dict[str, Any], window: int | None
) -> None:
    assert (
        ModelConfig.from_transformers(tiny_model(name, num_layers=2, **fields).config).sliding_window
        == window
    )


def test_layer_types_of_another_kind_are_refused() -> None:
    config = tiny_model("qwen3", num_layers=2).config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match=r"layer_types is \['linear_attention'\]"):
        ModelConfig.from_transformers(config)


def test_one_entry_makes_a_family_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed-OSS is a Llama whose queries, keys and values have biases, and whose outputs have none."""
    seed_oss: dict[str, Any] = {"class": "SeedOss", "num_layers": 2, "head_dim": 12, **CALM}
    folder = tiny_checkpoint(tmp_path, **seed_oss)
    with pytest.raises(
        UnsupportedModelError, match="architectures is 'SeedOssForCausalLM'; supported: Llama"
    ):
        open_checkpoint(folder)
    family = Family(
        "SeedOssForCausalLM", "seed_oss", "SeedOssConfig", qkv_bias=True, output_bias=False, mlp_bias=None
    )
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, family))
    decoder = Decoder.load(open_checkpoint(folder), torch.float32, CPU)
    expected = reference(tiny_model(**seed_oss))
    torch.testing.assert_close(prefill(decoder, make_kv(decoder)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_real_model_equals_transformers() -> None:
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    decoder = Decoder.load(checkpoint, torch.float32, CPU)
    expected = reference(AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32))
    torch.testing.assert_close(prefill(decoder, make_kv(decoder)), expected, atol=1e-3, rtol=1e-4)
