"""Causal attention in training, against the definition and against transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ee_models.training import attention
from ee_models.training.attention import causal_attention
from ee_models.training.trunk import load_trainable
from tests.helpers.tiny import tiny_checkpoint


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """In float64, every place's scores of all, of which it sees its own and those before."""
    q, k, v = (each.double() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    places = torch.arange(q.shape[2])
    before = places[:, None] - places
    is_seen = (before >= 0) & (before < (len(places) if window is None else window))
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 5, 1000])
@pytest.mark.parametrize(
    ("length", "first"),
    [*((length, 0) for length in (1, 2, 31, 128, 129, 150)), (31, 30), (150, 64), (150, 128), (150, 140)],
)
def test_attention_is_what_its_definition_says_and_so_are_its_gradients(
    length: int, first: int, window: int | None
) -> None:
    """Of all positions, or of those from `first` on."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    of_definition = [each.detach().clone().requires_grad_() for each in (q, k, v)]
    upstream = torch.randn(2, length - first, 4, 8)
    found, expected = (
        causal_attention(q[:, :, first:], k, v, 0.3, window),
        definition(*of_definition, 0.3, window)[:, first:],
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    found.backward(upstream)
    expected.backward(upstream.double())
    for each, other in zip((q, k, v), of_definition, strict=True):
        torch.testing.assert_close(each.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_long_rows_take_the_fused_kernel_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 140, 8), torch.randn(1, 2, 140, 8), torch.randn(1, 2, 140, 8)
    short, last = causal_attention(q, k, v), causal_attention(q[:, :, 64:], k, v)
    monkeypatch.setattr(attention, "_SHORT", 100)
    monkeypatch.setattr(attention, "_attend", None)
    torch.testing.assert_close(causal_attention(q, k, v), short, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(causal_attention(q[:, :, 64:], k, v), last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("length", "window"), [(40, None), (200, None), (600, None), (40, 9)])
def test_what_rotation_leaves_in_float32_meets_bfloat16(
    length: int, window: int | None, autocast: bool
) -> None:
    """The output has the values' dtype, and scores are weighed in float32."""
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    q, k, v = 4 * q, k.bfloat16().float(), v.bfloat16()
    q = q.bfloat16().float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = causal_attention(q, k, v, 0.3, window)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), definition(q, k, v, 0.3, window), atol=0.05, rtol=0.05)


def test_a_long_row_is_cut_where_the_first_part_leaves_the_second_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: float, low: int, high: int) -> object:
        seen.append((low, high))
        assert q.shape[2] == high - low
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)[:, :, low:high]

    monkeypatch.setattr(attention, "_attend", attend)
    for length, first in ((128, 0), (200, 0), (200, 96), (200, 128), (200, 160)):
        q, k, v = torch.randn(3, 1, 2, length, 8)
        causal_attention(q[:, :, first:], k, v)
    assert seen == [(0, 128), (0, 128), (128, 200), (96, 128), (128, 200), (128, 200), (160, 200)]


def test_a_cache_or_a_mask_is_refused(tmp_path: Path) -> None:
    model = load_trainable(tiny_checkpoint(tmp_path / "model", num_layers=1))
    refused = "whole rows without a mask, as training has them, and no KV cache"
    with pytest.raises(ValueError, match=refused):
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=refused):
        model(torch.ones(1, 3, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 20})])
def test_a_trunk_attends_as_transformers_does(tmp_path: Path, family: str, changes: dict[str, int]) -> None:
    """Rows padded on the right included, and a checkpoint of it says nothing of our attention."""
    folder = tiny_checkpoint(tmp_path / "model", family, num_layers=2, **changes)
    ours, theirs = load_trainable(folder), load_trainable(folder)
    theirs.set_attn_implementation("eager")
    token_ids = torch.randint(1, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) < torch.tensor([[40], [25], [33]])
    with torch.no_grad():
        found, expected = (
            model(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).logits
            for model in (ours, theirs)
        )
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-4, rtol=1e-3)
    ours.save_pretrained(tmp_path / "again")
    assert attention.NAME not in (tmp_path / "again" / "config.json").read_text()
