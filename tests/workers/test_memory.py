"""All workers have one copy of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from hispec import LLM
from hispec.utils.memory import proportional_bytes
from tests.helpers.tiny import tiny_checkpoint
from tests.workers.support import linux, pool
from tests.workers.test_outputs import GREEDY

pytestmark = linux


@pytest.mark.slow
def test_weights_are_there_once(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", vocab=40_000, hidden=256, num_layers=2)
    sizes = {"max_model_len": 64, "num_kv_blocks": 8, "max_num_seqs": 2, "skip_tokenizer_init": True}
    with LLM(str(path), workers=3, **sizes) as llm:
        weights = llm.memory()["weights_bytes"]
        assert weights > 80e6
        llm.generate([[5, 6, 7 + at] for at in range(6)], GREEDY, use_tqdm=False)
        assert all(each["finished"] > 0 for each in llm.stats()["workers"])
        pids = pool(llm).pids()
        assert list(pids) == ["nursery", "worker 0", "worker 1", "worker 2"]
        for name, pid in pids.items():
            own = proportional_bytes(pid, private=True)
            assert own is not None and own < weights / 2, name
        together = [proportional_bytes(pid) for pid in pids.values()]
        assert weights < sum(each or 0 for each in together) < 2 * weights + 3 * 100e6 + 500e6
    assert proportional_bytes(pids["worker 0"]) is None
