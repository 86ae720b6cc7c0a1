"""Settings: what is refused, and that the error names the field, the value and the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from hispec.config import PLAIN, CheckConfig, EngineConfig, Plan, Settings, SpeculativeConfig
from hispec.errors import ConfigError, HiSpecError, build, shown
from hispec.sampling_params import SamplingParams
from hispec.simulate.config import SimulationConfig

NAN, INF = math.nan, math.inf
DRAFT = {"layer": 4}


def refusal(model: type[Settings], values: Any, where: str = "at") -> str:
    """The message of the error that `values` give."""
    with pytest.raises(ConfigError) as caught:
        build(model, values, where)
    return str(caught.value)


# field, bad value, what the message must hold besides both
SAMPLING: list[tuple[str, Any, str]] = [
    ("n", 0, "at least 1"),
    ("n", 129, "at most 128"),
    ("n", 1.0, "integer"),
    ("n", True, "integer"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", 100.5, "at most 100"),
    ("temperature", NAN, "finite"),
    ("temperature", INF, "finite"),
    ("temperature", "1.0", "number"),
    ("temperature", None, "number"),
    ("top_k", -1, "at least 0"),
    ("top_k", 1.5, "integer"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "at most 1"),
    ("top_p", NAN, "finite"),
    ("min_p", -0.01, "at least 0"),
    ("min_p", 1.01, "at most 1"),
    ("repetition_penalty", 0.0, "above 0"),
    ("repetition_penalty", -1.0, "above 0"),
    ("repetition_penalty", 101.0, "at most 100"),
    ("repetition_penalty", 1e-40, "too close to 0: use at least 1e-5"),
    ("temperature", 1e-7, "too close to 0: use 0 for greedy, or at least 1e-5"),
    ("presence_penalty", 2.1, "at most 2"),
    ("presence_penalty", -2.1, "at least -2"),
    ("frequency_penalty", 2.1, "at most 2"),
    ("frequency_penalty", -2.1, "at least -2"),
    ("frequency_penalty", NAN, "finite"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, f"below {2**63}"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("max_tokens", 5.0, "integer"),
    ("min_tokens", -1, "at least 0"),
    ("ignore_eos", "yes", "true or false"),
    ("ignore_eos", 1, "true or false"),
    ("logprobs", -1, "at least 0"),
    ("logprobs", 65, "at most 64"),
    ("tiers", "yes", "true or false"),
    ("tiers", 1, "true or false"),
    ("speculative", "no", "true or false"),
    ("stop", 7, "list"),
    ("stop_token_ids", 7, "list"),
    ("logit_bias", [1, 2], "mapping"),
]
SPECULATIVE: list[tuple[str, Any, str]] = [
    ("num_draft_tokens", 0, "at least 1"),
    ("num_draft_tokens", -3, "at least 1"),
    ("num_draft_tokens", 33, "at most 32"),
    ("num_draft_tokens", 2.0, "integer"),
    ("num_checks", 0, "at least 1"),
    ("num_checks", 17, "at most 16"),
    ("num_branches", 0, "at least 1"),
    ("num_branches", 17, "at most 16"),
    ("draft_confidence", 0.0, "above 0"),
    ("draft_confidence", 1.0, "below 1"),
    ("draft_confidence", NAN, "finite"),
    ("acceptance", "greedy", "'coupled' or 'rejection'"),
    ("control", "magic", "'fixed'"),
    ("draft", 4, "mapping"),
    ("check", 8, "mapping"),
]
ENGINE: list[tuple[str, Any, str]] = [
    ("dtype", "fp32", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ("dtype", None, "'auto'"),
    ("device", 0, "string"),
    ("max_num_seqs", 0, "at least 1"),
    ("max_num_seqs", 4097, "at most 4096"),
    ("max_model_len", 1, "at least 2"),
    ("block_size", 0, "at least 1"),
    ("block_size", 1025, "at most 1024"),
    ("num_kv_blocks", 0, "at least 1"),
    ("max_prefill_tokens", 0, "at least 1"),
    ("enable_prefix_caching", "true", "true or false"),
    ("attention", "flash", "'auto', 'sdpa', 'numba' or 'triton'"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, f"below {2**63}"),
    ("worker_timeout_s", 0.0, "at least 0.1"),
    ("worker_timeout_s", INF, "finite"),
    ("worker_timeout_s", None, "number"),
]


CHECK: list[tuple[str, Any, str]] = [
    ("confidence", 1.0, "below 1"),
    ("continue_confidence", 0.0, "above 0"),
    ("continue_confidence", 1.0, "below 1"),
    ("continue_confidence", NAN, "finite"),
    ("continue_confidence", "0.4", "number"),
]


@pytest.mark.parametrize(
    ("model", "others", "field", "value", "limit"),
    [
        *((SamplingParams, {}, *case) for case in SAMPLING),
        *((SpeculativeConfig, {"draft": DRAFT}, *case) for case in SPECULATIVE),
        *((CheckConfig, {"layer": 8}, *case) for case in CHECK),
        *((EngineConfig, {}, *case) for case in ENGINE),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_bad_value_is_refused_with_field_value_and_limit(
    model: type[Settings], others: dict[str, Any], field: str, value: Any, limit: str
) -> None:
    message = refusal(model, {**others, field: value})
    assert message.startswith(f"at.{field}: ")
    assert message.endswith(f"got {value!r}")
    assert limit in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (SamplingParams, {"min_tokens": 9, "max_tokens": 8}, "at: min_tokens=9 is above max_tokens=8"),
        (
            SamplingParams,
            {"min_tokens": 17},
            "at: min_tokens=17 is above max_tokens=16",
        ),  # the default counts too
        (SamplingParams, {"stop": [""]}, "at.stop.0: must not be empty, got ''"),
        (SamplingParams, {"stop": ["a", 3]}, "at.stop.1: must be a string, got 3"),
        (SamplingParams, {"stop": ""}, "at.stop.0: must not be empty, got ''"),
        (
            SamplingParams,
            {"stop_token_ids": [3, -1]},
            "at.stop_token_ids.1: must be at least 0, got -1",
        ),
        (
            SamplingParams,
            {"logit_bias": {7: 100.5}},
            "at.logit_bias.7: must be at most 100, got 100.5",
        ),
        (
            SamplingParams,
            {"logit_bias": {7: NAN}},
            "at.logit_bias.7: must be a finite number, got nan",
        ),
        (SpeculativeConfig, {}, "at.draft: required, but not given"),
        (
            SpeculativeConfig,
            {"draft": {}},
            "at.draft: kind='exit' needs layer: the layer after which it drafts",
        ),
        (
            SpeculativeConfig,
            {"draft": {"layer": 0}},
            "at.draft.layer: must be at least 1, got 0",
        ),
        (
            SpeculativeConfig,
            {"draft": {"layer": -2}},
            "at.draft.layer: must be at least 1, got -2",
        ),
        (
            SpeculativeConfig,
            {"draft": DRAFT, "check": {"layer": 1}},
            "at.check.layer: must be at least 2, got 1",
        ),
        (
            SpeculativeConfig,
            {"draft": DRAFT, "check": {"layer": 4}},
            (
                "at: check.layer=4 must lie above draft.layer=4: the check tier resumes where the draft tier"
                " stops"
            ),
        ),
        (
            SpeculativeConfig,
            {"draft": DRAFT, "check": {"layer": 3}},
            (
                "at: check.layer=3 must lie above draft.layer=4: the check tier resumes where the draft tier"
                " stops"
            ),
        ),
        (
            SpeculativeConfig,
            {"draft": {"layer": 4, "kind": "ngrams"}},
            "at.draft.kind: must be 'exit', 'adapter', 'ngram', 'hybrid' or 'model', got 'ngrams'",
        ),
        (SamplingParams, 5, "at: expected a mapping of settings, got int 5"),
        (SamplingParams, {1: 2}, "at.1: keys must be strings, got 1"),
        (SpeculativeConfig, {"draft": {**DRAFT, 1: 2}}, "at.draft.1: keys must be strings, got 1"),
        (EngineConfig, ["dtype"], "at: expected a mapping of settings, got list ['dtype']"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_words(
    model: type[Settings], values: Any, message: str
) -> None:
    assert refusal(model, values) == message


def test_logit_bias_refuses_what_is_not_a_token_id() -> None:
    for key in ("x", "-3", "1.5", "²", 2.5):
        message = refusal(SamplingParams, {"logit_bias": {key: 1.0}})
        assert message == f"at.logit_bias: each key must be an integer, got {key!r}"


@pytest.mark.parametrize(
    ("model", "values", "path", "meant"),
    [
        (SamplingParams, {"temprature": 1.0}, "at.temprature", "temperature"),
        (SamplingParams, {"max_new_tokens": 1}, "at.max_new_tokens", "max_tokens"),
        (SamplingParams, {"stop_tokens": []}, "at.stop_tokens", "stop_token_ids"),
        (EngineConfig, {"block_sizes": 16}, "at.block_sizes", "block_size"),
        (EngineConfig, {"max_seqs": 16}, "at.max_seqs", "max_num_seqs"),
        (SpeculativeConfig, {"draft": DRAFT, "num_check": 1}, "at.num_check", "num_checks"),
        (SpeculativeConfig, {"draft": {"layer": 1, "layr": 2}}, "at.draft.layr", "layer"),
        (SpeculativeConfig, {"draft": DRAFT, "check": {"layer": 5, "layers": 2}}, "at.check.layers", "layer"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    model: type[Settings], values: dict[str, Any], path: str, meant: str
) -> None:
    message = refusal(model, values)
    assert message.startswith(f"{path}: unknown setting (did you mean {meant!r}?); known here: ")
    assert meant in message.split("known here: ")[1].split(", ")


@pytest.mark.parametrize(
    ("values", "path", "meant"),
    [
        ({"num_checks": 2}, "at.check.num_checks", "'at.num_checks'"),
        ({"min_size": 2}, "at.check.min_size", "'at.draft.ngram.min_size'"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused_with_its_own(
    values: dict[str, Any], path: str, meant: str
) -> None:
    message = refusal(SpeculativeConfig, {"draft": DRAFT, "check": {"layer": 5} | values})
    assert message.startswith(f"{path}: unknown setting (did you mean {meant}?); known here: kind, layer,")


def test_a_place_below_a_name_of_the_users_is_not_guessed() -> None:
    values = {"policy": "fcfs", "latency": {"path": "p"}, "arrivals": {"rates": [1.0]}, "systems": {"a": {}}}
    message = refusal(SimulationConfig, values)
    assert "policy: unknown setting" in message and "scheduling.policy" not in message


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    message = refusal(EngineConfig, {"zzzzzz": 1})
    assert message.startswith("at.zzzzzz: unknown setting; known here: dtype, kv_cache_dtype, device, ")


def test_all_problems_are_named_in_one_error() -> None:
    message = refusal(SamplingParams, {"temperature": NAN, "top_p": 0.0, "top_k": -1, "topp": 1.0})
    assert [line.split(":")[0] for line in message.split("\n")] == [
        "at.temperature",
        "at.top_k",
        "at.top_p",
        "at.topp",
    ]


def test_a_message_repeats_only_the_beginning_of_values_and_a_few_problems() -> None:
    long = "x" * 10_000
    for values in ({"seed": long}, {long: 1}, {"stop": {long: long}}, {"stop": ["", *range(5_000)]}):
        message = refusal(SamplingParams, values)
        assert len(message) < 2_000 and ("got" in message or "unknown setting" in message)
    assert refusal(SamplingParams, {"stop": [0] * 5_000}).endswith("\n... and 4980 more problems")
    assert len(refusal(SpeculativeConfig, {"draft": {"kind": "ngram", "path": long}})) < 400
    assert len(refusal(SamplingParams, [long])) < 400


def test_an_error_is_a_value_error_and_ours() -> None:
    assert issubclass(ConfigError, HiSpecError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            SamplingParams,
            {"temperature": "hot"},
            "SamplingParams.temperature: must be a number, got 'hot'",
        ),
        (
            SamplingParams,
            {"top_p": 2},
            "SamplingParams.top_p: must be at most 1, got 2",
        ),
        (
            SamplingParams,
            {"min_tokens": 9, "max_tokens": 8},
            "SamplingParams: min_tokens=9 is above max_tokens=8",
        ),
        (
            SpeculativeConfig,
            {"draft": {"layer": 0}, "acceptance": 5},
            "SpeculativeConfig.draft.layer: must be at least 1, got 0\n"
            "SpeculativeConfig.acceptance: must be 'coupled' or 'rejection', got 5",
        ),
    ],
)
def test_a_class_called_with_bad_values_raises_our_error(
    model: type[Settings], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**values)
    assert str(caught.value) == message and caught.value.__suppress_context__
    with pytest.raises(ConfigError, match=r"unknown setting \(did you mean"):
        model(**{name + "s": 1 for name in list(model.model_fields)[:1]})


def test_a_long_value_is_cut_in_the_message() -> None:
    message = refusal(SamplingParams, {"temperature": "x" * 5000})
    assert "got 'xxx" in message and message.endswith("…") and len(message) < 300
    assert len(refusal(SamplingParams, ["x" * 5000])) < 300


def test_what_fits_is_taken_as_it_is() -> None:
    ready = SamplingParams(temperature=0.5)
    assert SamplingParams.of(ready) is ready
    assert SamplingParams.of(None) == SamplingParams()
    given = SamplingParams.of(
        {"temperature": 0, "stop": "end", "logit_bias": {"7": 1, 8: -2.5}, "max_tokens": None, "top_p": 1}
    )
    assert (given.temperature, given.stop, given.logit_bias, given.max_tokens) == (
        0.0,
        ["end"],
        {7: 1.0, 8: -2.5},
        None,
    )
    assert SamplingParams.of({"logit_bias": None}).logit_bias == {}
    assert build(SpeculativeConfig, {"draft": DRAFT}).check is None
    with pytest.raises(ConfigError, match=r"^sampling\.top_p: "):
        SamplingParams.of({"top_p": 2.0})


@pytest.mark.parametrize(
    "settings",
    [SamplingParams(), EngineConfig(), SpeculativeConfig(draft=DRAFT), SpeculativeConfig(draft=DRAFT).draft],
    ids=lambda s: type(s).__name__,
)
def test_settings_are_frozen(settings: Settings) -> None:
    for name in type(settings).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(settings, name, getattr(settings, name))


@pytest.mark.parametrize(
    ("field", "on"), [("repetition_penalty", 1.1), ("presence_penalty", -0.5), ("frequency_penalty", 0.5)]
)
def test_a_penalty_is_a_penalty_in_either_direction(field: str, on: float) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{field: on}).has_penalties


@pytest.mark.parametrize("num_layers", [9, 30])
def test_exits_must_lie_inside_the_model(num_layers: int) -> None:
    three_tiers = SpeculativeConfig(draft={"layer": num_layers - 2}, check={"layer": num_layers - 1})
    assert three_tiers.plan(num_layers) == Plan(num_layers - 2, num_layers - 1, 2, 2)
    with pytest.raises(ConfigError) as caught:
        three_tiers.plan(num_layers - 1)
    assert (
        str(caught.value)
        == f"speculative.check.layer={num_layers - 1} is not an early exit of a model of {num_layers - 1}"
        f" layers; choose 1 to {num_layers - 2}"
    )
    with pytest.raises(
        ConfigError, match=rf"speculative\.draft\.layer={num_layers - 2} is not an early exit"
    ):
        three_tiers.plan(num_layers - 2)


def test_a_plan_without_a_check_tier_has_one_cycle() -> None:
    assert SpeculativeConfig(draft=DRAFT, num_draft_tokens=5, num_checks=7).plan(30) == Plan(4, None, 5, 1)
    with pytest.raises(ConfigError, match="num_checks=2 needs a check tier"):
        Plan(4, None, 5, 2)
    with pytest.raises(ConfigError, match="a check tier needs num_draft_tokens >= 1"):
        Plan(4, 8, 0, 1)


@pytest.mark.parametrize(
    ("plan", "window", "top_layer", "is_plain"),
    [
        (PLAIN, 1, 0, True),
        (Plan(4, None, 5, 1), 6, 4, False),
        (Plan(4, 8, 2, 2), 6, 8, False),
        (Plan(4, 8, 3, 4), 16, 8, False),
    ],
)
def test_a_plan_knows_its_window_and_where_verify_resumes(
    plan: Plan, window: int, top_layer: int, is_plain: bool
) -> None:
    assert (plan.window, plan.top_layer, plan.is_plain) == (window, top_layer, is_plain)


def test_prefill_of_a_step_depends_on_the_device_unless_it_is_said() -> None:
    assert EngineConfig().prefill_tokens("cuda") > EngineConfig().prefill_tokens("cpu") >= 1
    said = EngineConfig(max_prefill_tokens=7)
    assert said.prefill_tokens("cuda") == said.prefill_tokens("cpu") == 7


def test_a_trace_may_lie_in_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert EngineConfig(trace="~/t.jsonl").trace == "/home/me/t.jsonl"
    assert EngineConfig(trace="t.jsonl").trace == "t.jsonl"
    with pytest.raises(ConfigError, match="home folder of nobody"):
        EngineConfig(trace="~nobody-of-that-name/t.jsonl")


def test_layers_of_goodput_are_exits_of_the_model() -> None:
    config = SpeculativeConfig(draft={"layer": 2}, control="goodput", goodput={"layers": [2, 12]})
    assert config.plan(13).draft_layer == 2
    with pytest.raises(
        ConfigError, match=r"speculative.goodput.layers=12 is not an early exit of a model of 12"
    ):
        config.plan(12)


def test_what_is_nested_too_deeply_is_told_in_words() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a list that is nested too deeply to be shown"
