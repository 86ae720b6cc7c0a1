"""The accept functions: coupled acceptance over all patterns; speculative sampling by its exact law, without
sampling.

The law is exact because `rejection` is a function of the uniforms that it is given: the set of uniforms that
accept a proposal is found by bisection on the function itself, and the distribution that it draws from is
captured.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hispec.decoding import acceptance
from hispec.decoding.draft_tree import DraftTree
from hispec.sampling import noise

VOCAB = 4
BISECTIONS = 26  # float32 has no finer uniforms than 2 ** -24 near 1


def coupled_by_hand(own: list[int], proposed: list[int], num_proposed: int) -> int:
    num_accepted = 0
    while num_accepted < num_proposed and own[num_accepted] == proposed[num_accepted]:
        num_accepted += 1
    return num_accepted


@pytest.mark.parametrize(
    ("proposed", "num_proposed", "num_accepted", "token"),
    [
        ([5, 6, 7], 3, 3, None),  # all of them, and no position is left for a token of its own
        ([5, 6, 7], 2, 2, 7),  # all of them, and a bonus
        ([5, 6, 0], 3, 2, 7),  # corrected at the last position
        ([5, 0, 7], 3, 1, 6),  # what follows a rejected one does not count
        ([0, 6, 7], 3, 0, 5),
        ([5, 6, 7], 0, 0, 5),  # nothing proposed: the tier's own token
        ([5, 6, 7], 1, 1, 6),
    ],
)
def test_coupled_accepts_the_leading_matches_and_adds_its_own_token(
    proposed: list[int], num_proposed: int, num_accepted: int, token: int | None
) -> None:
    count, last, own = acceptance.coupled(
        torch.tensor([[5, 6, 7]]), torch.tensor([proposed]), torch.tensor([num_proposed]), DraftTree.chain(3)
    )
    assert count.tolist() == last.tolist() == [num_accepted]
    assert token is None or own.tolist() == [token]


def test_coupled_is_right_for_every_pattern_of_three_places_in_one_batch() -> None:
    cases = [
        (own, proposed, num_proposed)
        for own in itertools.product((0, 1), repeat=3)
        for proposed in itertools.product((0, 1), repeat=3)
        for num_proposed in range(4)
    ]
    owns, proposals, nums = (torch.tensor([case[i] for case in cases]) for i in range(3))
    counts, lasts, tokens = acceptance.coupled(owns, proposals, nums, DraftTree.chain(3))
    assert torch.equal(counts, lasts)
    for (own, proposed, num_proposed), count, token in zip(
        cases, counts.tolist(), tokens.tolist(), strict=True
    ):
        assert count == coupled_by_hand(list(own), list(proposed), num_proposed)
        assert count == 3 or token == own[count]


class Drawn:
    """Stands in for `draw`: keeps the distributions and keys that it was given, and returns token 0."""

    def __init__(self) -> None:
        self.probabilities = torch.empty(0)
        self.keys = torch.empty(0)

    def __call__(self, logits: Tensor, key: Tensor) -> Tensor:
        self.probabilities, self.keys = logits.double().softmax(-1), key
        return torch.zeros(logits.shape[0], dtype=torch.int64)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    capture = Drawn()
    monkeypatch.setattr(acceptance, "draw", capture)
    return capture


def distributions(seed: int, *shape: int) -> Tensor:
    """Random distributions [*shape, VOCAB], some with zeros, from peaked to flat."""
    generator = torch.Generator().manual_seed(seed)
    p = (
        3 * torch.rand(*shape, 1, generator=generator) * torch.randn(*shape, VOCAB, generator=generator)
    ).softmax(-1)
    p = p * (torch.rand(*shape, VOCAB, generator=generator) > 0.2)
    p[..., 0] += 1e-3
    return p / p.sum(-1, keepdim=True)


def judge(p: Tensor, q: Tensor, proposed: Tensor, num_proposed: Tensor, uniform: Tensor) -> Tensor:
    """num_accepted [rows] of rejection."""
    return acceptance.rejection(p, q, proposed, num_proposed, uniform, torch.zeros_like(proposed))[0]


def accepting_uniforms(p: Tensor, q: Tensor) -> Tensor:
    """Measure [rows, VOCAB] of the uniforms that accept each token of one position, p and q [rows, VOCAB], by
    bisection."""
    rows = p.shape[0] * VOCAB
    p, q = (x.repeat_interleave(VOCAB, 0).unsqueeze(1) for x in (p, q))
    proposed, one = (
        torch.arange(VOCAB).repeat(rows // VOCAB).unsqueeze(1),
        torch.ones(rows, dtype=torch.int64),
    )
    low, high = torch.zeros(rows), torch.ones(rows)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        accepted = judge(p, q, proposed, one, middle.unsqueeze(1)) == 1
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return low.view(-1, VOCAB)


def test_rejection_accepts_with_probability_min_1_p_over_q(drawn: Drawn) -> None:
    p, q = distributions(1, 200), distributions(2, 200)
    expected = torch.where(q > 0, (p.double() / q.double()).clamp(max=1.0), (p > 0).double())
    torch.testing.assert_close(accepting_uniforms(p, q).double(), expected, atol=2e-7, rtol=0)


def test_rejection_turns_from_accepting_to_rejecting_once_as_the_uniform_grows(drawn: Drawn) -> None:
    p, q = distributions(3, 20), distributions(4, 20)
    threshold = (p.double() / q.double()).nan_to_num(posinf=2.0)
    grid = torch.cat((torch.linspace(1e-6, 1 - 1e-6, 401), noise.uniform(torch.tensor([0, -1]))))
    for token in range(VOCAB):
        rows = len(grid)
        for case in range(20):
            p_rows, q_rows = (x[case].expand(rows, 1, VOCAB) for x in (p, q))
            accepted = (
                judge(
                    p_rows,
                    q_rows,
                    torch.full((rows, 1), token),
                    torch.ones(rows, dtype=torch.int64),
                    grid.unsqueeze(1),
                )
                == 1
            )
            clear = (grid - threshold[case, token]).abs() > 1e-6
            assert torch.equal(accepted[clear], (grid < threshold[case, token])[clear])


def test_after_a_rejection_the_token_is_from_the_residual_and_after_none_from_p(drawn: Drawn) -> None:
    """Three positions, two proposed, all combinations of which are rejected."""
    generator = torch.Generator().manual_seed(7)
    counts_seen = set()
    for case in range(50):
        p, q = distributions(10 + case, 1, 3), distributions(100 + case, 1, 3)
        proposed = torch.randint(0, VOCAB, (1, 3), generator=generator)
        ratio = (p / q).gather(-1, proposed.unsqueeze(-1)).squeeze(-1).nan_to_num(posinf=2.0)
        # Uniforms well on one side of each threshold, where there is such a side.
        uniform = torch.where(
            torch.rand(1, 3, generator=generator) < 0.5,
            ratio.clamp(max=1.0) * 0.5,
            (1 + ratio.clamp(max=1.0)) / 2,
        )
        keys = torch.tensor([[11, 12, 13]])
        num_accepted, _ = acceptance.rejection(p, q, proposed, torch.tensor([2]), uniform, keys)
        accepted = [bool(uniform[0, position] < ratio[0, position]) for position in range(2)]
        expected_count = 0 if not accepted[0] else 1 if not accepted[1] else 2
        assert num_accepted.tolist() == [expected_count]
        expected = p[0, expected_count].double()
        if expected_count < 2:
            expected = (p - q)[0, expected_count].double().clamp(min=0)
        torch.testing.assert_close(drawn.probabilities[0], expected / expected.sum(), atol=1e-6, rtol=0)
        assert drawn.keys.tolist() == [11 + expected_count]
        counts_seen.add(expected_count)
    assert counts_seen == {0, 1, 2}


@pytest.mark.parametrize("seed", range(5))
def test_what_rejection_emits_is_distributed_as_p_whatever_q_is(seed: int, drawn: Drawn) -> None:
    """sum over x of q(x) * P(accept x) at x, and the rest from the captured distribution: exactly p
    [Leviathan et al. 2023, A.1]."""
    p, q = distributions(seed, 40), distributions(seed + 50, 40)
    acceptance = accepting_uniforms(p, q).double()
    ones = torch.ones(40, dtype=torch.int64)
    # No uniform is this large, but so every row is rejected and shows what it would then draw from.
    assert not judge(
        p.unsqueeze(1), q.unsqueeze(1), q.argmax(-1, keepdim=True), ones, torch.full((40, 1), 1e9)
    ).any()
    emitted = q * acceptance + (1 - (q * acceptance).sum(-1, keepdim=True)) * drawn.probabilities
    torch.testing.assert_close(emitted, p.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_proposed", [0, 1, 2, 3])
def test_only_what_was_proposed_is_judged(num_proposed: int, drawn: Drawn) -> None:
    p, proposed = distributions(1, 1, 3), torch.tensor([[0, 0, 0]])
    num_accepted = judge(p, p, proposed, torch.tensor([num_proposed]), torch.full((1, 3), 0.5))
    assert num_accepted.tolist() == [num_proposed]
    if num_proposed < 3:
        torch.testing.assert_close(drawn.probabilities[0], p[0, num_proposed].double(), atol=1e-6, rtol=0)


def test_where_nothing_was_proposed_the_token_is_from_p_and_not_from_a_residual(drawn: Drawn) -> None:
    p, q = distributions(1, 1, 2), distributions(2, 1, 2)
    assert judge(p, q, torch.tensor([[1, 2]]), torch.tensor([0]), torch.full((1, 2), 0.9)).tolist() == [0]
    torch.testing.assert_close(drawn.probabilities[0], p[0, 0].double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("uniform", [2.0**-24, 0.5, 1 - 2.0**-24])
def test_equal_distributions_accept_whatever_the_uniform(uniform: float, drawn: Drawn) -> None:
    p = distributions(5, 1, 1)
    for token in range(VOCAB):
        expected = [
            int(p[0, 0, token] > 0)
        ]  # a token without probability cannot be proposed; if it were, it would be rejected
        assert (
            judge(
                p, p.clone(), torch.tensor([[token]]), torch.tensor([1]), torch.tensor([[uniform]])
            ).tolist()
            == expected
        )


def test_a_rejection_by_rounding_alone_draws_from_p(drawn: Drawn) -> None:
    """p a rounding error below q everywhere: a uniform next to 1 rejects, and there is no residual."""
    q = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])
    p = q * (1 - 1e-6)
    assert judge(p, q, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[1 - 2.0**-24]])).tolist() == [0]
    torch.testing.assert_close(drawn.probabilities[0], q[0, 0].double(), atol=1e-6, rtol=0)


def test_impossible_tokens_are_never_accepted_and_never_drawn(drawn: Drawn) -> None:
    p, q = torch.tensor([[[0.0, 0.5, 0.5, 0.0]]]), torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    assert judge(p, q, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[2.0**-24]])).tolist() == [0]
    assert drawn.probabilities.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_greedy_rows_accept_exactly_the_argmax(drawn: Drawn) -> None:
    """One-hot distributions, as greedy rows have them: `rejection` then is `coupled`."""
    for own, proposed in itertools.product(range(VOCAB), repeat=2):
        p, q = (
            torch.nn.functional.one_hot(torch.tensor([[token]]), VOCAB).float() for token in (own, proposed)
        )
        assert judge(p, q, torch.tensor([[proposed]]), torch.tensor([1]), torch.tensor([[0.3]])).tolist() == [
            int(own == proposed)
        ]
        if own != proposed:
            assert drawn.probabilities[0].argmax() == own


def test_rows_are_judged_each_by_itself(drawn: Drawn) -> None:
    p, q = distributions(1, 30, 3), distributions(2, 30, 3)
    generator = torch.Generator().manual_seed(3)
    proposed, num_proposed = (
        torch.randint(0, VOCAB, (30, 3), generator=generator),
        torch.randint(0, 4, (30,), generator=generator),
    )
    uniform = torch.rand(30, 3, generator=generator)
    together = judge(p, q, proposed, num_proposed, uniform)
    from_together = drawn.probabilities
    assert together.unique().numel() > 2
    for row in range(30):
        at = slice(row, row + 1)
        assert judge(p[at], q[at], proposed[at], num_proposed[at], uniform[at]).equal(together[at])
        assert drawn.probabilities.equal(from_together[at])
