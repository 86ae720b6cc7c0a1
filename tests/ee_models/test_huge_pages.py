"""Weights that lie in huge pages are what they were, and go when their model goes."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch

from ee_models import huge_pages
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from ee_models.huge_pages import HugePages
from ee_models.quantized import Quantization
from tests.helpers.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(huge_pages._madvise() is None, reason="huge pages are asked for on Linux")


def test_weights_lie_side_by_side_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_LEAST", 100)
    monkeypatch.setattr(huge_pages, "_CHUNK", 1 << 20)
    pages, generator = HugePages(), torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 33, generator=generator) for size in (1, 50, 7000, 100, 3, 20_000)]
    weights += [torch.randint(0, 255, (999, 7), generator=generator).to(torch.uint8)]
    kept = [pages.keep(weight) for weight in weights]
    for weight, own in zip(weights, kept, strict=True):
        assert torch.equal(own, weight) and own.dtype == weight.dtype and own.is_contiguous()
        assert own.data_ptr() % 64 == 0 and own.data_ptr() != weight.data_ptr()
    spans = sorted((own.data_ptr(), own.data_ptr() + own.nbytes) for own in kept)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert len({own.untyped_storage().data_ptr() for own in kept}) == 3  # two are larger than what is left


def test_small_weights_stay_where_they_are() -> None:
    weight = torch.zeros(huge_pages._LEAST - 1, dtype=torch.uint8)
    assert HugePages().keep(weight) is weight


def test_without_the_systems_help_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    weight = torch.zeros(2 * huge_pages._LEAST, dtype=torch.uint8)
    assert HugePages().keep(weight) is weight


def test_a_system_that_refuses_gives_pages_as_they_always_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *_: -1)
    weight = torch.arange(huge_pages._LEAST)
    assert torch.equal(HugePages().keep(weight), weight)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_a_models_weights_lie_there_until_it_goes(
    kind: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_LEAST", 0)
    chunks: list[weakref.ref[torch.Tensor]] = []
    allocate = huge_pages._allocate

    def watched(num_bytes: int) -> torch.Tensor:
        chunk = allocate(num_bytes)
        chunks.append(weakref.ref(chunk))
        return chunk

    monkeypatch.setattr(huge_pages, "_allocate", watched)
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, num_layers=2))
    decoder = Decoder.load(checkpoint, torch.float32, torch.device("cpu"), quantization=kind)
    (chunk,) = chunks
    storage = chunk().untyped_storage().data_ptr()  # type: ignore[union-attr]
    panels = [linear.panels for layer in decoder._layers for linear in layer.linears]  # type: ignore[attr-defined]
    assert {each.untyped_storage().data_ptr() for each in panels} == {storage}
    del decoder, panels
    gc.collect()
    assert chunk() is None
