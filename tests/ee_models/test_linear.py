"""Linear layers: equal to F.linear, and the same bits for a row whatever the other rows, where they say
so."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ee_models import linear
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.linear import PackedLinear, PlainLinear, can_pack
from ee_models.linear_factory import LinearMaker
from tests.helpers.support import MUST_BE_INVARIANT, PACKS, threads

CPU = torch.device("cpu")
# (out, in): projections of SmolLM2 and TinyLlama sizes, a tiny model's, and odd ones.
SHAPES = [(960, 576), (576, 1536), (512, 2048), (96, 48), (260, 48), (7, 13), (1, 1)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_equals_the_product_it_stands_for(
    shape: tuple[int, int], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = randn(*shape) / shape[1] ** 0.5, randn(shape[0], seed=1) if with_bias else None
    x = randn(66, shape[1], seed=2)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    for min_rows in (1, 2):
        monkeypatch.setattr(linear, "probe_rows", lambda *_, found=min_rows: (found, True))
        for make in {PlainLinear, PackedLinear if PACKS else PlainLinear}:
            layer = make(weight.clone(), bias)
            for rows in (0, 1, 2, 17, 66):
                torch.testing.assert_close(layer(x[:rows]), expected[:rows].float(), atol=1e-4, rtol=0)
            assert layer.num_bytes == weight.nbytes + (bias.nbytes if bias is not None else 0)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "with_bias"), [*((shape, False) for shape in SHAPES[:4]), (SHAPES[0], True)]
)
def test_a_row_invariant_linear_gives_a_row_the_same_bits_among_any_others(
    shape: tuple[int, int], with_bias: bool, num_threads: int
) -> None:
    with threads(num_threads):
        layer = LinearMaker(CPU, torch.float32)(randn(*shape), randn(shape[0], seed=1) if with_bias else None)
        assert layer.row_invariant or not MUST_BE_INVARIANT, (
            f"no packed linear of shape {shape} is row-invariant on this CPU, so law 8 cannot hold on it"
        )
        x = randn(66, shape[1], seed=3)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(66)])
        same = [torch.equal(layer(x[:rows]), alone[:rows]) for rows in range(1, 67)]
        same += [torch.equal(layer(x[-rows:]), alone[-rows:]) for rows in (1, 2, 5, 8, 33)]
        same += [torch.equal(layer(x.repeat(4, 1)[:rows])[:66], alone) for rows in (67, 100, 129, 200, 256)]
        shuffled = torch.randperm(66, generator=torch.Generator().manual_seed(4))
        same.append(torch.equal(layer(x[shuffled]), alone[shuffled]))
    assert all(same) or not layer.row_invariant, f"says that it is row-invariant, but is not: {same}"


class Fake:
    """A product whose bits depend on the number of rows, where `differs` says so."""

    row_invariant, num_bytes = False, 0

    def __init__(self, weight: Tensor, differs: Callable[[int], bool]) -> None:
        self._weight, self._differs = weight, differs

    def __call__(self, x: Tensor) -> Tensor:
        out = (x.unsqueeze(1) * self._weight).sum(-1)
        return out.nextafter(torch.tensor(torch.inf)) if self._differs(x.shape[0]) else out


@pytest.mark.parametrize(
    ("differs", "found"),
    [
        (lambda rows: False, (1, True)),
        (lambda rows: rows == 1, (2, True)),  # only a single row takes a path of its own: computed as two
        (lambda rows: rows == 2, (1, False)),
        (lambda rows: rows >= 8, (1, False)),
        (lambda rows: rows > 64, (1, False)),
        (lambda rows: rows % 2 == 1, (1, False)),
        (lambda rows: rows % 16 == 0, (1, False)),
    ],
    ids=["never", "one row", "two rows", "from 8", "over 64", "odd", "whole vectors"],
)
def test_the_probe_finds_bits_that_depend_on_the_number_of_rows(
    differs: Callable[[int], bool], found: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_probes", {})
    weight = randn(5, 6)
    assert linear.probe_rows(Fake(weight, differs), "fake", weight) == found


def test_the_probe_runs_once_per_shape_and_anew_for_another_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_probes", {})
    num_calls = 0

    def never(rows: int) -> bool:
        nonlocal num_calls
        num_calls += 1
        return False

    def num_new_calls(out_features: int) -> int:
        before = num_calls
        weight = randn(out_features, 6)
        linear.probe_rows(Fake(weight, never), "fake", weight)
        return num_calls - before

    assert num_new_calls(5) > 0
    assert num_new_calls(5) == 0
    assert num_new_calls(4) > 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert num_new_calls(5) > 0


def test_a_single_row_is_computed_as_two_where_the_probe_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def run(_: PackedLinear, x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return x * 2

    monkeypatch.setattr(PackedLinear, "_run", run)
    layer = object.__new__(PackedLinear)  # without packing anything, so that it is the same on every CPU
    layer._min_rows = 2
    x = randn(3, 3)
    assert torch.equal(layer(x[:1]), x[:1] * 2)
    assert torch.equal(layer(x), x * 2)
    assert sizes == [2, 3]


def test_packing_is_for_float32_on_a_cpu_only() -> None:
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("cuda"), torch.float32)


def test_packing_is_off_where_the_op_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())
    assert not can_pack(CPU, torch.float32)
    right = types.SimpleNamespace(
        _reorder_linear_weight=lambda weight, _: weight,
        _linear_pointwise=lambda x, weight, bias, *_: F.linear(x, weight, bias),
    )
    monkeypatch.setattr(torch.ops, "mkldnn", right)
    assert can_pack(CPU, torch.float32) == torch.backends.mkldnn.is_available()
    monkeypatch.setattr(right, "_linear_pointwise", lambda x, weight, *_: F.linear(x, weight) + 0.01)
    assert not can_pack(CPU, torch.float32)


def test_a_decoder_without_the_op_computes_the_same_with_plain_linears(
    tiny_path: Path, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ee_models.linear_factory.can_pack", lambda *_: False)
    monkeypatch.setattr(linear, "probe_rows", lambda *_: (1, False))
    plain = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU)
    assert isinstance(plain.head, PlainLinear)
    assert isinstance(tiny_decoder.head, PackedLinear if PACKS else PlainLinear)
    hidden = randn(5, 48)
    torch.testing.assert_close(plain.logits(hidden, 2), tiny_decoder.logits(hidden, 2), atol=1e-4, rtol=1e-4)
    assert plain.num_bytes == tiny_decoder.num_bytes
    assert not plain.row_invariant
