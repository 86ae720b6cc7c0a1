"""How much memory may be used, of the host's and of a container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hispec.utils import memory


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a container's limits, of which there are none yet."""
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    monkeypatch.setattr(memory, "_free_of_host", lambda: 10_000)
    (tmp_path / "memory").mkdir()
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text + "\n")


def test_without_a_limit_it_is_what_the_host_has(group: Path) -> None:
    assert memory.free_memory_bytes() == 10_000
    write(group, max="max", current="300", stat="inactive_file 20\nactive_file 0")
    assert memory.free_memory_bytes() == 10_000


def test_a_container_has_what_it_does_not_use_and_cached_files_take(group: Path) -> None:
    write(group, max="4000", current="1500", stat="anon 900\nfile 600\ninactive_file 200\nactive_file 400")
    assert memory.free_memory_bytes() == 3100
    write(group, max="1000000")
    assert memory.free_memory_bytes() == 10_000
    write(group, max="900")
    assert memory.free_memory_bytes() == 0


def test_the_older_version_of_limits_counts_as_well(group: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 60\ntotal_active_file 40"
    write(group / "memory", limit_in_bytes="5000", usage_in_bytes="1000", stat=stat)
    assert memory.free_memory_bytes() == 4100
    write(group / "memory", limit_in_bytes="9223372036854771712")
    assert memory.free_memory_bytes() == 10_000


def test_the_host_has_some() -> None:
    assert memory._free_of_host() > 1 << 20
