"""benchmarks/shared_prompts.py on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import shared_prompts


def test_both_kinds_of_batches_are_computed_once_and_come_out_the_same(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    rows = [{"prompt_token_ids": [5 + i, *range(9, 40)]} for i in range(13)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--batch-size", "3", "--shots", "2", "--max-tokens", "4"]
    options = [str(tiny_path), "--prompts", str(prompts), *sizes, "--json", str(target)]
    assert shared_prompts.main(options) == 0
    kinds = json.loads(target.read_text())["kinds"]
    for kind, length, shared, batches in (("outputs of one prompt", 31, 16, 2), ("prompts after", 95, 64, 2)):
        (found,) = (found for name, found in kinds.items() if name.startswith(kind))
        assert found["equal_outputs"] == found["outputs"] == 3 * batches
        assert found["without"]["prompt_positions_computed"] == 3 * length * batches
        assert found["with"]["prompt_positions_computed"] == (3 * length - 2 * shared) * batches
    assert "| 3 outputs of one prompt | " in capsys.readouterr().out
    assert shared_prompts.main([*options, "--limit", "9"]) == 2
    assert "9 are too few for two batches of 3 after 2; take at least 10" in capsys.readouterr().err
