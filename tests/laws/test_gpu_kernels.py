"""An engine as it runs on a GPU, but for the GPU: static rounds over Triton's kernels, in its interpreter,
against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ee_models.attention.triton_pages import TritonAttention
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels.gpu import TritonKernels
from ee_models.kernels.triton_linear import InvariantLinear
from hispec.config import Plan
from hispec.decoding import acceptance, batch, stages
from hispec.drafters import lookup_torch, ngram
from hispec.runner import round_inputs
from hispec.sampling import confidence, sampler
from hispec.sampling_params import SamplingParams
from tests.helpers.drafters import drafter_engine
from tests.helpers.support import make_engine, random_prompts, run, transformers_greedy
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint, tiny_model

pytestmark = pytest.mark.usefixtures("interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {"num_layers": 3, "hidden": 32}
PROMPTS = random_prompts((3, 9))
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
PLANS: dict[str, dict[str, Any]] = {
    "three tiers": {"draft": {"layer": 1}, "check": {"layer": 2}, "num_draft_tokens": 2, "num_checks": 1},
    "a tree": {"draft": {"layer": 2}, "num_draft_tokens": 2, "num_branches": 2},
    "a sure hybrid": {
        "draft": {"kind": "hybrid", "layer": 2, "exit": "exit"},
        "num_draft_tokens": 2,
        "draft_confidence": 0.2,
    },
    "a sure hybrid of three tiers": {
        "draft": {"kind": "hybrid", "layer": 1, "exit": "exit"},
        "check": {"layer": 2},
        "num_draft_tokens": 2,
        "num_checks": 1,
        "draft_confidence": 0.2,
    },
}


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("small") / "model", "llama", **SIZES)


@pytest.fixture
def on_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampler, confidence, stages, acceptance, batch, lookup_torch, round_inputs):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    monkeypatch.setattr(ngram, "make_lookup", lambda *sizes: lookup_torch.TensorLookup(*sizes))


def load(path: Path, invariant: bool = False) -> Decoder:
    decoder = Decoder.load(open_checkpoint(path), torch.float32, DEVICE)
    decoder.attention, decoder.kernels = TritonAttention(invariant=invariant), TritonKernels()
    return decoder


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [transformers_greedy(tiny_model("llama", **SIZES), prompt, 5) for prompt in PROMPTS]


@sweep("name", ["plain", *PLANS], "a sure hybrid of three tiers".__eq__)
def test_output_is_transformers_greedy(
    small_path: Path, on_gpu_kernels: None, expected: list[list[int]], name: str
) -> None:
    decoder = load(small_path)
    engine = (
        make_engine(decoder, Plan(), is_static=True)
        if name == "plain"
        else drafter_engine(decoder, PLANS[name], is_static=True)
    )
    assert run(engine, PROMPTS, GREEDY) == expected


@pytest.mark.slow
def test_sampled_output_is_plain_sampled_decodings(
    small_path: Path, on_gpu_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.8, top_k=40, seed=5, max_tokens=4),
        SamplingParams(temperature=0.7, min_p=0.05, seed=6, max_tokens=4),
    ]
    by_triton = run(drafter_engine(load(small_path), PLANS["three tiers"], is_static=True), PROMPTS, params)
    monkeypatch.setattr(sampler, "runs_triton", lambda device: False)
    assert by_triton == run(
        make_engine(Decoder.load(open_checkpoint(small_path), torch.float32, torch.device("cpu"))),
        PROMPTS,
        params,
    )


@pytest.mark.slow
def test_bfloat16_runs_end_to_end(small_path: Path, on_gpu_kernels: None) -> None:
    """Other rounding than float32's, so not its tokens; but all tokens, and the same ones again."""
    decoder = Decoder.load(open_checkpoint(small_path), torch.bfloat16, DEVICE)
    decoder.attention, decoder.kernels = TritonAttention(), TritonKernels()
    engine = drafter_engine(decoder, PLANS["three tiers"], is_static=True)
    first = run(engine, PROMPTS, GREEDY)
    assert [len(tokens) for tokens in first] == [5, 5] and run(engine, PROMPTS, GREEDY) == first


def test_exact_verify_takes_kernels_that_keep_bits(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `exact_verify` chooses on a GPU, chosen here by hand."""
    linear = InvariantLinear(torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE), None)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert (
        linear.row_invariant
        and TritonAttention(invariant=True).row_invariant
        and not TritonAttention().row_invariant
    )
    together = linear(x)
    assert all(torch.equal(linear(x[i : i + 1])[0], together[i]) for i in range(9))
