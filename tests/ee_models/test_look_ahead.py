"""How far ahead of a product weights are asked for: measured once, and no bit depends on it."""

from __future__ import annotations

import pytest
import torch

from ee_models.kernels import numba_narrow


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
def test_no_bit_depends_on_it(bits: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 100, generator=generator) for rows in (70, num_tokens))
    panels = numba_narrow.pack(bits, weight, None)
    terms = torch.empty(num_tokens, numba_narrow.bytes_per_token(bits, 100), dtype=torch.uint8)
    numba_narrow.split_tokens(bits, x.data_ptr(), 100, terms.data_ptr(), 0, num_tokens)
    outputs = []
    for ahead in (0, *numba_narrow._AHEAD, 1 << 40):  # asking for what is not there is no fault
        out = torch.empty(num_tokens, 70)
        numba_narrow.multiply(
            *(bits, ahead, 0, terms.data_ptr(), num_tokens, 100, panels.data_ptr(), out.data_ptr(), 70, 0, 1)
        )
        outputs.append(out)
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert torch.allclose(outputs[0], x @ weight.T, atol=0.5 if bits == 8 else 5.0)


def test_the_fastest_of_all_tokens_is_taken_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = [], 0.0
    widths = range(1, numba_narrow.numba_int8.TOKENS + 1)
    every = [(ahead, num_tokens) for ahead in numba_narrow._AHEAD for num_tokens in widths]

    def multiply(_bits: int, ahead: int, _tiles_from: int, _terms: int, num_tokens: int, *_: int) -> None:
        nonlocal now
        asked.append((ahead, num_tokens))
        # The first look is a slow one, as those at new memory are; then the first is the fastest for one
        # token and for a whole tile, and the last for all together.
        wins = ahead == numba_narrow._AHEAD[0] and num_tokens in (widths[0], widths[-1])
        now += 9.0 if len(asked) <= len(every) else 0.9 / numba_narrow._AHEAD[-1] if wins else 1.0 / ahead

    monkeypatch.setattr(numba_narrow, "multiply", multiply)
    monkeypatch.setattr(numba_narrow.time, "perf_counter", lambda: now)
    numba_narrow.look_ahead.cache_clear()
    try:
        assert numba_narrow.look_ahead() == numba_narrow.look_ahead() == numba_narrow._AHEAD[-1]
        assert asked == every * numba_narrow._LOOKS
    finally:
        numba_narrow.look_ahead.cache_clear()  # of what this test made up
