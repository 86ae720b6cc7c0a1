"""What goes wrong in one request, or in the middle of a step, stays there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ee_models.attention import select_backend
from ee_models.checkpoint.loader import open_checkpoint
from ee_models.decoder import Decoder
from hispec import LLM, ConfigError, RequestError, SamplingParams
from hispec.config import EngineConfig, Plan, SchedulingConfig
from hispec.engine import Engine
from hispec.scheduling.policy import Service
from hispec.scheduling.request import Request
from tests.helpers.support import GREEDY, make_engine, random_prompts, run

CPU = torch.device("cpu")
PROMPTS = random_prompts((6, 4, 11), seed=5)


class Interrupting:
    """A text hook that is interrupted once, at its `at`-th token."""

    def __init__(self, at: int) -> None:
        self._left = at

    def append(self, token_id: int, may_stop: bool) -> str | None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return None

    def release(self, final: bool) -> str:
        return ""


def test_kv_that_is_computed_again_is_no_service(
    tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request that loses its blocks again and again would seem to have had much of the engine."""
    prompts, most = random_prompts((30, 28, 25, 29), seed=5), SamplingParams(temperature=0.0, max_tokens=24)
    wanted = run(make_engine(tiny_decoder), prompts, most)
    engine = Engine(
        tiny_decoder,
        EngineConfig(
            max_num_seqs=4,
            max_model_len=80,
            block_size=8,
            num_kv_blocks=14,
            max_prefill_tokens=200,
            enable_prefix_caching=False,
        ),
        scheduling=SchedulingConfig(swap_bytes=0),  # so that what is lost is computed again
    )
    served: dict[int, list[float]] = {}
    scheduler, real = engine._scheduler, engine._scheduler.served

    def noted(request: Request, service: Service) -> None:
        if service.rounds == 0:
            served.setdefault(request.number, []).append(service.passes)
        real(request, service)

    monkeypatch.setattr(scheduler, "served", noted)
    assert run(engine, prompts, most) == wanted
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["prefill_tokens"] > sum(len(prompt) - 1 for prompt in prompts)
    assert served == {number: [1.0] for number in range(4)}, "each prompt is one chunk"


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("plan", [Plan(), Plan(8, None, 4, 1), Plan(3, 8, 2, 2)], ids=str)
def test_an_interrupt_within_a_commit_leaves_every_output_right(
    tiny_decoder: Decoder, at: int, plan: Plan
) -> None:
    wanted = run(make_engine(tiny_decoder), PROMPTS)
    engine = make_engine(tiny_decoder, plan, num_kv_blocks=40)
    ids = [
        engine.add_request(prompt, GREEDY, text=Interrupting(at) if i == 1 else None)
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs: dict[str, list[int]] = {request_id: [] for request_id in ids}
    interrupts = 0
    while engine.has_unfinished():
        try:
            deltas = engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            continue
        for delta in deltas:
            outputs[delta.request_id] += delta.token_ids
        engine.check()
    assert interrupts == 1
    assert [outputs[request_id] for request_id in ids] == wanted
    # Nothing wrong was published either: longer prompts that find the cached blocks go on as they would
    # anywhere.
    longer = [prompt + output for prompt, output in zip(PROMPTS, wanted, strict=True)]
    assert run(engine, longer) == run(make_engine(tiny_decoder), longer)


def test_a_text_hook_that_fails_at_release_ends_its_request_alone(tiny_decoder: Decoder) -> None:
    class Broken(Interrupting):
        def release(self, final: bool) -> str:
            raise RuntimeError("no text")

    wanted = run(make_engine(tiny_decoder), PROMPTS)
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    ids = [
        engine.add_request(prompt, GREEDY, text=Broken(-1) if i == 1 else None)
        for i, prompt in enumerate(PROMPTS)
    ]
    deltas = [delta for _ in range(100) if engine.has_unfinished() for delta in engine.step()]
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
    assert ends[ids[1]].finish_reason == "error" and "no text" in (ends[ids[1]].error or "")
    for i in (0, 2):
        assert [
            token for delta in deltas if delta.request_id == ids[i] for token in delta.token_ids
        ] == wanted[i]


@pytest.mark.parametrize(
    "values", [{"top_k": 2**63}, {"min_tokens": 2**63, "max_tokens": None}, {"temperature": 1e-40}]
)
def test_values_that_no_tensor_holds_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams.of(values)


def test_more_logprobs_than_tokens_are_refused_at_admission() -> None:
    from tests.helpers.scripted import ScriptedDecoder, one_hot_script

    engine = make_engine(ScriptedDecoder(one_hot_script(lambda *_: 1)))
    with pytest.raises(RequestError, match="logprobs=64 is more than the vocabulary of 50"):
        engine.add_request([1], SamplingParams(logprobs=64))


def test_an_id_is_free_again_once_its_last_delta_was_given(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder)
    engine.add_request([1, 2], GREEDY, request_id="a")
    engine.abort(["a"])
    with pytest.raises(RequestError, match="unique"):
        engine.add_request([1, 2], GREEDY, request_id="a")
    assert [delta.finish_reason for delta in engine.step()] == ["abort"]
    engine.add_request([1, 2], GREEDY, request_id="a")
    engine.abort(["a"], notify=False)
    assert not engine.has_unfinished()


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), max_model_len=128, num_kv_blocks=64, max_num_seqs=4)


def test_streams_and_queued_requests_do_not_take_each_others_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    wanted = [
        output.outputs[0].token_ids for output in llm.generate(["job", "one", "two"], params, use_tqdm=False)
    ]
    llm.add("job", params, "job")
    first, second = llm.stream("one", params), llm.stream("two", params)
    got: list[list[int]] = [[], []]
    for one, two in zip(first, second, strict=False):
        got[0] += one.token_ids
        got[1] += two.token_ids
    for stream, tokens in ((first, got[0]), (second, got[1])):
        tokens += [token for delta in stream for token in delta.token_ids]
    assert got == wanted[1:]
    outputs = [output for _ in range(50) if llm.has_unfinished() for output in llm.step()]
    assert [output.request_id for output in outputs] == ["job"] and outputs[0].outputs[0].token_ids == wanted[
        0
    ]


def test_retrying_an_aborted_id_starts_anew(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    llm.add("abc", params, "a")
    llm.abort(["a"])
    llm.add("abc", params, "a")
    outputs = [output for _ in range(30) if llm.has_unfinished() for output in llm.step()]
    assert (
        len(outputs) == 1
        and outputs[0].outputs[0].finish_reason == "length"
        and len(outputs[0].outputs[0].token_ids) == 5
    )


def test_an_error_while_queuing_leaves_the_llm_usable(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), {"temperatur": 1}], use_tqdm=False)
    outputs = llm.generate(["a", "\ud800"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert outputs[0].error is None and "half of a surrogate pair" in (outputs[1].error or "")


def test_a_stop_string_before_min_tokens_is_plain_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("tell me", params, use_tqdm=False)[0].outputs[0]
    early = whole.text[2:4]
    output = llm.generate(
        "tell me", params.model_copy(update={"stop": [early], "min_tokens": 25}), use_tqdm=False
    )[0].outputs[0]
    assert whole.text.startswith(output.text) and early in output.text
    assert output.token_ids == whole.token_ids[: len(output.token_ids)] and len(output.token_ids) >= 25


def test_another_rows_nan_stays_its_own_under_sdpa(tiny_decoder: Decoder) -> None:
    from cache.paged_kv import PagedKV
    from cache.view import BatchView

    kv = PagedKV(1, 4, 4, 1, 8, torch.float32, CPU)
    kv.data[:, :, :4] = torch.nan  # block 0 is another request's; this row's short table is padded with zeros
    kv.data[:, :, 4:] = 1.0
    view = BatchView(torch.tensor([1]), torch.tensor([5]), torch.tensor([[1, 0]]), torch.tensor([0, 1]), 1, 8)
    for name in ("sdpa", "numba"):
        backend = select_backend(name, CPU, torch.float32)
        assert torch.isfinite(backend.attend(torch.ones(1, 2, 8), kv, 0, backend.prepare(view, kv))).all(), (
            name
        )


def test_the_engine_stays_within_the_rotary_table(tiny_path: Path) -> None:
    decoder = Decoder.load(open_checkpoint(tiny_path), torch.float32, CPU, max_positions=64)
    assert Engine(decoder, EngineConfig(num_kv_blocks=8)).max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len=100"):
        Engine(decoder, EngineConfig(num_kv_blocks=8, max_model_len=100))


@pytest.mark.parametrize("plan", [(3, None, 0, 1), (5, 3, 1, 1), (0, 3, 0, 1)])
def test_plans_that_would_skip_or_repeat_layers_are_refused(plan: tuple[int, int | None, int, int]) -> None:
    with pytest.raises(ConfigError):
        Plan(*plan)


def test_an_exit_beyond_the_model_is_refused_and_the_old_plan_stays(tiny_decoder: Decoder) -> None:
    engine = make_engine(tiny_decoder, Plan(3, 8, 2, 2))
    with pytest.raises(ConfigError, match="layer 12 of a model of 9"):
        engine.set_speculative(None, plan=Plan(3, 12, 2, 2))
    assert engine.plan == Plan(3, 8, 2, 2)


@pytest.mark.parametrize("ids", [5, None, 1.5, [5], ["a", None], b"a", [["a"]]])
def test_what_is_no_id_cannot_be_aborted_and_says_so(llm: LLM, ids: Any) -> None:
    llm.add("one", GREEDY, "a")
    for abort in (llm.abort, llm.engine.abort):
        with pytest.raises(RequestError, match="request_ids must be a string or strings, not "):
            abort(ids)
    assert llm.has_unfinished() and llm.engine.has_unfinished()
    llm.abort(iter(["a", "unknown"]))
    assert not llm.has_unfinished() and not llm.engine.has_unfinished()
