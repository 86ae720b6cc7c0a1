"""The choice and the filters on a GPU against what hispec/sampling/noise.py and hispec/sampling/sampler.py
say; in Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from hispec.sampling import floor_triton, noise, noise_triton  # noqa: E402
from hispec.sampling.floor_triton import nucleus_floor  # noqa: E402
from hispec.sampling.noise_triton import Draws, argmax_with_noise  # noqa: E402
from hispec.sampling.sampler import RowSampling, Sampler  # noqa: E402
from hispec.sampling_params import SamplingParams  # noqa: E402
from tests.gpu.test_kernels_triton import poisoned  # noqa: E402, F401 - a fixture
from tests.helpers.sweeps import sweep  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABS = [7, 260, 1000, 5000]
INF = float("inf")


def random_logits(num: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def many_keys(num: int, seed: int = 0) -> Tensor:
    return noise.keys(torch.full((num,), seed), torch.arange(num), noise.Stream.CHOICE).to(DEVICE)


def choose(
    logits: Tensor, temperature: Tensor | None = None, floor: Tensor | None = None, seed: int = 0
) -> Tensor:
    """By the noise of `many_keys`; temperature [n], None: 1."""
    num = len(logits)
    fed = torch.arange(num, device=DEVICE) - 1
    rows = torch.randperm(num, generator=torch.Generator().manual_seed(num)).to(DEVICE)
    seeds, temperatures = torch.full((num,), seed, device=DEVICE), torch.ones(num, device=DEVICE)
    if temperature is not None:
        temperatures[rows] = temperature
    return argmax_with_noise(logits, Draws(rows, fed, seeds, temperatures), floor)


def tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


@triton.jit
def _uniforms(
    keys: tl.tensor, uniforms: tl.tensor, gumbels: tl.tensor, vocab_size: int, BLOCK: tl.constexpr
) -> None:
    row, token = tl.program_id(0), tl.arange(0, BLOCK)
    u = noise_triton._uniform(tl.load(keys + row), token)
    tl.store(uniforms + row * vocab_size + token, u, mask=token < vocab_size)
    tl.store(gumbels + row * vocab_size + token, -tl.log(-tl.log(u)), mask=token < vocab_size)


def test_the_noise_is_the_same_hash_and_the_same_logarithms() -> None:
    key = torch.cat(
        (many_keys(6), torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32 - 1, 2**31], device=DEVICE))
    )
    uniforms, gumbels = torch.zeros(2, 12, 3000, device=DEVICE).unbind()
    _uniforms[(12,)](key, uniforms, gumbels, 3000, 4096, enable_fp_fusion=False)
    token, low, high = (
        torch.arange(3000, device=DEVICE),
        (key & noise._MASK32).unsqueeze(1),
        ((key >> 32) & noise._MASK32).unsqueeze(1),
    )
    bits = noise._mix32(noise._mix32((token * 0x9E3779B1 & noise._MASK32) ^ low) ^ high)
    assert torch.equal(uniforms, ((bits >> 9).float() + 0.5) * 2.0**-23)
    torch.testing.assert_close(
        gumbels, noise.gumbel(key, 3000), atol=3e-7, rtol=3e-7
    )  # a logarithm may differ by a unit in the last place


@triton.jit
def _keys(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor) -> None:
    at = tl.program_id(0)
    key = noise_triton._choice_key(tl.load(seeds + at), tl.load(positions + at))
    tl.store(out + at, key.to(tl.int64, bitcast=True))


def test_keys_are_those_of_torch_to_the_bit() -> None:
    some = [0, 1, -1, 2**63 - 1, -(2**63), 2**32 - 1, 2**31, 12345678901234567]
    seeds = torch.tensor(some, device=DEVICE).repeat_interleave(4)
    positions = torch.tensor([0, 1, 77, 2**31], device=DEVICE).repeat(len(some))
    out = torch.empty_like(seeds)
    _keys[(len(seeds),)](seeds, positions, out)
    assert torch.equal(out, noise.keys(seeds, positions, noise.Stream.CHOICE))


@sweep("vocab, dtype", itertools.product(VOCABS, [torch.float32, torch.bfloat16, torch.float16]), 2)
def test_the_choice_is_the_argmax_of_tempered_logits_and_noise(vocab: int, dtype: torch.dtype) -> None:
    num, key = 16, many_keys(16, seed=vocab)
    logits, temperature = (
        random_logits(num, vocab).to(dtype),
        0.3 + torch.rand(num, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    for scale in (temperature, None):
        noisy = (logits.float() / (1.0 if scale is None else scale.unsqueeze(1))) + noise.gumbel(key, vocab)
        top_two = noisy.topk(2).values
        assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-5, (
            "too near a tie for logarithms that may differ by a rounding error: take another seed"
        )
        assert torch.equal(choose(logits, scale, seed=vocab), noisy.argmax(-1))
    assert torch.equal(argmax_with_noise(logits, None), logits.float().argmax(-1))


def test_rows_of_temperature_zero_are_greedy_among_others_and_know_no_floor() -> None:
    logits, key = random_logits(6, 1500), many_keys(6)
    temperature, floor = tensor([0.0, 1.0, 0.0, 0.5, 2.0, 0.0]), tensor([INF, -INF, 3.0, -INF, -INF, INF])
    noisy = logits / temperature.where(temperature > 0, 1.0).unsqueeze(1) + noise.gumbel(key, 1500)
    expected = torch.where(temperature > 0, noisy.argmax(-1), logits.argmax(-1))
    assert torch.equal(choose(logits, temperature, floor), expected)
    assert torch.equal(argmax_with_noise(logits, None, floor), logits.argmax(-1))
    assert (noisy.argmax(-1) != logits.argmax(-1))[temperature > 0].any(), "noise decides nothing here"


def test_the_lowest_of_equal_tokens_wins_within_a_block_and_across_blocks() -> None:
    for first, later in ((3, (4, 900)), (1023, (1024, 4999)), (2050, (2049 + 1024, 4096)), (0, (1,))):
        logits = torch.full((2, 5000), -1.0, device=DEVICE)
        logits[0, [first, *later]] = 2.0
        logits[1] = -INF
        logits[1, [first, *later]] = -5.0
        assert argmax_with_noise(logits, None).tolist() == [first, first]
    assert argmax_with_noise(torch.full((1, 3000), -INF, device=DEVICE), None).tolist() == [0]


def test_tokens_of_minus_infinity_or_below_the_floor_are_never_chosen() -> None:
    logits = torch.full((30, 1100), -INF, device=DEVICE)
    logits[:, [3, 1031, 1099]] = tensor([0.0, 0.1, -0.1])
    assert set(choose(logits).tolist()) == {3, 1031, 1099}
    temperature, floor = torch.full((30,), 0.5, device=DEVICE), torch.full((30,), 0.0, device=DEVICE)
    assert set(choose(logits, temperature, floor).tolist()) == {
        3,
        1031,
    }, "a token at its floor is in, one below is out"
    floor.fill_(0.2)
    assert choose(logits, temperature, floor).eq(1031).all()


def test_rows_may_lie_apart_and_do_not_touch_each_other() -> None:
    wide, temperature = random_logits(7, 1400), torch.linspace(0.0, 2.0, 7, device=DEVICE)
    logits, rows = wide[:, 100:1300], torch.arange(7, device=DEVICE)
    fed, seeds = 3 * rows, rows % 2

    def draws(some: slice) -> Draws:
        return Draws(rows[some], fed[some], seeds, temperature)

    together = argmax_with_noise(logits, draws(slice(None)))
    assert torch.equal(together, argmax_with_noise(logits.contiguous(), draws(slice(None))))
    assert torch.equal(together[2:5], argmax_with_noise(logits[2:5], draws(slice(2, 5))))
    assert argmax_with_noise(logits[:0], draws(slice(0))).shape == (0,)


def floors(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    temperature, top_p, min_p = (
        tensor([getattr(p, name) for p in params]) for name in ("temperature", "top_p", "min_p")
    )
    top_k, rows = (torch.tensor(x, device=DEVICE) for x in ([p.top_k for p in params], range(len(params))))
    found = nucleus_floor(logits, rows, temperature, top_k, top_p, min_p)
    filters = [
        None if off.all() else each
        for off, each in ((top_k == 0, top_k), (top_p == 1, top_p), (min_p == 0, min_p))
    ]
    if any(each is not None for each in filters):  # what no row asks for may be left out
        assert torch.equal(found, nucleus_floor(logits, rows, temperature, *filters))
    return found


def left(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Which tokens the floors leave, and which the sampler leaves: [rows, vocab] bool."""
    temperature = tensor([p.temperature for p in params]).unsqueeze(1)
    tempered = logits.float() / temperature.where(temperature > 0, 1.0)
    by_floor = (tempered >= floors(logits, params).unsqueeze(1)) & (tempered > -INF)
    sampler = Sampler([RowSampling(p, 0, [1], [], frozenset()) for p in params], logits.shape[1], DEVICE)
    return by_floor, sampler._filtered(logits.float(), torch.arange(len(params), device=DEVICE)) > -INF


def near_boundary(logits: Tensor, params: SamplingParams) -> bool:
    """Whether the mass above some token is top_p but for rounding: float32 sums in another order may then
    disagree."""
    if params.top_p == 1.0:
        return False
    descending = (logits.double() / params.temperature).sort(descending=True).values
    if params.top_k:
        descending = descending[descending >= descending[min(params.top_k, len(descending)) - 1]]
    return bool(((descending.softmax(-1).cumsum(-1) - params.top_p).abs() < 2e-6).any())


def some_logits(generator: torch.Generator, vocab: int) -> Tensor:
    """Smooth, full of ties, or mostly -inf; at times all of them negative, or with zeros of both signs."""
    kind, scale = (
        int(torch.randint(0, 5, (), generator=generator)),
        float(10 ** (2 * torch.rand((), generator=generator) - 1)),
    )
    logits = scale * torch.randn(vocab, generator=generator)
    if kind == 1:
        logits = logits.round()
    elif kind == 2:
        logits[torch.rand(vocab, generator=generator) < 0.8] = -INF
        logits[int(torch.randint(0, vocab, (), generator=generator))] = 1.0
    elif kind == 3:
        logits = logits - 100.0
    elif kind == 4:
        logits = (
            logits.sign()
            * (logits.abs() > scale)
            * torch.tensor([1.0, -1.0])[torch.randint(0, 2, (vocab,), generator=generator)]
        )
    return logits


@sweep("seed", range(3), 3)
def test_the_floor_leaves_what_the_sampler_leaves(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mix of filters; a vocabulary of several blocks, the last of them not full."""
    monkeypatch.setattr(floor_triton, "_CHUNK", 256)
    generator, num, vocab = torch.Generator().manual_seed(seed), (16, 16, 28)[seed], (300, 41, 128)[seed]
    dtype = (torch.float32, torch.float32, torch.bfloat16)[seed]

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(0, len(values), (), generator=generator))]

    params, rows = [], []
    while len(rows) < num:
        top_k, top_p = (
            one_of(0, 0, 1, 2, 7, 40, vocab - 1, vocab, 10 * vocab),
            one_of(1.0, 1.0, 1.0, 1e-9, 0.05, 0.3, 0.6, 0.9, 0.99, 0.999),
        )
        one = SamplingParams(
            temperature=one_of(0.25, 0.7, 1.0, 1.9),
            top_k=top_k,
            top_p=top_p,
            min_p=one_of(0.0, 0.0, 0.01, 0.2, 1.0),
        )
        row = some_logits(generator, vocab).to(DEVICE, dtype)
        if not near_boundary(row.float(), one):
            params.append(one)
            rows.append(row)
    by_floor, by_sampler = left(torch.stack(rows), params)
    for i in range(num):
        assert torch.equal(by_floor[i], by_sampler[i]), (
            f"{params[i]}: {int(by_floor[i].sum())} tokens left instead of {int(by_sampler[i].sum())}"
        )


def test_a_large_vocabulary_is_searched_to_its_end() -> None:
    logits = random_logits(3, 4300, scale=0.5)
    logits[:, 4299] = 9.0
    params = [
        SamplingParams(temperature=1.0, top_k=2321),
        SamplingParams(temperature=0.9, top_p=0.5),
        SamplingParams(temperature=1.0, top_p=0.99, top_k=4000),
    ]
    assert not any(near_boundary(row, one) for row, one in zip(logits, params, strict=True))
    by_floor, by_sampler = left(logits, params)
    assert torch.equal(by_floor, by_sampler)
    assert by_floor.sum(-1).tolist()[0] == 2321


def test_the_floor_of_top_k_is_the_kth_tempered_logit_to_the_bit() -> None:
    logits, temperature = random_logits(3, 100), tensor([0.7, 1.3, 0.1])
    off = torch.ones(3, device=DEVICE)
    rows, top_k = torch.tensor([[2, 0, 1], [100, 1, 5]], device=DEVICE)  # in another order than the logits
    got = nucleus_floor(logits, rows, temperature.roll(-1), top_k, off, 0 * off)
    tempered = (logits / temperature.unsqueeze(1)).sort(descending=True).values
    assert torch.equal(got, torch.stack((tempered[0, 4], tempered[1, 99], tempered[2, 0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_floor_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    logits, rows = random_logits(5, 700).to(dtype), torch.tensor([1, 0, 0, 2, 1], device=DEVICE)
    temperature, top_p, min_p = tensor([0.8, 0.0, 1.3]), tensor([0.9, 0.5, 1.0]), tensor([0.0, 0.2, 0.1])
    top_k = torch.tensor([0, 5, 50], device=DEVICE)

    def found(some: slice) -> Tensor:
        return nucleus_floor(logits[some], rows[some], temperature, top_k, top_p, min_p)

    together = found(slice(None))
    assert together[0] == together[4] == -INF and (together[1:4] > -INF).all()
    assert torch.equal(together, torch.cat([found(slice(at, at + 1)) for at in range(5)]))


def test_there_is_no_floor_where_no_filter_is_on_and_in_greedy_rows() -> None:
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.0, top_k=1, top_p=0.5, min_p=0.5)]
    assert floors(random_logits(2, 50), params).tolist() == [-INF, -INF]
    assert floors(
        torch.full((1, 50), -INF, device=DEVICE), [SamplingParams(temperature=1.0, top_k=3)]
    ).tolist() == [-INF]


def test_floor_and_choice_together_are_the_samplers_choice() -> None:
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p)
        for t, k, p in ((0.8, 6, 1.0), (1.0, 0, 0.7), (0.0, 0, 1.0), (1.5, 9, 0.8))
    ]
    logits, key = random_logits(4, 600).bfloat16(), many_keys(4)
    temperature = tensor([p.temperature for p in params])
    sampler = Sampler([RowSampling(p, 0, [1], [], frozenset()) for p in params], 600, DEVICE)
    filtered = sampler._filtered(logits.float(), torch.arange(4, device=DEVICE))
    expected = torch.where(
        temperature > 0, (filtered + noise.gumbel(key, 600)).argmax(-1), logits.float().argmax(-1)
    )
    assert torch.equal(choose(logits, temperature, floors(logits, params)), expected)
