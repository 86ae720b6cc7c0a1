"""A job's YAML file: what is accepted, and what every problem is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hispec.errors import ConfigError
from hispec.jobs.load import apply_overrides, load_job
from hispec.jobs.schema import Job

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
        ("model: !!python/object:os.system x", "could not determine a constructor"),
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
