"""The benchmark: what is run in which order, and what is derived from it."""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from hispec.config import SpeculativeConfig
from hispec.errors import ConfigError, build
from hispec.jobs import bench, hf_baseline
from hispec.jobs.bench import BenchOptions, plans_of, run_bench
from hispec.jobs.bench_runs import Runs
from hispec.jobs.confidence_interval import Paired, mean_ratio, noise_of_repeats, ratio_interval
from hispec.jobs.hf_baseline import TransformersBaseline
from hispec.jobs.rates import Rates, add_counts, floor_warning, plan_text
from hispec.jobs.report import print_bench
from hispec.jobs.schema import Job
from hispec.utils.environment import environment
from tests.helpers.fake_llm import FakeLLM
from tests.helpers.job_support import THREE_TIER, install_fake_llm
from tests.helpers.sweeps import sweep


class FakeBaseline:
    """Agrees with FakeLLM's plain decoding, but for the last prompt."""

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        llm = FakeLLM("fake", max_num_seqs=4)
        sampling = build(bench.SamplingParams, {"temperature": 0.0, "max_tokens": 12})
        outputs = [result.outputs[0].token_ids for result in llm.generate(prompts, sampling)]
        return [*outputs[:-1], [0]]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llm(monkeypatch)
    monkeypatch.setattr(bench, "_baseline", lambda *args: FakeBaseline())


def make_job(folder: Path, lines: list[dict[str, Any]] | None = None, **fields: Any) -> Job:
    lines = [{"prompt": f"prompt {number}"} for number in range(6)] if lines is None else lines
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {
        "model": "fake",
        "speculative": THREE_TIER,
        "input": {"path": str(folder / "in.jsonl")},
        "output": {"path": str(folder / "out.jsonl")},
    }
    return build(Job, values | fields)


def options(**fields: Any) -> BenchOptions:
    return build(BenchOptions, {"max_tokens": 12, "batch_size": 4, "repeats": 3} | fields)


def test_the_result_has_the_promised_keys_and_is_json(tmp_path: Path) -> None:
    result = run_bench(make_job(tmp_path), options(), progress=False)
    names = ["transformers", "plain", "two_tier", "three_tier"]
    assert list(result["engines"]) == names == list(result["ratio_to_plain"])
    assert all(
        len(engine["tokens_per_s_runs"]) == 3 and engine["tokens_per_s"] > 0
        for engine in result["engines"].values()
    )
    assert result["ratio_to_plain"]["plain"] == 1.0
    assert result["exact_match"] == {"transformers": [5, 6], "two_tier": [6, 6], "three_tier": [6, 6]}
    looked_up = {"looked_up_kept": None, "looked_up_share": None}
    assert result["acceptance"] == {
        "two_tier": {"draft_kept": 0.5, "tentative_accepted": None, **looked_up},
        "three_tier": {"draft_kept": 0.5, "tentative_accepted": 0.5, **looked_up},
    }
    # Every token of the stand-in takes 1/128 second of decoding.
    assert result["decode_ratio_to_plain"] == {"plain": 1.0, "two_tier": 1.0, "three_tier": 1.0}
    assert (
        result["engines"]["plain"]["decode_tokens_per_s"] == 128
        and "decode_tokens_per_s" not in result["engines"]["transformers"]
    )
    assert result["engines"]["plain"]["full_passes_per_token"] == 1.0
    assert result["memory"]["kv_bytes"] == 100 and result["memory"]["peak_resident_bytes"] > 1e6
    assert {"cpu", "cores", "threads", "torch", "transformers", "python", "hispec"} <= result[
        "environment"
    ].keys()
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_engines_take_turns_in_going_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    time_run = Runs.time
    monkeypatch.setattr(Runs, "time", lambda *arguments: (order.append(""), time_run(*arguments))[1])
    set_speculative = FakeLLM.set_speculative

    def watched(self: FakeLLM, speculative: SpeculativeConfig | None) -> None:
        order.append("plain" if speculative is None else "three" if speculative.check else "two")
        set_speculative(self, speculative)

    monkeypatch.setattr(FakeLLM, "set_speculative", watched)
    run_bench(make_job(tmp_path), options(transformers=False), progress=False)
    timed = [name for name, then in pairwise(order) if name and not then]
    assert timed == ["plain", "two", "three", "two", "three", "plain", "three", "plain", "two"]


def test_every_run_processes_its_prompts_anew_with_one_model(tmp_path: Path) -> None:
    run_bench(make_job(tmp_path), options(transformers=False, context=9), progress=False)
    (llm,) = FakeLLM.instances
    assert (llm.engine["enable_prefix_caching"], llm.engine["max_num_seqs"], llm.engine["max_model_len"]) == (
        False,
        4,
        21,
    )
    assert llm.closed


@pytest.mark.parametrize("context", [1, 7, 8, 9, 50])
def test_context_repeats_or_cuts_every_prompt(tmp_path: Path, context: int) -> None:
    result = run_bench(make_job(tmp_path), options(context=context), progress=False)
    assert (result["prompts"]["tokens_min"], result["prompts"]["tokens_max"]) == (context, context)
    assert bench._fit([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_difference_from_plain_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "wrong_when_speculative", True)
    result = run_bench(make_job(tmp_path), options(transformers=False), progress=False)
    assert result["exact_match"] == {"two_tier": [0, 6], "three_tier": [0, 6]}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_seconds_of_stages_are_those_of_a_run_and_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(FakeLLM, "num_workers", num_workers)
    monkeypatch.setattr(FakeLLM, "times_passes", True)
    result = run_bench(make_job(tmp_path), options(transformers=False, repeats=3), progress=False)
    for engine in result["engines"].values():
        seconds = sum(engine["group_decode_seconds"])
        assert seconds == pytest.approx(engine["tokens"] / 128 / num_workers)
        assert engine["stage_s"]["verify"] == pytest.approx(seconds / 2)
        assert sum(engine["stage_s"].values()) == pytest.approx(seconds)


def test_two_tier_is_three_tier_without_its_check() -> None:
    three = build(SpeculativeConfig, THREE_TIER)
    plans = plans_of(three, {})
    assert list(plans) == ["plain", "two_tier", "three_tier"] and plans["three_tier"] is three
    two = plans["two_tier"]
    assert two is not None and two.plan(10).window == 4 and two.draft == three.draft
    assert list(plans_of(two, {})) == ["plain", "two_tier"] and list(plans_of(None, {})) == ["plain"]


def test_further_plans_are_measured_under_their_names_which_must_be_free(tmp_path: Path) -> None:
    two = build(SpeculativeConfig, {"draft": {"layer": 3}, "num_draft_tokens": 1})
    result = run_bench(make_job(tmp_path), options(transformers=False, plans={"tuned": two}), progress=False)
    assert list(result["engines"]) == ["plain", "two_tier", "three_tier", "tuned"]
    assert result["engines"]["tuned"]["plan"].startswith("draft [0, 3) → verify")
    with pytest.raises(ConfigError, match="'plain' is taken; rename the file"):
        plans_of(two, {"plain": None})


def test_tasks_are_run_one_by_one_and_their_ratios_averaged(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "metadata": {"task": task}} for task in ("maths", "code", "maths")]
    result = run_bench(make_job(tmp_path, rows), options(transformers=False), progress=False)
    ratios = result["ratio_by_task"]
    assert list(ratios) == ["plain", "two_tier", "three_tier"] and list(ratios["plain"]) == [
        "maths",
        "code",
        "mean",
    ]
    assert set(ratios["plain"].values()) == {1.0}
    assert ratios["two_tier"]["mean"] == pytest.approx(
        (ratios["two_tier"]["maths"] + ratios["two_tier"]["code"]) / 2
    )
    assert result["exact_match"] == {
        "two_tier": [3, 3],
        "three_tier": [3, 3],
    }, "outputs are in the order of the prompts"
    one_task = run_bench(make_job(tmp_path), options(transformers=False), progress=False)
    assert one_task["ratio_by_task"] == {}


def test_at_batch_1_each_prompt_is_timed_by_every_engine_in_turn_and_gives_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[bool, str]] = []
    add = FakeLLM.add

    def watched(self: FakeLLM, prompt: Any, *arguments: Any, **more: Any) -> None:
        served.append((self.speculative is not None, "".join(map(chr, prompt))))
        add(self, prompt, *arguments, **more)

    monkeypatch.setattr(FakeLLM, "add", watched)
    rows = [
        {"prompt": f"{task} {number}", "metadata": {"task": task}}
        for number in range(3)
        for task in ("maths", "code")
    ]
    two = {"draft": {"layer": 3}, "num_draft_tokens": 1}
    result = run_bench(
        make_job(tmp_path, rows, speculative=two),
        options(transformers=False, batch_size=1, repeats=2),
        progress=False,
    )
    timed = served[-24:]  # after the warm-up: 6 prompts, two engines, two repeats
    assert [prompt for _, prompt in timed] == [row["prompt"] for row in rows for _ in range(2)] * 2
    # Who is first changes from prompt to prompt, and for each prompt from repeat to repeat.
    first_then_second = [False, True, True, False] * 3
    assert [speculative for speculative, _ in timed] == first_then_second + [
        not each for each in first_then_second
    ]
    low, high = result["ratio_interval"]["two_tier"]
    assert low <= result["ratio_by_task"]["two_tier"]["mean"] <= high and list(result["ratio_interval"]) == [
        "two_tier"
    ]
    assert (
        sum(result["engines"]["two_tier"]["accept_len_histogram"]) > 0
        and json.loads(json.dumps(result)) == result
    )
    print_bench(result)
    assert (
        run_bench(make_job(tmp_path, rows), options(transformers=False), progress=False)["ratio_interval"]
        == {}
    )


def test_batches_are_timed_by_every_engine_in_turn_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[bool, list[str]]] = []
    generate = bench.generate

    def watched(llm: FakeLLM, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
        served.append((llm.speculative is not None, ["".join(map(chr, prompt)) for prompt in prompts]))
        return generate(llm, prompts, sampling)

    monkeypatch.setattr(bench, "generate", watched)
    rows = [
        {"prompt": f"{task} {number}", "metadata": {"task": task}}
        for number in range(3)
        for task in ("maths", "code")
    ]
    two = {"draft": {"layer": 3}, "num_draft_tokens": 1}
    job, few = make_job(tmp_path, rows, speculative=two), {"transformers": False, "batch_size": 2}
    result = run_bench(job, options(**few, by_batch=True, repeats=1), progress=False)
    batches = [["maths 0", "maths 1"], ["maths 2"], ["code 0", "code 1"], ["code 2"]]
    assert [prompts for _, prompts in served] == [batch for batch in batches for _ in range(2)]
    assert [speculative for speculative, _ in served] == [False, True, True, False] * 2
    assert result["groups"] == [
        {"task": task, "prompts": numbers}
        for task, numbers in (("maths", [0, 2]), ("maths", [4]), ("code", [1, 3]), ("code", [5]))
    ]
    for engine in result["engines"].values():
        assert sum(engine["group_tokens"]) == engine["tokens"]
        assert sum(engine["group_seconds"]) == pytest.approx(engine["seconds_runs"][0])
        speed = engine["tokens"] / sum(engine["group_decode_seconds"])
        assert speed == pytest.approx(engine["decode_tokens_per_s"])
    low, high = result["ratio_interval"]["two_tier"]
    assert low <= result["ratio_by_task"]["two_tier"]["mean"] <= high
    result = run_bench(job, options(**few, repeats=1), progress=False)
    assert [group["prompts"] for group in result["groups"]] == [[0, 2, 4], [1, 3, 5]]


def test_a_store_of_earlier_outputs_is_not_lost_between_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of plan empties it, so an engine then decodes all prompts before it is another one's turn."""
    changes: list[bool] = []
    set_speculative = FakeLLM.set_speculative

    def watched(self: FakeLLM, speculative: SpeculativeConfig | None) -> None:
        changes.append(speculative is not None)
        set_speculative(self, speculative)

    monkeypatch.setattr(FakeLLM, "set_speculative", watched)
    store = {"draft": {"kind": "ngram", "ngram": {"datastore_tokens": 1024}}, "num_draft_tokens": 4}
    rows = [{"prompt": f"{number}", "metadata": {"task": "maths"}} for number in range(5)]
    job = make_job(tmp_path, rows, speculative=store)
    result = run_bench(job, options(transformers=False, batch_size=1, repeats=2), progress=False)
    assert changes == [False, True, *[False, True], *[True, False]], "warm-up, then one change a run"
    assert list(result["ratio_interval"]) == ["two_tier"], "prompts are timed one by one all the same"


def test_an_interval_holds_the_ratio_of_all_prompts_and_shrinks_with_their_number() -> None:
    def tasks(num: int) -> list[Paired]:
        random = np.random.default_rng(1)
        tokens, seconds = [64.0] * num, random.uniform(1, 3, num)
        return [
            Paired(tokens, (seconds * random.uniform(0.4, 0.9, num)).tolist(), tokens, seconds.tolist())
            for _ in range(2)
        ]

    widths = []
    for num in (10, 160):
        interval = ratio_interval(tasks(num))
        assert interval is not None
        ratios = [sum(task.plain_seconds) / sum(task.seconds) for task in tasks(num)]
        assert interval[0] < sum(ratios) / 2 < interval[1]
        widths.append(interval[1] - interval[0])
    assert widths[1] < widths[0] / 2.5, "sixteen times the prompts, a quarter of the width"
    constant = Paired([2, 4, 6], [1, 2, 3], [2, 4, 6], [2, 4, 6])
    assert ratio_interval([constant]) == pytest.approx((2.0, 2.0))
    assert mean_ratio([constant, Paired([9], [3], [9], [12])]) == pytest.approx((2.0 + 4.0) / 2)
    assert ratio_interval([Paired([1], [1], [1], [1])]) is None and ratio_interval([]) is None


@sweep("num_tasks, num", [(7, 2), (1, 7), (7, 15)], lambda case: case != (7, 15))
def test_an_interval_of_a_few_batches_holds_what_it_says(num_tasks: int, num: int) -> None:
    """Percentiles alone hold 76 and 89 % of the first two."""
    random, held = np.random.default_rng(2), 0
    for _ in range(400):
        tasks = [
            Paired([1.0] * num, random.uniform(1.25, 1.75, num).tolist(), [1.0] * num, [3.0] * num)
            for _ in range(num_tasks)
        ]
        interval = ratio_interval(tasks)
        assert interval is not None
        held += interval[0] <= 3.0 / 1.5 <= interval[1]
    assert held >= 400 * 0.92, held


def test_the_noise_of_repeats_is_what_equal_programs_differ_by_in_19_of_20_comparisons() -> None:
    random, beyond = np.random.default_rng(0), []
    for _ in range(2000):
        drift = random.normal(0, 0.3, 3)  # of all programs alike: of no account
        logs = drift + random.normal(0, 0.02, (4, 3))
        noise = noise_of_repeats(np.exp(logs).tolist())
        assert noise is not None
        beyond.append(abs(logs[1].mean() - logs[0].mean()) > np.log(noise))
    assert 0.035 < np.mean(beyond) < 0.065
    assert noise_of_repeats([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) == pytest.approx(1.0)
    assert noise_of_repeats([[1.0, 2.0]]) is None and noise_of_repeats([[1.0], [2.0]]) is None


def test_counts_of_a_run_in_parts_are_summed() -> None:
    part = FakeLLM("fake").stats() | {
        "tokens": 3,
        "rounds": 2,
        "cycles": 2,
        "accept_length_histogram": [0, 1, 1],
        "num_layers": 10,
    }
    total = add_counts(add_counts({}, part), part | {"accept_length_histogram": [0, 2]})
    assert (total["tokens"], total["rounds"], total["num_layers"]) == (6, 4, 10)
    assert total["accept_length_histogram"] == [0, 3, 1]


def test_plans_are_worded_by_layers() -> None:
    three = build(SpeculativeConfig, THREE_TIER)
    assert plan_text(three, 10) == "draft [0, 2) → check [2, 5) → verify [5, 10), K=3 drafts, R=2 checks"
    assert plan_text(plans_of(three, {})["two_tier"], 10) == "draft [0, 2) → verify [2, 10), K=3 drafts"
    assert plan_text(None, 10) == "plain [0, 10)"


def test_rates_of_a_run_without_tokens_are_none() -> None:
    rates = Rates.of(FakeLLM("fake").stats(), None)
    assert (
        rates.draft_kept is rates.mean_accepted_len is rates.layer_passes_per_token is None
        and not rates.at_floor
    )


@pytest.mark.parametrize(
    ("plan", "words", "absent"),
    [
        ({"draft": {"layer": 4}, "check": {"layer": 15}}, "layer 4 and 15, are untrained", "lookup"),
        (
            {"draft": {"kind": "adapter", "layer": 6}},
            "trained exits, here at layer 6, do not fit",
            "untrained",
        ),
        (
            {"draft": {"kind": "adapter", "layer": 6}, "check": {"layer": 15}},
            "layer 15, are untrained",
            "layer 6",
        ),
        ({"draft": {"kind": "ngram"}}, "Prompt lookup rarely matches", "trained"),
        ({"draft": {"kind": "model", "path": "small"}}, "draft model 'small' rarely agrees", "trained"),
        ({"draft": {"kind": "ngram"}, "control": "goodput"}, "No plan that control tried", "trained"),
    ],
)
def test_low_acceptance_is_worded_by_drafter_and_needs_many_drafts(
    plan: dict[str, Any], words: str, absent: str
) -> None:
    speculative = build(SpeculativeConfig, plan)
    stats = FakeLLM("fake").stats() | {"tokens": 9}
    warning = floor_warning(Rates.of(stats | {"drafted": 200, "draft_kept": 9}, speculative), speculative)
    assert warning is not None and words in warning and absent not in warning
    for counts in ({"drafted": 199, "draft_kept": 0}, {"drafted": 200, "draft_kept": 10}):
        assert floor_warning(Rates.of(stats | counts, speculative), speculative) is None


def test_bad_rows_are_an_error_that_names_all_of_them(tmp_path: Path) -> None:
    job = make_job(tmp_path, [{"prompt": "a"}, {"promt": "b"}, {}])
    with pytest.raises(ConfigError, match=r"(?s)line 2: .*line 3: "):
        run_bench(job, options(), progress=False)
    assert not FakeLLM.instances


@pytest.mark.parametrize(
    "values", [{"repeats": 0}, {"batch_size": 0}, {"max_tokens": -1}, {"context": 0}, {"repeat": 2}]
)
def test_options_out_of_range_are_errors(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        build(BenchOptions, values)


def test_the_table_has_no_column_of_intervals_that_are_not_there_and_counts_in_english(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(**fields: Any) -> str:
        job = make_job(tmp_path, [{"prompt": "a b"}, {"prompt": "c"}][: fields.pop("rows", 2)])
        print_bench(run_bench(job, options(transformers=False, **fields), progress=False))
        return capsys.readouterr().out

    assert "95 %" not in printed() and "95 %" in printed(batch_size=1)
    one = printed(rows=1, repeats=1, batch_size=1)
    assert (
        "95 %" not in one
        and "1 prompt of 3 tokens" in one
        and one.splitlines()[0].endswith(" 1 interleaved repeat")
    )


def test_what_others_took_while_it_ran_is_in_the_result_and_said_if_it_is_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "watch_others", lambda: lambda: 1.2)
    monkeypatch.setattr(
        bench,
        "environment",
        lambda device: environment(device) | {"cores": 2, "machine_cores": 2, "load": 0.1},
    )
    result = run_bench(make_job(tmp_path), options(transformers=False), progress=False)
    assert result["environment"]["others"] == 1.2
    print_bench(result)
    said = "Other programs were running meanwhile (1.2 of 2 cores): do not rely on these speeds."
    assert said in capsys.readouterr().out


def test_the_table_has_a_line_per_engine_and_says_when_acceptance_is_at_its_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_bench(make_job(tmp_path), options(), progress=False)
    print_bench(result)
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in ("transformers", "plain", "two-tier", "three-tier"))
    assert "5/6" in printed and "50.0%" in printed and "docs/jobs.md" not in printed
    result["acceptance"]["two_tier"]["draft_kept"] = 0.01
    result["environment"] |= {"cores": 2, "machine_cores": 2, "load": 1.5}
    print_bench(result | {"row_invariant": False})
    printed = capsys.readouterr().out
    assert "docs/jobs.md" in printed and "bit-identical" in printed and "load 1.5" in printed


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose generation config samples and penalises: none of that may reach a greedy
    benchmark."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, eos_token_id=[3, 5]
    )
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return str(folder)


def test_the_baseline_is_greedy_for_each_prompt_alone_and_ends_with_eos(tiny_llama: str) -> None:
    def baseline(ignore_eos: bool) -> TransformersBaseline:
        return TransformersBaseline(
            tiny_llama, dtype="float32", device="cpu", batch_size=3, max_tokens=20, ignore_eos=ignore_eos
        )

    prompts = [[7], [1, 2, 9, 4], [8, 8], [30, 2, 6, 7, 11], [12, 13, 0]]
    full = baseline(ignore_eos=True).generate(prompts)
    assert [len(output) for output in full] == [20] * 5
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, full, strict=True):
        ids = list(prompt)
        for _ in range(20):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == output
    assert any({3, 5} & set(output[:-1]) for output in full), (
        "no EOS inside any output: the rest of this test would prove nothing"
    )
    for output, cut in zip(full, baseline(ignore_eos=False).generate(prompts), strict=True):
        end = next((at for at, token in enumerate(output, start=1) if token in (3, 5)), 20)
        assert cut == output[:end]


def test_what_torchao_logs_when_transformers_imports_it_is_not_shown_and_other_warnings_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import_module(hf_baseline.IMPORTS_TORCHAO)
    assert find_spec("torchao") is None or "torchao" in sys.modules
    log = logging.getLogger("torchao").warning
    monkeypatch.setattr(hf_baseline, "import_module", lambda name: log("imported %s", name))

    def from_pretrained(path: str, dtype: str) -> str:
        log("used")
        return path

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    assert hf_baseline._load("a", "float32") == "a"
    assert [record.getMessage() for record in caplog.records] == ["used"]


def test_a_model_that_transformers_cannot_load_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-transformers"):
        TransformersBaseline(
            str(tmp_path), dtype="float32", device="cpu", batch_size=1, max_tokens=1, ignore_eos=False
        )
