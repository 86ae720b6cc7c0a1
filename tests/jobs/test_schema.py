"""A job's YAML file: what is accepted, and what every problem is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hispec.errors import ConfigError
from hispec.jobs.load import apply_overrides, load_job, load_preset, read_yaml
from hispec.jobs.schema import Job
from hispec.simulate.run import load_simulation
from hispec.training.schema import load_training

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = "model: m\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n"


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_input_path_is_relative_to_the_job_file_and_output_path_to_the_working_directory(
    tmp_path: Path,
) -> None:
    job = load_job(write_yaml(tmp_path, MINIMAL))
    assert job.input.path == tmp_path / "in.jsonl"
    assert job.output.path == Path("out.jsonl")
    assert load_job(tmp_path / "job.yaml", ["input.path=other.jsonl"]).input.path == Path("other.jsonl")


def test_folders_of_a_plan_are_relative_to_the_job_file(tmp_path: Path) -> None:
    plan = (
        "speculative: {draft: {kind: hybrid, layer: 4, path: exits, ngram: {guess_confidence: 0.2,"
        " guess_path: ngrams}}, check: {kind: adapter, layer: 7, path: ../exits}}\n"
    )
    speculative = load_job(write_yaml(tmp_path, MINIMAL + plan)).speculative
    assert speculative is not None and speculative.check is not None and speculative.draft.ngram is not None
    found = speculative.draft.path, speculative.draft.ngram.guess_path, speculative.check.path
    assert found == tuple(str(tmp_path / name) for name in ("exits", "ngrams", "../exits"))
    plan = "speculative: {control: goodput, draft: {layer: 4}, goodput: {latency: latency.json}}\n"
    speculative = load_job(write_yaml(tmp_path, MINIMAL + plan)).speculative
    assert speculative is not None and speculative.goodput.latency == str(tmp_path / "latency.json")


def test_a_home_of_nobody_is_no_path_of_a_job(tmp_path: Path) -> None:
    nowhere = "~there-is-no-such-user"
    text = MINIMAL.replace("in.jsonl", f"{nowhere}/in.jsonl").replace("out.jsonl", f"{nowhere}/out.jsonl")
    plan = f"speculative: {{draft: {{kind: adapter, layer: 4, path: {nowhere}/exits}}}}\n"
    with pytest.raises(ConfigError) as caught:
        load_job(write_yaml(tmp_path, text + plan))
    for setting, name in (("input.path", "in.jsonl"), ("output.path", "out.jsonl")):
        assert f"{setting}: '{nowhere}/{name}' is in the home folder of nobody here" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_every_problem_of_a_job_is_named_at_once(tmp_path: Path) -> None:
    path = write_yaml(
        tmp_path,
        MINIMAL
        + "engin: {}\nengine: {blocksize: 4, max_num_seqs: 0}\nsampling: {top_p: 0.0, temperature: .nan}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_job(path, ["sampling.n=many"])
    message = str(caught.value)
    for part in (
        "engin: unknown setting (did you mean 'engine'?)",
        "engine.blocksize: unknown setting (did you mean 'block_size'?)",
        "engine.max_num_seqs: must be at least 1, got 0",
        "sampling.top_p: must be above 0, got 0.0",
        "sampling.temperature: must be a finite number, got nan",
        "sampling.n: must be an integer, got 'many'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: a\nmodel: b\n", "line 2, column 1: key 'model' is given twice, first in line 1"),
        ("model: [1\ninput: 2", "line 2"),
        ("\tmodel: a", "line 1, column 1"),
        ("", "got nothing"),
        ("- model", "got a list"),
        ("? [a]\n: 1", "a key must be a plain name"),
        ("model: !!python/object:os.system x", "tags such as !!python/object:os.system are not read"),
        ("on: 1\n", "on: unknown setting"),
        ("model: 3\n", "model: must be a string, got 3"),
        ("input: {path: ''}\n", "input.path: must name a file, got ''"),
        ("sampling: {seed: " + "9" * 5000 + "}", "not readable as YAML"),
        ("output: {path: x, overwrite: true, resume: true}", "contradict"),
        ("speculative: {draft: {layer: 4}, check: {layer: 4}}", "check.layer=4 must lie above draft.layer=4"),
    ],
)
def test_bad_yaml_gets_a_clear_error(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_yaml(tmp_path, text))
    assert part in str(caught.value)


def test_a_job_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_job(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("config", "load", "command"),
    [
        ("train_smollm2.yaml", load_job, "train"),
        ("simulate_laps.yaml", load_job, "simulate"),
        ("quickstart.yaml", load_training, "run"),
        ("train_smollm2_ee.yaml", load_simulation, "train"),
    ],
)
def test_a_file_for_another_command_is_told_by_it(
    config: str, load: Callable[..., Any], command: str
) -> None:
    path = CONFIGS / config
    with pytest.raises(ConfigError) as caught:
        load(path, [])
    assert str(caught.value) == f"{path}: these are settings for another command: hispec {command} {path}"


def test_a_preset_or_a_file_of_rows_in_a_jobs_place_is_told_how_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a preset, put over a job's by --preset \S*smollm2\.yaml$"):
        load_job(CONFIGS / "smollm2.yaml")
    for name in ("prompts.jsonl", "prompts.PARQUET", "prompts.jsonl.gz"):
        with pytest.raises(ConfigError, match=r"a file of rows, not of settings; .* --set input\.path="):
            load_job(tmp_path / name)
    with pytest.raises(ConfigError, match=r"so it is a job \(hispec run .*\), where a preset is needed"):
        load_preset(CONFIGS / "quickstart.yaml")
    with pytest.raises(ConfigError) as caught:  # one slip makes no file of another command
        load_job(write_yaml(tmp_path, MINIMAL + "data: {}\n"))
    assert "data: unknown setting; known here" in str(caught.value) and "--preset" not in str(caught.value)


def test_scalars_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    job = load_job(
        write_yaml(tmp_path, MINIMAL),
        [
            "sampling.temperature=1e-3",
            "sampling.seed=017",
            "sampling.stop=12:30",
            "sampling.logit_bias={12: 3}",
        ],
    )
    assert (job.sampling.temperature, job.sampling.seed, job.sampling.stop, job.sampling.logit_bias) == (
        1e-3,
        17,
        ["12:30"],
        {12: 3},
    )


def test_overrides_reach_nested_settings_in_order() -> None:
    values: dict[str, Any] = {"speculative": None}
    apply_overrides(
        values,
        ["speculative.draft.layer=2", "speculative.draft.layer=3", "speculative.check=null", "model=a=b"],
    )
    assert values == {"speculative": {"draft": {"layer": 3}, "check": None}, "model": "a=b"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        *((name, name) for name in ("-", "*.jsonl", "[ab].jsonl", "a.jsonl", "7", "true", "@a", "%b")),
        *((name, name) for name in ("a # b", "#x")),
        *[("[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]), ("null", None), ("'null'", "null")],
    ],
)
def test_an_override_of_a_path_is_taken_as_it_stands(text: str, read: Any) -> None:
    values: dict[str, Any] = {}
    apply_overrides(values, [f"input.path={text}"])
    assert values == {"input": {"path": read}}
    apply_overrides(values, ["latency={path: a.json}"])  # of a simulation, where it is no path
    assert values["latency"] == {"path": "a.json"}
    with pytest.raises(ConfigError, match="scanning an alias"):
        apply_overrides(values, ["input.path=[*.jsonl, b.jsonl]"])


@pytest.mark.parametrize("override", ["model", "=3", "a..b=3", "model.x=3", "model=[1"])
def test_a_malformed_override_is_named(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"model": "m"}, [override])
    assert repr(override) in str(caught.value)


def test_compare_plain_needs_something_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.compare_plain=true has nothing to compare"):
        load_job(write_yaml(tmp_path, MINIMAL), ["output.compare_plain=true"])


@pytest.mark.parametrize("name", ["example_job.yaml", "quickstart.yaml"])
def test_configs_have_every_field_and_load(name: str) -> None:
    load_job(CONFIGS / name)
    values = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    full = Job.model_validate(
        values | {"input": {"path": Path("i")}, "output": {"path": Path("o")}}
    ).model_dump()
    assert values["input"].keys() == full["input"].keys() and values["output"].keys() == full["output"].keys()

    def keys(tree: Any, at: str = "") -> set[str]:
        return (
            {at}
            if not isinstance(tree, dict) or not tree
            else set().union(*(keys(item, f"{at}.{key}") for key, item in tree.items()))
        )

    for section in ("engine", "speculative", "sampling"):
        assert keys(values[section]) == keys(full[section])
    assert values.keys() == full.keys()


def laughs(levels: int) -> str:
    """A list of ten strings, then lists of ten aliases of the one before."""
    anchors = ["a0: &a0 [" + ", ".join(["x"] * 10) + "]"]
    anchors += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, levels)]
    return "\n".join(anchors) + "\n"


@pytest.mark.parametrize("levels", [4, 5, 6, 9])
def test_aliases_that_stand_for_more_than_a_file_holds_are_refused_unexpanded(
    tmp_path: Path, levels: int
) -> None:
    text = MINIMAL + laughs(levels) + f"sampling: {{stop: *a{levels - 1}}}\n"
    for load in (load_job, load_preset, load_training, lambda path: load_simulation(path, [])):
        with pytest.raises(ConfigError, match=r"job\.yaml, line 7, .*: \*a2: .* 10,000 values") as caught:
            load(write_yaml(tmp_path, text))
        assert len(str(caught.value)) < 300


def test_an_anchor_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 4, column 29: \*a stands inside of what it names"):
        load_job(write_yaml(tmp_path, MINIMAL + "sampling: {stop: &a [x, [y, *a]]}"))


def test_aliases_are_as_if_written_out(tmp_path: Path) -> None:
    text = "draft: &exit {kind: adapter, layer: 4}\nother: *exit\nmerged: {<<: *exit, layer: 5}\n"
    path = write_yaml(tmp_path, text)
    values = read_yaml(path, Job)
    apply_overrides(values, ["other.layer=6"])
    layers = {name: value["layer"] for name, value in values.items()}
    assert layers == {"draft": 4, "other": 6, "merged": 5}


def test_an_error_names_the_override_that_caused_it_and_no_other(tmp_path: Path) -> None:
    overrides = ["engine.seed=3", "sampling.top_p=7", "sampling.top_k=2", "model=3", "model=m2"]
    with pytest.raises(ConfigError) as caught:
        load_job(write_yaml(tmp_path, MINIMAL + "engine: {block_size: 0}\n"), overrides)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/job.yaml:",
        "engine.block_size: must be at least 1, got 0",
        "sampling.top_p: must be at most 1, got 7 (--set sampling.top_p=7)",
    ]
    with pytest.raises(ConfigError, match=r"contradict .* \(--set output\.resume=true\)$"):
        load_job(
            write_yaml(tmp_path, MINIMAL.replace("out.jsonl", "out.jsonl, overwrite: true")),
            ["output.resume=true", "engine.seed=3"],
        )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: !!bool maybe", "line 1, column 8: tags such as !!bool are not read"),
        ("model: !!timestamp now", "tags such as !!timestamp"),
        ("model: !mine [1]", "tags such as !mine"),
        ("model: !!map [1]", "tags such as !!map"),
        ("--- {model: a}\n--- {model: b}", "line 2, column 1: expected a single document in the stream, but"),
        ("model: [&a x, &a y]", "found duplicate anchor 'a'; first occurrence, second occurrence"),
        ('model: "\\ud800"', "model: must be text without halves of surrogate pairs"),
        (f"output: {{path: a/{'x' * 256}}}", "output.path: must name a file, got 'a/xxx"),
        (f"output: {{path: {'é' * 128}}}", "output.path: must name a file, got 'ééé"),
        ("model: \0", "not readable as YAML"),
        ("[" * 5000, "not readable as YAML"),
    ],
)
def test_odd_yaml_gets_a_clear_error(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write_yaml(tmp_path, text))
    assert part in str(caught.value) and len(str(caught.value)) < 400


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_job(path).model == "m"
