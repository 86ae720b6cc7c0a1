"""What is no model: a wrong type, a typo of a known name, nothing at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ee_models.errors import CheckpointError, HiSpecError
from ee_models.kernels import runs_numba
from ee_models.kernels.numba_narrow import multiplies_bfloat16
from ee_models.linear import Linear
from ee_models.narrow_linear import NarrowLinear
from ee_models.panel_linear import PanelLinear
from hispec import LLM, ConfigError
from hispec.config import DraftConfig, EngineConfig, SpeculativeConfig
from hispec.loading.draft_models import DraftModels
from hispec.loading.known_models import ModelNotFetchedError, nearest_known
from hispec.loading.target_model import load_decoder, open_model, select_dtype
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the hub nor anything downloaded before."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))


@pytest.mark.parametrize("model", [None, 5, "", b"smollm2", ["smollm2"], Path])
def test_what_is_no_name_or_path_is_refused(model: Any) -> None:
    known = (
        r"^model=.*: give a name that `hispec fetch` knows \(smollm2, smollm2-ee, smollm2-maths\), a hub id"
    )
    with pytest.raises(ConfigError, match=known):
        LLM(model)


@pytest.mark.parametrize("model", ["smolm2", "SmolLM2", "./smollm2", Path("smollm2")])
def test_a_typo_of_a_known_name_gets_that_name(model: str | Path) -> None:
    known = r"`hispec fetch` knows: smollm2, smollm2-ee, smollm2-maths \(did you mean 'smollm2'\?\)$"
    with pytest.raises(CheckpointError, match=known):
        open_model(model)


NOWHERE = "~there-is-no-such-user/folder"
GUESSES = {"guess_confidence": 0.5, "guess_path": NOWHERE}


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model": NOWHERE}, f"cannot load model '{NOWHERE}': there is no such file or folder"),
        (
            {"speculative": {"draft": {"kind": "adapter", "layer": 2, "path": NOWHERE}}},
            f"speculative.draft: {NOWHERE} holds no exits",
        ),
        (
            {
                "speculative": {
                    "draft": {"kind": "ngram", "ngram": {"guess_confidence": 0.5, "guess_path": NOWHERE}}
                }
            },
            f"speculative.draft.ngram.guess_path: {NOWHERE} holds no n-grams",
        ),
        ({"speculative": {"draft": {"kind": "model", "path": NOWHERE}}}, f"cannot load model '{NOWHERE}'"),
    ],
    ids=["model", "exits", "n-grams", "draft model"],
)
def test_nothing_is_found_in_the_home_of_nobody(tiny_path: Path, settings: dict[str, Any], part: str) -> None:
    with pytest.raises(HiSpecError, match=re.escape(part)):
        LLM(**{"model": str(tiny_path), "max_model_len": 64, "num_kv_blocks": 8, **settings}).close()


def test_an_unknown_name_gets_the_known_ones_and_no_guess(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot load model 'gpt2': .* knows: smollm2, smollm2-ee, smollm2-maths$"
    ):
        open_model("gpt2")
    for there in (tmp_path, tmp_path / "notes.txt"):
        (tmp_path / "notes.txt").touch()
        with pytest.raises(CheckpointError) as caught:
            open_model(there)
        assert "hispec fetch" not in str(caught.value)
    with pytest.raises(ModelNotFetchedError, match="run `hispec fetch smollm2` once"):
        open_model("smollm2")


@pytest.mark.parametrize("name", ["SmolLM2", "smollm", "HuggingFaceTB/SmolLM2-135M-Instruct", "./smollm2/"])
def test_another_spelling_gets_the_known_name(name: str) -> None:
    assert nearest_known(name) == " (did you mean 'smollm2'?)"


def test_a_name_like_no_other_gets_no_guess() -> None:
    assert [nearest_known(name) for name in ("gpt2", "llama", "mistralai/Mistral-7B-v0.1")] == ["", "", ""]


CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = "float32", "bfloat16"


def dtypes(path: Path, **settings: Any) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """What is computed in, what weights are rounded to, what KV is kept in."""
    decoder = load_decoder(open_model(path), EngineConfig(**settings), CPU, 64)
    return decoder.dtype, decoder.weights_dtype, decoder.kv_dtype


def test_a_rotary_table_that_has_no_room_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """As the model's own limit may be, where a file claims a huge one, or none is set."""
    checkpoint = open_model(tiny_checkpoint(tmp_path / "model", num_layers=2))
    with pytest.raises(
        ConfigError, match=r"rotary table of 1000000000000 positions .*set engine.max_model_len"
    ):
        load_decoder(checkpoint, EngineConfig(), CPU, 10**12)


def test_exact_verify_beside_attention_that_does_not_keep_it_is_refused(tmp_path: Path) -> None:
    checkpoint = open_model(tiny_checkpoint(tmp_path / "model", num_layers=2))
    exact = EngineConfig(exact_verify=True)
    assert load_decoder(checkpoint, exact, CPU, 64).row_invariant
    with pytest.raises(
        ConfigError, match="exact_verify needs the attention backend 'numba' on cpu, not 'sdpa'"
    ):
        load_decoder(checkpoint, exact.model_copy(update={"attention": "sdpa"}), CPU, 64)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (F32, F32, F32)),
        ({"dtype": "float32"}, (F32, F32, F32)),
        ({"dtype": "bfloat16"}, (F32, BF16, BF16)),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, (F32, BF16, F32)),
        ({"kv_cache_dtype": "bfloat16"}, (F32, F32, BF16)),
        ({"quantization": "int8"}, (F32, F32, BF16)),
        ({"quantization": "int4"}, (F32, F32, BF16)),
        ({"dtype": "float16"}, (F32, torch.float16, F32)),
        ({"dtype": "float16", "quantization": "int8"}, (F32, torch.float16, BF16)),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, (F32, F32, F32)),
        ({"quantization": "int8", "dtype": "bfloat16"}, (F32, BF16, BF16)),
    ],
    ids=str,
)
def test_a_cpu_computes_in_float32_over_what_is_asked_for(
    settings: dict[str, Any], expected: tuple[torch.dtype, ...], tmp_path: Path
) -> None:
    assert dtypes(tiny_checkpoint(tmp_path / "model", num_layers=2), **settings) == expected


@pytest.mark.parametrize("has_products", [False, True])
def test_auto_is_bfloat16_where_the_checkpoint_is_and_the_cpu_computes_in_it(
    tmp_path: Path, has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ee_models.kernels.numba_narrow.multiplies_bfloat16", lambda: has_products)
    given = {
        dtype: tiny_checkpoint(tmp_path / str(dtype), num_layers=2, dtype=dtype)
        for dtype in (F32, torch.float16, BF16)
    }
    auto = {dtype: select_dtype(EngineConfig(), open_model(path), CPU) for dtype, path in given.items()}
    assert auto == {F32: F32, torch.float16: F32, BF16: BF16 if has_products else F32}
    of_bfloat16 = open_model(given[BF16])
    assert select_dtype(EngineConfig(dtype="float32"), of_bfloat16, CPU) == F32
    assert select_dtype(EngineConfig(quantization="int8"), of_bfloat16, CPU) == F32
    assert select_dtype(EngineConfig(), of_bfloat16, torch.device("cuda")) == BF16


def is_in_bfloat16(linear: Linear) -> bool:
    if multiplies_bfloat16():
        return isinstance(linear, NarrowLinear) and linear.bits == 16
    return isinstance(linear, PanelLinear) and linear.panels.dtype == BF16


def test_weights_are_rounded_to_the_dtype_that_they_are_held_in(tmp_path: Path) -> None:
    # Sizes that tiles have whole, or their zeros would count.
    path = tiny_checkpoint(tmp_path / "model", num_layers=2, hidden_size=64, intermediate_size=128)
    checkpoint = open_model(path)
    whole, small = (load_decoder(checkpoint, EngineConfig(dtype=each), CPU, 64) for each in DTYPES)
    assert torch.equal(small.embedding, whole.embedding.bfloat16().float())
    assert not torch.equal(small.embedding, whole.embedding)
    assert is_in_bfloat16(small.head)
    assert small.row_invariant and small.num_bytes < 0.7 * whole.num_bytes


def test_a_draft_model_is_held_as_its_target_is(tmp_path: Path) -> None:
    target, draft = (
        tiny_checkpoint(tmp_path / name, num_layers=2, seed=len(name)) for name in ("big", "small")
    )
    decoder = load_decoder(
        open_model(target), EngineConfig(dtype="bfloat16", kv_cache_dtype="float32"), CPU, 64
    )
    config = SpeculativeConfig(draft=DraftConfig(kind="model", path=str(draft)), num_draft_tokens=2)
    model = DraftModels("auto").load(config, decoder, None, 64)
    assert model is not None and is_in_bfloat16(model.head)
    assert (model.dtype, model.weights_dtype, model.kv_dtype) == (F32, BF16, F32)


def test_where_no_kernel_widens_them_weights_are_computed_in_their_own_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "model", num_layers=2)
    for module in ("hispec.loading.target_model", "ee_models.linear_factory"):
        monkeypatch.setattr(f"{module}.runs_numba", lambda _: False)
    assert runs_numba(CPU)
    assert dtypes(path, dtype="bfloat16") == (BF16, BF16, BF16)
    with pytest.raises(
        ConfigError, match=r"^engine\.kv_cache_dtype='bfloat16' with weights in float32 on cpu: "
    ):
        dtypes(path, kv_cache_dtype="bfloat16")


def test_a_kv_cache_dtype_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM("smollm2", kv_cache_dtype="int4")


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_keys_and_values_in_int8_beside_weights_in_any_numbers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_checkpoint(tmp_path / "model", num_layers=2, hidden=64)
    assert dtypes(path, kv_cache_dtype="int8", **settings)[2] == torch.int8


def test_int8_is_refused_where_keys_and_values_have_no_place_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"block_size=24 must be a multiple of 16 where kv_cache_dtype"):
        EngineConfig(kv_cache_dtype="int8", block_size=24)
    narrow = tiny_checkpoint(tmp_path / "narrow", num_layers=2, hidden=48)
    with pytest.raises(ConfigError, match=r"engine: kv_cache_dtype 'int8' needs heads of a multiple of 16"):
        dtypes(narrow, kv_cache_dtype="int8")
    wide = tiny_checkpoint(tmp_path / "wide", num_layers=2, hidden=64)
    monkeypatch.setattr("hispec.loading.target_model.runs_numba", lambda _: False)
    with pytest.raises(ConfigError, match=r"^engine\.kv_cache_dtype='int8' with weights in float32 on cpu: "):
        dtypes(wide, kv_cache_dtype="int8")


def test_a_draft_model_whose_heads_have_no_place_is_refused(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "big", num_layers=2, hidden=64)
    draft = tiny_checkpoint(tmp_path / "small", num_layers=2, hidden=48)
    decoder = load_decoder(open_model(target), EngineConfig(kv_cache_dtype="int8"), CPU, 64)
    config = SpeculativeConfig(draft=DraftConfig(kind="model", path=str(draft)), num_draft_tokens=2)
    with pytest.raises(ConfigError, match=r"heads of a multiple of 16 numbers, and the model's have 12; use"):
        DraftModels("auto").load(config, decoder, None, 64)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model='tell me .* cannot be looked for: File name too long"):
        open_model("tell me a story. " * 100)
