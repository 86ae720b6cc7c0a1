"""Files that anyone may have written: whatever is in them, they are read or refused, with a reason in one
line that names them; never with another error, never for long, and nothing of them is run."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ee_models.checkpoint.described import sha256
from ee_models.checkpoint.ee_package import save_package
from ee_models.checkpoint.exit_files import ExitInfo, ExitsFile
from ee_models.checkpoint.loader import CheckpointError, load_tokenizer, open_checkpoint
from ee_models.checkpoint.low_rank import LowRank
from ee_models.checkpoint.weights import INDEX_FILE
from ee_models.decoder import Decoder
from hispec import ConfigError
from hispec.jobs.load import load_job
from hispec.loading.ee_packages import package_checkpoint
from tests.helpers.adapters import make_exits
from tests.helpers.sweeps import sweep
from tests.helpers.tiny import tiny_checkpoint, tiny_tokenizer
from tests.helpers.tiny_gguf import BYTE_LEVEL, write_gguf

MOST = int(os.environ.get("FUZZ", 1))  # times as many examples; more than 1: others each time


def examples(count: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count * MOST, deadline=None, suppress_health_check=checks, derandomize=MOST == 1
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", num_layers=2, hidden=16, vocab=260)
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "m"
    return tiny_checkpoint(folder, num_layers=2, hidden=16, vocab=260, max_shard_size="8KB")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tokenizer=BYTE_LEVEL)
    return path


def copied(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


def read_or_refuse(path: Path) -> str | None:
    """What a model is refused for, None if it is read whole, its weights and tokenizer with it."""
    try:
        checkpoint = open_checkpoint(path)
        Decoder.load(checkpoint, torch.float32, torch.device("cpu"), max_positions=64)
        load_tokenizer(checkpoint)
    except CheckpointError as error:
        assert_clear(str(error), path)
        return str(error)
    return None


def assert_clear(message: str, path: Path) -> None:
    assert "\n" not in message and len(message) < 2000, message
    assert str(path) in message, message
    message.encode()  # so that it can be printed


# Values of every type and size.
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 10**30, -(2**63), 1e308, -1e308, 0.5, 1e-320])
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "silu", "gelu", "float32", "\ud800", "\0", "../x", "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def fields_of(path: Path) -> list[str]:
    return sorted(json.loads(path.read_text()))


EXTRA = [
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "auto_map",
    "num_experts",
]


@examples(120)
@given(data=st.data())
def test_a_config_may_hold_anything(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copied(model, tmp_path)
    name = data.draw(
        st.sampled_from(["config.json", "config.json", "generation_config.json", "tokenizer_config.json"])
    )
    values = json.loads((folder / name).read_text())
    for field in data.draw(
        st.lists(st.sampled_from([*fields_of(folder / name), *EXTRA]), min_size=1, max_size=2)
    ):
        if data.draw(st.booleans()):
            values[field] = data.draw(VALUES)
        else:
            values.pop(field, None)
    (folder / name).write_text(json.dumps(values))
    read_or_refuse(folder)


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """With bytes or bits changed, a piece cut out or put in, or its end cut off; mostly near its start."""
    out = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, min(len(out), 600) - 1)) | st.integers(0, max(0, len(out) - 1)))
        kind = data.draw(st.sampled_from(["flip", "set", "cut off", "cut out", "put in", "number"]))
        if kind == "flip" and out:
            out[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set" and out:
            out[at] = data.draw(st.integers(0, 255))
        elif kind == "cut off":
            del out[at:]
        elif kind == "cut out":
            del out[at : at + data.draw(st.integers(1, 40))]
        elif kind == "put in":
            out[at:at] = data.draw(st.binary(max_size=20))
        elif kind == "number":
            number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]))
            out[at : at + 8] = struct.pack("<Q", number)
    return bytes(out)


@examples(150)
@given(data=st.data())
def test_safetensors_may_be_damaged_anywhere(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copied(model, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(damaged(weights.read_bytes(), data))
    read_or_refuse(folder)


@examples(100)
@given(data=st.data())
def test_an_index_may_say_anything(sharded: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copied(sharded, tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    places = [
        "../m/model.safetensors",
        "/etc/passwd",
        "..",
        "",
        ".",
        "x.safetensors",
        "a\0.safetensors",
        "~/x.safetensors",
    ]
    places += [
        "model.safetensors.index.json",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        "C:\\x.safetensors",
    ]
    name = data.draw(st.sampled_from(sorted(index["weight_map"])))
    kind = data.draw(st.sampled_from(["file", "names", "map", "bytes"]))
    if kind == "file":
        index["weight_map"][name] = data.draw(st.sampled_from(places) | VALUES)
    elif kind == "names":
        index["weight_map"][data.draw(st.text(max_size=5))] = index["weight_map"].pop(name)
    elif kind == "map":
        index["weight_map"] = data.draw(VALUES)
    text = json.dumps(index).encode()
    (folder / INDEX_FILE).write_bytes(damaged(text, data) if kind == "bytes" else text)
    read_or_refuse(folder)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "a\0.safetensors", "\ud800.safetensors", "/x"])
def test_an_index_may_name_what_no_system_takes(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = copied(sharded, tmp_path)
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert "model.safetensors.index.json" in str(read_or_refuse(folder))


@pytest.mark.parametrize(
    "field", ["model_type", "hidden_act", "num_experts", "attention_bias", "eos_token_id"]
)
def test_a_refusal_repeats_no_more_than_the_beginning_of_a_value(
    model: Path, tmp_path: Path, field: str
) -> None:
    folder = copied(model, tmp_path)
    (folder / "generation_config.json").unlink()
    fields = json.loads((folder / "config.json").read_text()) | {field: "line\n" * 1000}
    (folder / "config.json").write_text(json.dumps(fields))
    assert field in str(read_or_refuse(folder))


@examples(60)
@given(data=st.data())
def test_tokenizer_files_may_be_damaged_anywhere(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copied(model, tmp_path)
    file = folder / data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    file.write_bytes(damaged(file.read_bytes(), data))
    read_or_refuse(folder)


@examples(200)
@given(data=st.data())
def test_a_gguf_file_may_be_damaged_anywhere(gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged(gguf.read_bytes(), data))
    read_or_refuse(path)


NUMBERS = [0, 1, 2**31, 2**60, 2**63, 2**64 - 1]


@pytest.mark.parametrize(
    ("number", "step"),
    [
        *((number, 20) for number in NUMBERS),
        *(pytest.param(each, 1, marks=pytest.mark.slow) for each in NUMBERS),
    ],
)
def test_any_number_of_a_ggufs_header_may_be_any(gguf: Path, tmp_path: Path, number: int, step: int) -> None:
    """Of its counts, of its fields, and of what it says of tensors: lengths, types, sizes and places."""
    content, path = gguf.read_bytes(), tmp_path / "damaged.gguf"
    tensors = content.index(b"token_embd.weight") - 8
    for at in [*range(4, 24, 4), *range(24, 500, step), *range(tensors, tensors + 160, step)]:
        path.write_bytes(content[:at] + struct.pack("<Q", number) + content[at + 8 :])
        read_or_refuse(path)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_gguf_may_end_anywhere_in_its_header(gguf: Path, tmp_path: Path, step: int) -> None:
    content, path = gguf.read_bytes(), tmp_path / "cut.gguf"
    for end in [*range(0, 64, 4), *range(64, content.index(b"blk.1.attn_k") + 100, step)]:
        path.write_bytes(content[:end])
        assert read_or_refuse(path) is not None, end


# ---- exits and packages ----


@pytest.fixture(scope="module")
def exits(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    infos = [ExitInfo(layer=1, intermediate_size=32, vocabulary_size=60)]
    return make_exits(tmp_path_factory.mktemp("exits") / "e", open_checkpoint(model), infos).folder


@pytest.fixture(scope="module")
def package(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "p"
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj.weight"
    change = {name: LowRank(torch.ones(2, 16), torch.ones(16, 2), 0.5)}
    about: dict[str, Any] = {"recipe": {}, "data": {}, "held_out": {"loss": 1.0}}
    save_package(folder, str(model), open_checkpoint(model), change, **about)
    return folder


def with_checksum(folder: Path, info: str, tensors: str) -> None:
    """As whoever has made the files would have it."""
    with suppress(ValueError, TypeError):
        about = json.loads((folder / info).read_text())
        about["tensors_sha256"] = sha256(folder / tensors)
        (folder / info).write_text(json.dumps(about))


def damage_description(folder: Path, info: str, data: st.DataObject) -> None:
    about = json.loads((folder / info).read_text())
    place = data.draw(st.sampled_from([about, about["base_model"], *about.get("exits", [])]))
    place[data.draw(st.sampled_from([*sorted(place), "other"]))] = data.draw(VALUES)
    (folder / info).write_text(json.dumps(about))


@examples(120)
@given(data=st.data())
def test_exits_may_be_damaged_anywhere(model: Path, exits: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copied(exits, tmp_path)
    tensors, info = folder / "exits.safetensors", folder / "exits.json"
    kind = data.draw(st.sampled_from(["tensors", "values", "text"]))
    if kind == "tensors":
        tensors.write_bytes(damaged(tensors.read_bytes(), data))
        with_checksum(folder, "exits.json", "exits.safetensors")
    elif kind == "values":
        damage_description(folder, "exits.json", data)
    else:
        info.write_bytes(damaged(info.read_bytes(), data))
    checkpoint = open_checkpoint(model)
    try:
        file = ExitsFile(folder)
        file.check_model(checkpoint)
        for layer in file.layers:
            file.tensors(file.info(layer), checkpoint.config)
    except CheckpointError as error:
        assert_clear(str(error), folder)


@examples(80)
@given(data=st.data())
def test_a_package_may_be_damaged_anywhere_and_leaves_no_half_checkpoint(
    model: Path, package: Path, tmp_path: Path, data: st.DataObject
) -> None:
    folder = copied(package, tmp_path)
    tensors, info = folder / "lora.safetensors", folder / "ee.json"
    kind = data.draw(st.sampled_from(["tensors", "values", "text"]))
    if kind == "tensors":
        tensors.write_bytes(damaged(tensors.read_bytes(), data))
        with_checksum(folder, "ee.json", "lora.safetensors")
    elif kind == "values":
        damage_description(folder, "ee.json", data)
    else:
        info.write_bytes(damaged(info.read_bytes(), data))
    cache = tmp_path / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HISPEC_CACHE", str(cache))
        try:
            made = package_checkpoint(folder, lambda name: str(model))
        except CheckpointError as error:
            assert_clear(str(error), folder)
            models = cache / "models"
            assert not models.exists() or all(name.suffix == ".lock" for name in models.iterdir())
        else:
            assert open_checkpoint(made).config == open_checkpoint(model).config


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()]
)
@pytest.mark.parametrize("at", range(1, 7))
def test_a_package_that_fails_halfway_is_made_anew(
    model: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int
) -> None:
    import huggingface_hub

    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    calls = 0

    def failing(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise error
            return right(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            (shutil, "copyfile"),
            (huggingface_hub, "save_torch_state_dict"),
            (os, "replace"),
        ):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        try:
            package_checkpoint(package, lambda name: str(model))
        except (KeyboardInterrupt, MemoryError, CheckpointError):
            assert all(name.suffix == ".lock" for name in (tmp_path / "models").iterdir())
        else:
            assert calls < at
    assert open_checkpoint(package_checkpoint(package, lambda name: str(model))).has("model.norm.weight")


# ---- pickles and code ----


class Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self._target,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.safetensors", "m.gguf"]
)
@pytest.mark.parametrize("kept", ["config", "weights too"])
def test_no_pickle_is_opened(model: Path, tmp_path: Path, name: str, kept: str) -> None:
    folder, fired = copied(model, tmp_path), tmp_path / "fired"
    if kept == "config":
        (folder / "model.safetensors").unlink()
    with (folder / name).open("wb") as file:
        pickle.dump(Bomb(fired), file)
    message = read_or_refuse(folder)
    assert not fired.exists() and (message is None) == (kept != "config" and name != "model.safetensors")
    assert read_or_refuse(folder / name) is not None and not fired.exists()
    pickle.loads((folder / name).read_bytes())  # which it would have done
    assert fired.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "value", [{"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}, "own.Own", [1]]
)
def test_no_code_of_a_checkpoint_is_run(model: Path, tmp_path: Path, file: str, value: Any) -> None:
    folder, fired = copied(model, tmp_path), tmp_path / "fired"
    (folder / "own.py").write_text(f"open({str(fired)!r}, 'w')\nclass Own: pass\n")
    for name in ("config.json", file):
        fields = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(fields | {"auto_map": value, "tokenizer_class": "Own"}))
    read_or_refuse(folder)
    assert not fired.exists()


# ---- YAML ----

JOB = "model: m\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n"
PIECES = [
    *(
        "model: m\n",
        "input: ",
        "{path: x}",
        "[",
        "]",
        "{",
        "}",
        ": ",
        ", ",
        "\n",
        "  ",
        "- ",
        "? ",
        "| \n",
        "> \n",
    ),
    *(
        "&a ",
        "*a",
        "<<: ",
        "!!python/object/apply:os.system ",
        "!x ",
        "!!binary ",
        "%TAG ! x\n",
        "---\n",
        "...\n",
    ),
    *(
        '"\\ud800"',
        "\ufeff",
        "\u2028",
        "\x85",
        "\0",
        "\x07",
        "\U0001f600",
        "é",
        "'",
        '"',
        "#",
        "`",
        "@",
        "\t",
    ),
    *(
        "1e999",
        ".inf",
        ".nan",
        "9" * 400,
        "-9" + "9" * 5000,
        "0x10",
        "1_000",
        "~",
        "true",
        "sampling: ",
        "seed: ",
    ),
]


@examples(250)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12), begins=st.booleans())
def test_yaml_may_hold_anything(tmp_path: Path, pieces: list[str], begins: bool) -> None:
    path = tmp_path / "job.yaml"
    text = (JOB if begins else "") + "".join(pieces)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_job(path)
    except ConfigError as error:
        assert str(path) in str(error) and len(str(error)) < 3000


@sweep(
    "opening, count",
    itertools.product(
        ["[", "{a: ", "- ", "? ", "a:\n ", "&a [", "!x ", "{? [", "'", "> \n", "[[]", "- - "],
        [100, 30_000, 1000],
    ),
    2,
)
def test_yaml_may_be_nested_as_deeply_as_it_likes(tmp_path: Path, opening: str, count: int) -> None:
    path = tmp_path / "job.yaml"
    for text in (opening * count, JOB + "sampling: " + opening * count):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"job\.yaml"):
            load_job(path)
