"""The runtime's randomness: keys that never collide where it matters, draws that are what they claim, and
depend on their key alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hispec.sampling.noise import Stream, gumbel, keys, uniform
from hispec.sampling.noise_numba import argmax_with_noise
from hispec.sampling.sampler import draw

EULER_GAMMA = 0.5772156649
SEEDS = [0, 1, 2, 1234, 2**31, 2**32, 2**63 - 1]


def many_keys(num: int, seed: int = 0, stream: Stream = Stream.CHOICE) -> Tensor:
    """Keys of one request's successive positions: what a run really uses."""
    return keys(torch.full((num,), seed), torch.arange(num), stream)


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood's reference, in whole numbers."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def lowbias32(x: int) -> int:
    """Wellons' reference, in whole numbers."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & (2**32 - 1)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & (2**32 - 1)
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_are_splitmix64_of_seed_position_and_stream(seed: int) -> None:
    positions = torch.tensor([0, 1, 77, 2**40])
    for stream in Stream:
        expected = [
            splitmix64(splitmix64(splitmix64(seed) ^ position) ^ stream) for position in positions.tolist()
        ]
        assert [key % 2**64 for key in keys(torch.tensor(seed), positions, stream).tolist()] == expected


def test_keys_differ_for_every_seed_position_and_stream() -> None:
    seeds, positions = torch.tensor(SEEDS).view(-1, 1), torch.arange(5000)
    every = torch.cat([keys(seeds, positions, stream).flatten() for stream in Stream])
    assert every.unique().numel() == len(SEEDS) * 5000 * len(Stream)


def test_gumbel_noise_is_lowbias32_of_token_and_key() -> None:
    key = many_keys(3)
    got = gumbel(key, 50)
    for row, k in enumerate(key.tolist()):
        low, high = k % 2**32, (k >> 32) % 2**32
        for token in (0, 1, 17, 49):
            bits = lowbias32(lowbias32((token * 0x9E3779B1) % 2**32 ^ low) ^ high)
            expected = -math.log(-math.log(((bits >> 9) + 0.5) * 2.0**-23))
            assert got[row, token].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_choice_on_a_cpu_is_the_argmax_of_logits_and_gumbel_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 5.0, 50.0):
        logits, key = (
            scale * torch.randn(300, 1000, generator=generator),
            many_keys(300, seed=int(scale * 100)),
        )
        noisy = logits.double() + gumbel(key, 1000).double()
        chosen = argmax_with_noise(logits, key)
        # The two are computed in different precisions: a choice may differ from the other's argmax by no more
        # than that.
        assert (noisy.amax(-1) - noisy.gather(1, chosen.unsqueeze(1)).squeeze(1)).max() < 1e-4
        top_two = noisy.topk(2).values
        clear = top_two[:, 0] - top_two[:, 1] > 1e-3
        assert clear.float().mean() > 0.9
        assert torch.equal(chosen[clear], noisy.argmax(-1)[clear])


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.full((500, 40), -torch.inf)
    logits[:, [3, 31]] = torch.tensor([0.0, 0.1])
    chosen = argmax_with_noise(logits, many_keys(500))
    assert set(chosen.tolist()) == {3, 31}
    logits[:, 31] = -torch.inf
    assert argmax_with_noise(logits, many_keys(500)).eq(3).all()


def test_uniforms_are_uniform_in_the_open_interval() -> None:
    u = uniform(many_keys(200_000)).double()
    assert u.mean().item() == pytest.approx(0.5, abs=4 / math.sqrt(12 * 200_000))
    assert u.var().item() == pytest.approx(1 / 12, rel=0.01)
    counts = torch.histc(u.float(), 100, 0.0, 1.0).double()
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # 99 degrees of freedom: mean 99, standard deviation 14
    ends = uniform(torch.tensor([0, -1]))  # no bits set, and all
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    g = gumbel(many_keys(400), 1000).double()
    assert g.mean().item() == pytest.approx(EULER_GAMMA, abs=0.01)
    assert g.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    below = torch.tensor([(g <= x).double().mean() for x in np.linspace(-2, 6, 33)])
    expected = torch.exp(-torch.exp(-torch.linspace(-2, 6, 33, dtype=torch.float64)))
    assert (below - expected).abs().max() < 1.63 / math.sqrt(400_000)  # Kolmogorov and Smirnov at 1 %
    assert g.isfinite().all()


@pytest.mark.parametrize("axis", ["position", "token", "seed"])
def test_neighbouring_draws_are_uncorrelated(axis: str) -> None:
    g = gumbel(
        keys(torch.arange(400), torch.tensor(5), Stream.CHOICE) if axis == "seed" else many_keys(400), 500
    )
    first, second = (g[:, :-1], g[:, 1:]) if axis == "token" else (g[:-1], g[1:])
    correlation = np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(first.numel())


def test_streams_at_one_position_are_uncorrelated() -> None:
    by_stream = np.stack([uniform(many_keys(50_000, stream=stream)).numpy() for stream in Stream])
    correlations = np.corrcoef(by_stream) - np.eye(len(Stream))
    assert np.abs(correlations).max() < 4 / math.sqrt(50_000)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_argmax_of_logits_and_noise_is_distributed_as_softmax(seed: int) -> None:
    num, logits = 60_000, torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 0.0, -torch.inf])
    counts = torch.bincount(
        draw(logits.expand(num, -1).contiguous(), many_keys(num, seed)), minlength=8
    ).double()
    expected = num * logits.double().softmax(-1)
    assert counts[7] == 0
    assert ((counts - expected)[:7] ** 2 / expected[:7]).sum() < 22.5  # 6 degrees of freedom, 0.1 %


def test_a_draw_depends_on_its_key_and_logits_and_not_on_the_batch() -> None:
    logits, key = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)), many_keys(40)
    together = draw(logits, key)
    assert torch.equal(torch.cat([draw(logits[i : i + 1], key[i : i + 1]) for i in range(40)]), together)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(logits[order], key[order]), together[order])
    assert torch.equal(gumbel(key[order], 300), gumbel(key, 300)[order])
    assert torch.equal(gumbel(key, 100), gumbel(key, 300)[:, :100]), (
        "noise of a token depends on the size of the vocabulary"
    )


def test_draws_off_the_cpu_use_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """draw's path for other devices, taken here for a tensor that says it is elsewhere."""

    class Elsewhere(Tensor):
        device = torch.device("cuda")

    logits, key = 5 * torch.randn(200, 300, generator=torch.Generator().manual_seed(1)), many_keys(200)
    monkeypatch.setattr("hispec.sampling.noise_numba.argmax_with_noise", None)  # not called
    off_cpu = draw(logits.as_subclass(Elsewhere), key)
    assert torch.equal(off_cpu.as_subclass(Tensor), (logits + gumbel(key, 300)).argmax(-1))
