"""Faults for engines: a method that raises on chosen calls, and a run that goes on after whatever a step
raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hispec.engine import Engine
from hispec.outputs import Delta
from hispec.sampling_params import SamplingParams
from tests.helpers.support import GREEDY

_MOST_STEPS = 2000  # of a run; one that needs more hangs


class Fault:
    """Makes `owner.name` raise error() in calls for which `when`(number of the call, its arguments) holds,
    instead of doing its work or, with `late`, after it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: type,
        name: str,
        error: Callable[[], BaseException],
        when: Callable[..., bool],
        late: bool = False,
    ) -> None:
        self.num_calls = self.num_raised = 0
        right = getattr(owner, name)

        def wrong(*arguments: Any, **named: Any) -> Any:
            self.num_calls += 1
            raises = when(self.num_calls, *arguments)
            if late or not raises:
                result = right(*arguments, **named)
            if raises:
                self.num_raised += 1
                raise error()
            return result

        static = isinstance(owner.__dict__.get(name), staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(wrong) if static else wrong)


def run_on(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    raised: type[Exception] | None = None,
    others: Sequence[str] = (),
) -> tuple[list[list[int]], list[str | None]]:
    """Output token ids and errors of all prompts; after a step that raises `raised` comes the next one.
    Integrity is checked after each. others: ids of requests that are there already."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    got: dict[str, list[Delta]] = {request_id: [] for request_id in [*others, *ids]}
    for _ in range(_MOST_STEPS):
        if not engine.has_unfinished():
            break
        deltas: list[Delta] = []
        try:
            deltas = engine.step()
        except Exception as error:
            if raised is None or type(error) is not raised:
                raise
        for delta in deltas:
            got[delta.request_id].append(delta)
        engine.check()
    assert not engine.has_unfinished(), "it hangs"
    for deltas in got.values():
        ends = [delta.finish_reason is not None for delta in deltas]
        assert ends == [False] * (len(ends) - 1) + [True], "one end, and nothing after it"
        assert (deltas[-1].finish_reason == "error") == (deltas[-1].error is not None)
    assert engine.stats()["kv_blocks_used"] == 0, "blocks leaked"
    tokens = [[token for delta in got[one] for token in delta.token_ids] for one in ids]
    return tokens, [got[one][-1].error for one in ids]
