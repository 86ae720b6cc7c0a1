"""Ray Data: a class for `Dataset.map_batches`, an actor with one engine that batches continuously.

    dataset.map_batches(
        Generate, fn_constructor_kwargs={"model": "smollm2", "sampling": {"max_tokens": 64}},
        batch_format="pyarrow", batch_size=32, concurrency=4, num_cpus=8,
    )

Ray hands a few batches to an actor at once (RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY, 4 unless it is
set): their rows run together, and the next batch's take the place of those that have ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from ray.util.metrics import Counter

from ..config import SchedulingConfig, SpeculativeConfig
from ..errors import ConfigError, RequestError, nearest, shown
from ..llm import LLM
from ..outputs import RequestOutput
from ..prompts import without_nulls, without_nulls_of_others
from ..sampling_params import SamplingParams, put_over, seed_of
from ..serving.async_engine import AsyncEngine
from ..utils.files import parse_json

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
BESIDE_PROMPTS = ("id", "sampling")
FIELDS = (*PROMPT_FIELDS, *BESIDE_PROMPTS)
RESULTS = {
    "text": pa.string(),
    "finish_reason": pa.string(),
    "texts": pa.list_(pa.string()),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "error": pa.string(),
}
COUNTERS = {
    "hispec_rows": "rows that were served",
    "hispec_row_errors": "rows that could not be served",
    "hispec_prompt_tokens": "tokens of prompts that were served",
    "hispec_completion_tokens": "tokens written",
}


class Generate:
    """Adds to the rows of a batch the columns of RESULTS: `text` and `finish_reason` of the first output,
    `texts` of all, `error` (null for a row that was served; else the row has no outputs), and counts of
    tokens. A row that cannot be served harms no other.

    model, speculative, scheduling, engine   as those of `LLM`
    sampling   of every row; a row may override single fields in a column `sampling`, a mapping or its JSON
    columns    {field: column} for prompts in columns of other names: one of `prompt`, `messages` and
               `prompt_token_ids`, and optionally `id` and `sampling`. With an `id` a sampled row that has no
               seed gets one made of `seed` and its id, so that its output does not depend on where it runs
    seed       see columns

    What is done is counted in Ray's metrics of COUNTERS, tagged with the model.

    Raises ConfigError or CheckpointError as `LLM` does, and ConfigError for a batch that lacks the columns.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative: SpeculativeConfig | dict[str, Any] | None = None,
        scheduling: SchedulingConfig | dict[str, Any] | None = None,
        sampling: SamplingParams | dict[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        seed: int = 0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self._columns = dict(columns or {})
        for name in self._columns:
            if name not in FIELDS:
                known = f"known: {', '.join(FIELDS)}"
                raise ConfigError(f"columns: unknown field {shown(name)}{nearest(name, FIELDS)}; {known}")
        self._sampling = SamplingParams.of({} if sampling is None else sampling, "sampling")
        self._seed = seed
        self._counters = {name: Counter(name, text, ("model",)) for name, text in COUNTERS.items()}
        for counter in self._counters.values():
            counter.set_default_tags({"model": str(model)})
        self._engine = AsyncEngine(
            partial(LLM, model, speculative=speculative, scheduling=scheduling, **dict(engine or {}))
        )

    async def __call__(self, batch: Any) -> Any:
        """`batch`: a pyarrow.Table, or a mapping of columns; what comes back is of the same kind."""
        names = list(batch.column_names if isinstance(batch, pa.Table) else batch)
        rows = self._rows(batch, names)
        results = [_result(outcome) for outcome in await asyncio.gather(*map(self._serve, rows))]
        self._count(results)
        added = {name: pa.array([result[name] for result in results], kind) for name, kind in RESULTS.items()}
        if isinstance(batch, pa.Table):
            for name, column in added.items():
                batch = batch.append_column(name, column)
            return batch
        return {**batch, **{name: _of_numpy(column) for name, column in added.items()}}

    def close(self) -> None:
        """Ends the engine. Ray ends an actor's whole process instead."""
        self._engine.close()

    def _rows(self, batch: Any, names: list[str]) -> list[dict[str, Any]]:
        """The fields of each row. Raises ConfigError."""
        # A prompt whose column is named goes before what else the batch has.
        prompts = [field for field in PROMPT_FIELDS if field in self._columns] or PROMPT_FIELDS
        taken = {field: self._columns.get(field, field) for field in (*prompts, *BESIDE_PROMPTS)}
        taken = {field: name for field, name in taken.items() if name in names or field in self._columns}
        missing = [name for name in taken.values() if name not in names]
        prompts = [field for field in PROMPT_FIELDS if field in taken]
        if missing or len(prompts) != 1:
            wanted = f"no column {shown(missing[0])}" if missing else f"{len(prompts)} columns of prompts"
            raise ConfigError(
                f"the batch has {wanted}, it has {', '.join(names)}; give one of {', '.join(PROMPT_FIELDS)},"
                " or say in columns={field: column} where it is"
            )
        if clashes := [name for name in names if name in RESULTS]:
            raise ConfigError(
                f"the batch has a column {shown(clashes[0])} already, in whose place the results' would"
                " stand; give it another name (Dataset.rename_columns), or drop it (Dataset.drop_columns)"
            )
        values = {field: _plain(batch[name]) for field, name in taken.items()}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def _count(self, results: list[dict[str, Any]]) -> None:
        served = [result for result in results if result["error"] is None]
        counts = (
            len(served),
            len(results) - len(served),
            sum(result["prompt_tokens"] for result in served),
            sum(result["completion_tokens"] for result in served),
        )
        for counter, count in zip(self._counters.values(), counts, strict=True):
            if count:  # Ray refuses to add nothing
                counter.inc(count)

    async def _serve(self, row: dict[str, Any]) -> RequestOutput | str:
        """The outputs of a row, or why it has none."""
        field = next(name for name in PROMPT_FIELDS if name in row)
        try:
            sampling = self._sampling_of(row)
            prompt = row[field]
            if field == "messages" and isinstance(prompt, list):
                prompt = [without_nulls_of_others(each) for each in prompt]
            return await self._engine.generate(prompt, sampling, chat=field == "messages")
        except (ConfigError, RequestError) as error:
            return str(error)

    def _sampling_of(self, row: dict[str, Any]) -> SamplingParams:
        own = row.get("sampling")
        if isinstance(own, str):
            try:
                own = parse_json(own)
            except ValueError as error:
                raise ConfigError(f"sampling: not valid JSON: {error}") from None
        if own is not None and not isinstance(own, dict):
            raise ConfigError(f"sampling: expected a mapping or its JSON, got {shown(own)}")
        values = put_over(self._sampling.model_dump(), without_nulls(own or {}))
        if values["seed"] is None and row.get("id") is not None:
            values["seed"] = seed_of(self._seed, row["id"])
        return SamplingParams.of(values, "sampling")


def _of_numpy(column: Any) -> np.ndarray:
    """A column of results as numpy has it. Whole numbers stay such beside nulls, as objects: as floats, a
    batch with a row that failed would have columns of other types than the next."""
    if column.null_count and pa.types.is_integer(column.type):
        return np.array(column.to_pylist(), object)
    return column.to_numpy(zero_copy_only=False)


def _plain(column: Any) -> list[Any]:
    """A column's values as Python's own types."""
    if isinstance(column, pa.ChunkedArray | pa.Array):
        return column.to_pylist()
    return [_listed(value) for value in column]


def _listed(value: Any) -> Any:
    """A value of a column of numpy's, in which lists are arrays, also within mappings, and nulls of numbers
    are nan."""
    if isinstance(value, np.ndarray | list):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value


def _result(outcome: RequestOutput | str) -> dict[str, Any]:
    """The columns of RESULTS for a row."""
    error = outcome if isinstance(outcome, str) else outcome.error
    if error is not None or isinstance(outcome, str):
        return dict.fromkeys(RESULTS) | {"error": error}
    first = outcome.outputs[0]
    return {
        "text": first.text,
        "finish_reason": first.finish_reason,
        "texts": [output.text for output in outcome.outputs],
        "prompt_tokens": len(outcome.prompt_token_ids),
        "completion_tokens": sum(len(output.token_ids) for output in outcome.outputs),
        "error": None,
    }
