"""How fast a model was here with how many workers: what `hispec profile --latency` has measured, by which
`auto` chooses."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config import EngineConfig
from ..utils.environment import environment
from ..utils.files import cache_dir, write_json
from ..version import __version__

_log = logging.getLogger(__name__)
_WORTH_IT = 1.02  # times the speed that twice the workers must bring: each costs memory


class WorkerCounts(BaseModel):
    """subject: what was measured; tokens_per_s: of plain decoding, by number of workers."""

    model_config = ConfigDict(extra="forbid")

    subject: dict[str, str]
    tokens_per_s: dict[int, float] = Field(min_length=1)

    @property
    def best(self) -> int:
        """The fewest workers that no larger number is much faster than."""
        counts = sorted(self.tokens_per_s)
        best = counts[0]
        for count in counts[1:]:
            if self.tokens_per_s[count] > _WORTH_IT * self.tokens_per_s[best]:
                best = count
        return best


def subject_of(model: str | Path, config: EngineConfig) -> dict[str, str]:
    """What the speed of workers depends on. Not the rows of each: more of them favour all numbers alike."""
    machine = environment()
    return {
        "model": str(model),
        "dtype": config.dtype,
        "quantization": str(config.quantization),
        "kv_cache_dtype": config.kv_cache_dtype,
        "cpu": str(machine["cpu"]),
        "cores": str(machine["cores"]),
        "hispec": __version__,
    }


def keep(counts: WorkerCounts) -> Path:
    """Where `best_count` finds them. Raises OSError."""
    path = _place(counts.subject)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, counts.model_dump(mode="json"))
    return path


def best_count(model: str | Path, config: EngineConfig) -> int | None:
    """The number of workers that was found best for a model on this machine; None if nothing was measured."""
    subject = subject_of(model, config)
    try:
        kept = WorkerCounts.model_validate_json(_place(subject).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        _log.warning("%s is passed over: %s", _place(subject), str(error).split("\n")[0])
        return None
    return kept.best if kept.subject == subject else None


def _place(subject: dict[str, str]) -> Path:
    digest = hashlib.blake2b(json.dumps(subject, sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_dir() / "workers" / f"{digest}.json"
