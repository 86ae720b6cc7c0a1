"""Linear layers: equal to F.linear, and the same bits for a row whatever the other rows, where they say
so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.kernels.threads import KernelThreads
from ee_models.linear import PlainLinear
from ee_models.linear_factory import LinearMaker
from ee_models.panel_linear import PanelLinear
from tests.helpers.support import threads

CPU = torch.device("cpu")
# (out, in): projections of SmolLM2 and TinyLlama sizes, a tiny model's, and odd ones.
SHAPES = [(960, 576), (576, 1536), (512, 2048), (96, 48), (260, 48), (7, 13), (1, 1)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_linear_equals_the_product_it_stands_for(shape: tuple[int, int], with_bias: bool) -> None:
    weight, bias = randn(*shape) / shape[1] ** 0.5, randn(shape[0], seed=1) if with_bias else None
    x = randn(66, shape[1], seed=2)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    for layer in (PlainLinear(weight, bias), PanelLinear(weight.clone(), bias, KernelThreads())):
        for rows in (0, 1, 2, 17, 66):
            torch.testing.assert_close(layer(x[:rows]), expected[:rows].float(), atol=1e-4, rtol=0)
        torch.testing.assert_close(layer(x.T.contiguous().T), expected.float(), atol=1e-4, rtol=0)
        given = weight.nbytes + (bias.nbytes if bias is not None else 0)
        # Panels are whole ones, and have room for a bias.
        held = layer.panels.nbytes + layer.bias.nbytes if isinstance(layer, PanelLinear) else given
        assert layer.num_bytes == held >= given


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("shape", "with_bias"), [*((shape, False) for shape in SHAPES), (SHAPES[0], True)])
def test_a_row_invariant_linear_gives_a_row_the_same_bits_among_any_others(
    shape: tuple[int, int], with_bias: bool, num_threads: int
) -> None:
    with threads(num_threads):
        weight, bias = randn(*shape), randn(shape[0], seed=1) if with_bias else None
        layer = LinearMaker(CPU, torch.float32)(weight, bias)
        assert isinstance(layer, PanelLinear)
        x = randn(66, shape[1], seed=3)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(66)])
        same = [torch.equal(layer(x[:rows]), alone[:rows]) for rows in range(1, 67)]
        same += [torch.equal(layer(x[-rows:]), alone[-rows:]) for rows in (1, 2, 5, 8, 33)]
        same += [torch.equal(layer(x.repeat(4, 1)[:rows])[:66], alone) for rows in (67, 100, 129, 200, 256)]
        shuffled = torch.randperm(66, generator=torch.Generator().manual_seed(4))
        same.append(torch.equal(layer(x[shuffled]), alone[shuffled]))
    assert all(same)
    with threads(1):
        assert torch.equal(LinearMaker(CPU, torch.float32)(weight, bias)(x), alone)


def test_a_decoder_computes_the_same_with_plain_linears(
    tiny_path: Path, tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ee_models.linear_factory.runs_numba", lambda _: False)
    plain = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU)
    assert isinstance(plain.head, PlainLinear)
    assert isinstance(tiny_decoder.head, PanelLinear)
    hidden = randn(5, 48)
    torch.testing.assert_close(plain.logits(hidden, 2), tiny_decoder.logits(hidden, 2), atol=1e-4, rtol=1e-4)
    assert tiny_decoder.num_bytes > plain.num_bytes  # of panels, whole ones are held
    assert not plain.row_invariant
