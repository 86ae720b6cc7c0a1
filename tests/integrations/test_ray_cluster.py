"""Generate in a local Ray cluster of two actors, one of which is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from hispec import LLM, SamplingParams
from hispec.integrations.ray_data import Generate

pytestmark = pytest.mark.slow
NUM_ROWS = 120
SMALL: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4}


class Killable(Generate):
    """Dies with SIGKILL at the first batch that holds row 60, once in all."""

    def __init__(self, died: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._died = Path(died)

    async def __call__(self, batch: Any) -> Any:
        if 60 in batch["n"].to_pylist() and not self._died.exists():
            self._died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().__call__(batch)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_every_row_is_done_once_although_an_actor_is_killed(
    cluster: None, tiny_path: Path, tmp_path: Path
) -> None:
    prompts = [f"What is {number} + {number}?" for number in range(NUM_ROWS)]
    died = tmp_path / "died"
    dataset = ray.data.from_items([{"n": number, "prompt": prompts[number]} for number in range(NUM_ROWS)])
    done = dataset.map_batches(
        Killable,
        fn_constructor_kwargs={
            "died": str(died),
            "model": str(tiny_path),
            "sampling": {"max_tokens": 16, "temperature": 0.0},
            "speculative": {"draft": {"layer": 3}},
            "engine": SMALL,
        },
        batch_format="pyarrow",
        batch_size=8,
        concurrency=2,
        num_cpus=1,
    ).take_all()
    assert died.exists()
    assert sorted(row["n"] for row in done) == list(range(NUM_ROWS))
    with LLM(str(tiny_path), **SMALL) as llm:
        params = SamplingParams(max_tokens=16, temperature=0.0)
        wanted = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    assert {row["n"]: row["text"] for row in done} == dict(enumerate(wanted))
