"""Quantized models: close to the weights they stand for, smaller, and speculated on as exactly as any other
model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from cache.whole_numbers import mixed
from ee_models import quantized
from ee_models.checkpoint.exit_files import ExitInfo
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels.numba_int8 import BLOCK, group_size
from ee_models.linear import Linear, PlainLinear
from ee_models.linear_factory import LinearMaker
from ee_models.narrow_linear import NarrowLinear
from ee_models.quantized import Quantization, QuantizedLinear, quantized_linear
from hispec import LLM, SamplingParams
from hispec.config import Plan
from hispec.errors import ConfigError, build
from hispec.jobs.schema import RunConfig
from tests.helpers.adapter_engines import assert_always_accepted
from tests.helpers.adapters import TINY_MLP, adapter_engine, loaded, make_exits, whole_trunk
from tests.helpers.support import make_engine, random_prompts, run
from tests.helpers.tiny import tiny_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICES = [CPU, *([GPU] if torch.cuda.is_available() else [])]
KINDS: list[tuple[Quantization, torch.dtype]] = [
    ("int8", torch.float32),
    ("int8", torch.bfloat16),
    ("int4", torch.float32),
    ("int4", torch.bfloat16),
]
# torchao's int4 kernel of a GPU takes bfloat16 alone.
RUNNABLE = [
    (kind, dtype, device)
    for kind, dtype in KINDS
    for device in DEVICES
    if device == CPU or kind == "int8" or dtype == torch.bfloat16
]
PROMPTS = random_prompts((1, 2, 9, 31, 33))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("shape", "group"), [((96, 576), 64), ((64, 1536), 128), ((128, 96), 32)])
@pytest.mark.parametrize(("kind", "dtype", "device"), RUNNABLE)
def test_a_quantized_linear_is_close_to_its_weight_and_smaller(
    kind: Quantization,
    dtype: torch.dtype,
    shape: tuple[int, int],
    group: int,
    with_bias: bool,
    device: torch.device,
) -> None:
    weight = (randn(*shape) / shape[1] ** 0.5).to(device, dtype)
    bias = randn(shape[0], seed=1).to(device, dtype) if with_bias else None
    layer = LinearMaker(device, dtype, kind)(weight.clone(), bias)
    assert type(layer).__name__ == (
        "NarrowLinear" if device == CPU else "Int8Linear" if kind == "int8" else "QuantizedLinear"
    )
    x = randn(66, shape[1], seed=2).to(device, dtype)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for rows in (1, 2, 17, 66):
        assert relative_error(layer(x[:rows]), expected[:rows]) < (0.02 if kind == "int8" else 0.12)
    assert layer(x[:0]).shape == (0, shape[0])
    assert layer(x).dtype == dtype
    group = group if device != CPU else 32 if kind == "int4" else group_size(shape[1])
    block = BLOCK if kind == "int8" and device == CPU else 1  # inputs come in whole ones
    numbers = shape[0] * -(-shape[1] // block) * block // (1 if kind == "int8" else 2)
    bytes_per_group = 4 if kind == "int4" else 2 if device == CPU else 0  # scales, zeros or minima
    held = numbers + bytes_per_group * weight.numel() // group
    own = layer.num_bytes - (0 if bias is None else bias.nbytes)
    limit = held + 12 * shape[0] if kind == "int8" or device == CPU else 1.06 * held
    assert held <= own <= limit or (device == GPU and kind == "int4"), "pads inputs to 1,024 there"


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((64, 128), True), ((64, 96), True), ((260, 64), True), ((64, 48), False), ((64, 1000), False)],
)
def test_what_a_gpus_int4_does_not_fit_stays_as_it_is_and_is_logged_once(
    shape: tuple[int, int], taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    quantized._log_kept.cache_clear()
    weight, x = (each.to(DEVICES[-1], torch.bfloat16) for each in (randn(*shape), randn(3, shape[1])))
    assert (quantized._group_size(weight) is not None) == taken
    if taken and GPU not in DEVICES:
        return
    with caplog.at_level(logging.WARNING, quantized.__name__):
        layers = [quantized_linear(weight, None, 4) for _ in range(2)]
    assert [type(layer) for layer in layers] == [QuantizedLinear if taken else PlainLinear] * 2
    if not taken:
        assert layers[0].num_bytes == weight.nbytes
        assert torch.equal(layers[0](x), F.linear(x, weight))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (not taken)
    assert all(f"{shape[1]} inputs and {shape[0]} outputs stay in torch.bfloat16" in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "parts"),
    [
        ("int2", CPU, torch.float32, ["quantization='int2' is unknown", "int8, int4"]),
        (
            "int4",
            GPU,
            torch.float32,
            [
                "quantization='int4'",
                "not in torch.float32 on cuda",
                "set dtype to bfloat16, or quantization to int8",
            ],
        ),
        (
            "int4",
            GPU,
            torch.float16,
            ["quantization='int4'", "not in torch.float16 on cuda", "set dtype to bfloat16"],
        ),
        *(
            (
                kind,
                CPU,
                torch.float16,
                [
                    f"quantization='{kind}'",
                    "float32 or bfloat16, not in torch.float16 on cpu",
                    "set dtype to bfloat16",
                ],
            )
            for kind in ("int8", "int4")
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_the_way_out(
    kind: Quantization, device: torch.device, dtype: torch.dtype, parts: list[str]
) -> None:
    with pytest.raises(ValueError, match="quantization") as error:
        LinearMaker(device, dtype, kind)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_exact_linears_of_a_gpu_cannot_be_in_int4_and_on_a_cpu_exact_changes_nothing() -> None:
    with pytest.raises(ValueError, match=r"quantization='int4' cannot be combined on cuda.* or set .* int8"):
        LinearMaker(GPU, torch.bfloat16, "int4", exact=True)
    assert isinstance(LinearMaker(CPU, torch.float32, "int8", exact=True)(randn(4, 8), None), NarrowLinear)
    weight = randn(4, 8)
    assert type(LinearMaker(CPU, torch.float32, exact=True)(weight, None)) is type(
        LinearMaker(CPU, torch.float32)(weight, None)
    )


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_where_int8_would_be_slower_than_bfloat16_it_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "runs_triton", lambda device: False)
    with pytest.raises(
        ValueError,
        match=rf"^quantization='int8' needs a CUDA GPU and .* triton, not {device}.*with dtype bfloat16",
    ):
        LinearMaker(torch.device(device), torch.bfloat16, "int8")


def test_int4_of_a_gpu_without_torchao_says_what_to_install_and_int8_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "runs_triton", lambda device: True)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        ValueError,
        match=r"^quantization='int4' needs torchao .*: pip install '\.\[quantize\]' in a checkout",
    ):
        LinearMaker(GPU, torch.bfloat16, "int4")
    for exact in (False, True):
        assert LinearMaker(GPU, torch.bfloat16, "int8", exact).bits == 8


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_on_a_cpu_quantization_needs_no_torchao(kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    LinearMaker(CPU, torch.float32, kind)


def test_the_setting_is_one_of_engine(tiny_path: Path) -> None:
    assert build(RunConfig, {"model": "m", "engine": {"quantization": "int4"}}).engine.quantization == "int4"
    with pytest.raises(ConfigError, match=r"^engine\.quantization: .*'int8' or 'int4', got 'int2'"):
        build(RunConfig, {"model": "m", "engine": {"quantization": "int2"}})
    with LLM(str(tiny_path), device="cpu", dtype="float16", quantization="int4") as llm:
        assert llm.row_invariant  # a CPU computes in float32, whatever weights were rounded to


# ---- models ----


@pytest.fixture(scope="module")
def int8(tiny_path: Path) -> Decoder:
    return Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, quantization="int8")


def logits_of(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    config, count = decoder.config, len(tokens)
    kv = PagedKV(
        config.num_layers, 4, 16, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device
    )
    positions, table = (
        torch.arange(count, device=decoder.device),
        torch.arange(4, device=decoder.device)[None],
    )
    slots = packed_slots_of(table, torch.zeros_like(positions), positions, 16)
    view = BatchView(positions, slots, table, torch.tensor([0, count], device=decoder.device), count, count)
    hidden = decoder.run_layers(
        decoder.embed(torch.tensor(tokens, device=decoder.device)), 0, config.num_layers, kv, view
    )
    return decoder.logits(hidden, config.num_layers)


class OfRounded(PlainLinear):
    """Of tokens as a CPU's int8 has them."""

    def __call__(self, x: Tensor) -> Tensor:
        num_inputs = x.shape[1]
        blocks = F.pad(x.float(), (0, -num_inputs % BLOCK)).view(len(x), -1, BLOCK)
        groups = mixed(blocks).view(len(x), -1, group_size(num_inputs))
        scale = groups.abs().amax(2, keepdim=True) / 127
        rounded = (groups / scale.clamp(min=1e-30)).round() * scale
        unmixed = mixed(rounded.view(blocks.shape)) / BLOCK
        return super().__call__(unmixed.flatten(1)[:, :num_inputs].to(x.dtype))


@pytest.mark.parametrize(("kind", "dtype", "device"), RUNNABLE)
def test_a_quantized_decoder_computes_with_the_weights_that_it_holds(
    kind: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It equals a decoder over those weights, unpacked; where they were rounded, the linears' own test
    tells."""
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, num_layers=2, hidden=64))
    decoder = Decoder.load(checkpoint, dtype, device, quantization=kind)
    small, whole = decoder.num_bytes, Decoder.load(checkpoint, dtype, device).num_bytes
    assert small < (0.7 if kind == "int8" else 0.8) * whole or (device == GPU and kind == "int4")

    make, make_head = LinearMaker.__call__, LinearMaker.head

    def unpacked(layer: Linear, weight: Tensor, bias: Tensor | None = None) -> Linear:
        eye = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        is_int8 = isinstance(layer, NarrowLinear) and layer.bits == 8
        return (OfRounded if is_int8 else PlainLinear)(layer(eye).T.contiguous(), bias)

    tokens = list(range(40, 60))
    found = logits_of(decoder, tokens)
    monkeypatch.setattr(
        LinearMaker, "__call__", lambda self, weight, bias: unpacked(make(self, weight, None), weight, bias)
    )
    monkeypatch.setattr(LinearMaker, "head", lambda self, weight: unpacked(make_head(self, weight), weight))
    monkeypatch.setattr(LinearMaker, "makes_panels", False)
    expected = logits_of(Decoder.load(checkpoint, dtype, device, quantization=kind), tokens)
    # What int4 rounds of a token, its head in int8 may round to another step.
    limit = 0.1 if dtype != torch.float32 else 5e-3 if kind == "int4" else 1e-5
    assert relative_error(found, expected) < limit


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_tied_head_is_a_copy_where_it_is_quantized_and_counted(
    kind: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, "qwen2", num_layers=1, hidden=64))
    decoder = Decoder.load(checkpoint, dtype, CPU, quantization=kind)
    assert decoder._embedding.dtype == dtype and decoder._embedding.shape == (260, 64)
    layer = sum(linear.num_bytes for linear in decoder._layers[0].linears)
    assert isinstance(decoder.head, NarrowLinear)
    assert decoder.num_bytes == decoder._embedding.nbytes + layer + decoder.head.num_bytes


@pytest.mark.parametrize("plan", [Plan(3, None, 4, 1), Plan(3, 6, 2, 2), Plan(6, 8, 3, 1)], ids=str)
def test_speculation_keeps_the_output_of_the_quantized_model(
    int8: Decoder, plan: Plan, expected_int8: list[list[int]]
) -> None:
    assert int8.row_invariant
    for sizes in ({}, {"max_num_seqs": 2, "block_size": 4}):
        found = run(make_engine(int8, plan, **sizes), PROMPTS)
        assert found == expected_int8


@pytest.fixture(scope="module")
def expected_int8(int8: Decoder) -> list[list[int]]:
    return run(make_engine(int8), PROMPTS)


def test_trained_exits_are_quantized_with_their_model(
    int8: Decoder, tiny_decoder: Decoder, tiny_path: Path, tmp_path: Path, expected_int8: list[list[int]]
) -> None:
    checkpoint = open_checkpoint(tiny_path)
    infos = [
        ExitInfo(layer=4, intermediate_size=TINY_MLP, vocabulary_size=96),
        ExitInfo(layer=7, intermediate_size=TINY_MLP),
    ]
    file = make_exits(tmp_path / "some", checkpoint, infos, from_trunk=True)
    exits, originals = loaded(file, int8, checkpoint), loaded(file, tiny_decoder, checkpoint)
    assert all(own.num_bytes < 0.45 * other.num_bytes for own, other in zip(exits, originals, strict=True))
    right = make_exits(tmp_path / "right", checkpoint, [whole_trunk(3), whole_trunk(6)], from_trunk=True)
    engine = adapter_engine(int8, Plan(3, 6, 2, 2), loaded(right, int8, checkpoint))
    outputs = run(adapter_engine(int8, Plan(4, 7, 2, 2), exits), PROMPTS), run(engine, PROMPTS)
    assert outputs == (expected_int8, expected_int8)
    assert_always_accepted(engine)  # copies of the trunk are quantized as the trunk is


def test_a_draft_model_is_quantized_with_its_target(tiny_path: Path) -> None:
    draft = {"draft": {"kind": "model", "path": str(tiny_path)}, "num_draft_tokens": 3}
    params, outputs, sizes = SamplingParams(temperature=0.0, max_tokens=12), [], []
    for speculative, kind in ((None, "int8"), (draft, "int8"), (draft, None)):
        llm = LLM(
            str(tiny_path),
            device="cpu",
            dtype="float32",
            quantization=kind,
            speculative=speculative,
            max_model_len=128,
        )
        outputs.append(
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        )
        sizes.append(llm.draft_models.num_bytes)
    assert sizes[0] == 0 and 0 < sizes[1] < 0.5 * sizes[2]
    assert outputs[0] == outputs[1]
