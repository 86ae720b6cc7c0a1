"""benchmarks/copies.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import copies
from hispec.drafters.lookup import MOST_MATCHED
from tests.helpers.drafters import make_guess_table


def test_the_latest_of_the_longest_runs_is_copied() -> None:
    assert copies.find([1, 2, 7, 5, 2, 8, 1, 2]) == (7, 2)
    assert copies.find([1, 2, 7, 1, 2, 8, 1, 2]) == (8, 2)
    assert copies.find([1, 2, 3]) == (None, 0) and copies.find([4]) == (None, 0)
    period = [1, 2, 3] * 20
    assert copies.find(period) == (1, MOST_MATCHED)
    assert copies.find([9, 5, 6, 7, 8, 0, 9, 5, 6, 7, 8]) == (0, 5), "beyond the run of four"


def test_places_are_counted_by_what_matched_and_what_is_guessed() -> None:
    table = make_guess_table(torch.device("cpu"))  # after 2: 14, in some half of places
    found, rivals = copies._count([[2, 5]], [[2, 5, 2, 14]], table)
    # Nothing is the same before the first 2, then a token before 5 and two before 2, which copies say, too;
    # before 14 three are, after which another 5 stood.
    assert [found[size, "places"] for size in range(4)] == [1, 1, 1, 1]
    assert [found[size, "right"] for size in range(4)] == [0, 1, 1, 0]
    assert rivals == {
        (1, 0.6, "places"): 1,
        (1, 0.6, "copy"): 1,
        (1, 0.6, "guess"): 0,
        (3, 0.6, "places"): 1,
        (3, 0.6, "copy"): 0,
        (3, 0.6, "guess"): 1,
    }


def test_a_models_own_answers_are_counted(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7 + i]}) + "\n" for i in range(3)))
    options = ("--prompts", str(prompts), "--max-tokens", "8", "--json", str(target))
    assert copies.main([str(tiny_path), *options]) == 0
    result = json.loads(target.read_text())
    assert sum(places for places, _ in result["copies"]) == 24 and result["rivals"] == {}
    assert "| tokens matched | places | copies right |" in capsys.readouterr().out
    assert copies.main([str(tmp_path / "none"), *options]) == 2
