"""Parts of the GPU benchmark as processes, what they need, and the settings that they try."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts import joined as gpu_joined
from benchmarks.gpu_parts import needs as gpu_needs
from benchmarks.gpu_parts import settings as gpu_settings
from benchmarks.gpu_parts.compiling import Compiling
from benchmarks.gpu_parts.run import Bench

STUB = "tests.gpu.stub_parts"
REHEARSED = ["--tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of parts that die, hang and fail, and of one that does not."""
    folder = tmp_path_factory.mktemp("run")
    seconds = {"dies": 60.0, "hangs": 60.0, "wrong": 60.0, "fine": 60.0, "late": 0.0}
    parts = {name: gpu.Part(STUB, most) for name, most in seconds.items()}
    with pytest.MonkeyPatch.context() as patch:
        wait = gpu.subprocess.Popen.wait

        def impatient(process: Any, timeout: float | None = None) -> int:
            """Does not wait long for what hangs, once it does."""
            if "hangs" in process.args and timeout is not None:
                while "first" not in _text(folder / "hangs.json"):
                    assert process.poll() is None
                timeout = 0.1
            return wait(process, timeout)

        patch.setattr(gpu.subprocess.Popen, "wait", impatient)
        result = gpu.run_parts(parts, folder, folder / "joined.json", 1000.0, REHEARSED)
    return folder, result


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_ends_none_of_the_others(stubbed: tuple[Path, dict[str, Any]]) -> None:
    folder, result = stubbed
    parts = result["parts"]
    assert parts["dies"]["status"] == parts["hangs"]["status"] == "failed"
    assert "SIGSEGV" in parts["dies"]["error"] and "was killed" in parts["hangs"]["error"]
    assert parts["fine"]["status"] == parts["wrong"]["status"] == "done"
    assert parts["late"]["status"].startswith("left out")
    assert len(result["failures"]) == 3 and "wrong: " not in result["failures"][0]
    assert any(text == "tokens differ" for text in result["failures"])
    assert all(parts[name]["first"] == {"value": 1} for name in ("dies", "hangs")), (
        "what a part had found before it died is kept"
    )
    assert parts["fine"]["gc"] == "1"
    assert json.loads((folder / "joined.json").read_text()) == result
    assert {f"{name}.log" for name in ("dies", "hangs", "wrong", "fine")} <= {
        path.name for path in folder.iterdir()
    }


@pytest.mark.slow
def test_of_a_figure_of_several_parts_the_worst_counts(stubbed: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = stubbed
    for name in ("fine", "wrong"):  # as if they had run on a GPU
        path = folder / f"{name}.json"
        own = json.loads(path.read_text())
        own["rehearsal"], own["figures"] = False, own["figures"] | own["rehearsed_not_measured"]
        own["reasons"], own["said"] = {"captured_vs_eager": "no memory for it"}, ["captured_vs_eager"]
        (folder / f"real-{name}.json").write_text(json.dumps(own))
    joined = gpu_joined.join_parts(folder, ["real-fine", "real-wrong"], {})
    assert joined["figures"]["host_gap_fraction"] == 0.5 and joined["rehearsal"] is False
    assert joined["reasons"]["captured_vs_eager"] == "no memory for it"
    assert "not got there" in joined["reasons"]["plain_8b_floor_fraction"]


def test_the_command_runs_its_parts_and_a_second_run_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part(STUB, 60) for name in ("fine", "wrong")})
    monkeypatch.setattr(gpu.time, "strftime", lambda form: "20260101-000000")
    out = ["--out", str(tmp_path)]
    assert gpu.main([*REHEARSED, *out, "--parts", "fine"]) == 0
    assert gpu.main([*REHEARSED, *out, "--parts", "wrong"]) == 1
    first, second = (f"gpu-rehearsal-20260101-000000{number}" for number in ("", "-2"))
    assert {path.name for path in tmp_path.iterdir()} == {first, f"{first}.json", second, f"{second}.json"}
    assert list(json.loads((tmp_path / f"{first}.json").read_text())["parts"]) == ["fine"]
    with pytest.raises(SystemExit):
        gpu.main([*REHEARSED, *out, "--parts", "shape"])


def test_shapes_come_before_the_model_and_the_profiler_last() -> None:
    order = list(gpu.PARTS)
    assert order[:3] == ["smoke", "correctness", "shapes"] and order[-1] == "profile"
    assert gpu.PARTS["smoke"].seconds <= 120


# ---- what is missing ----


def test_what_is_missing_is_named_with_the_way_to_bring_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_needs.missing(lambda module: True) == ([], [])
    required, optional = gpu_needs.missing(
        lambda module: module not in ("pydantic_core", "torchao", "triton")
    )
    assert (required, optional) == (["triton", "pydantic-core"], ["torchao"])
    assert gpu_needs.missing(lambda module: module != "triton", on_gpu=False) == ([], [])
    monkeypatch.setattr(gpu, "missing", lambda on_gpu: (["pydantic-core"], []))
    assert gpu.main([*REHEARSED, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "pip install pydantic-core" in said and "gpu_kit.py pack KIT --packages pydantic-core" in said
    assert not list(tmp_path.iterdir())


def test_what_hispec_requires_is_asked_for() -> None:
    """Of setup.py; what a GPU does without is left out."""
    setup = (Path(gpu.ROOT) / "setup.py").read_text(encoding="utf-8")
    listed = re.findall(
        r'"([a-z]+)>=', setup[setup.index("install_requires") : setup.index("extras_require")]
    )
    assert set(listed) - set(gpu_needs.REQUIRED.values()) == {"gguf", "numba"}


# ---- compiling ----


def test_only_what_was_compiled_anew_counts() -> None:
    compiling = Compiling()
    for seconds, cache_hit in ((1.5, False), (9.0, True), (0.5, False)):
        compiling.compiled(times=SimpleNamespace(total=seconds * 1e6), cache_hit=cache_hit, src=None)
    assert (compiling.seconds, compiling.kernels) == (2.0, 2)


def test_triton_tells_us_of_compilations() -> None:
    knobs = pytest.importorskip("triton").knobs
    before = knobs.compilation.listener
    compiling = Compiling()
    try:
        compiling.listen()
        assert knobs.compilation.listener == compiling.compiled
    finally:
        knobs.compilation.listener = before


# ---- settings ----


def test_a_setting_holds_as_long_as_it_is_tried() -> None:
    triton_pages = pytest.importorskip("ee_models.attention.triton_pages")
    arguments = 4, 64, 2, False, False
    usual = triton_pages._split_len(1, 512, 64, 132), triton_pages._launch_config(*arguments).num_warps
    with gpu_settings.fewest_tiles(1):
        assert triton_pages._split_len(1, 512, 64, 132) == 64 < usual[0]
    with gpu_settings.warps(8):
        assert triton_pages._launch_config(*arguments).num_warps == 8 != usual[1]
    from hispec.sampling import floor_triton

    with gpu_settings.chunk(1024):
        assert floor_triton._CHUNK == 1024
    assert floor_triton._CHUNK != 1024
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_bf16_reduced_precision_reduction
    with gpu_settings.reduced_precision(not allowed):
        assert matmul.allow_bf16_reduced_precision_reduction is not allowed
    assert matmul.allow_bf16_reduced_precision_reduction is allowed
    assert usual == (
        triton_pages._split_len(1, 512, 64, 132),
        triton_pages._launch_config(*arguments).num_warps,
    )


@pytest.mark.slow
def test_settings_are_tried_by_name(tmp_path: Path) -> None:
    def run(settings: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        bench = Bench(torch.device("cpu"), True, 1e5, tmp_path / "settings.json", {"settings": settings})
        gpu_settings.run(bench, out)
        return {name: value for name, value in out.items() if name in gpu_settings.SETTINGS}

    products = run("product")["product"]
    assert any("head" in name for name in products)
    with pytest.raises(ValueError, match=r"tile; there are tiles, warps, floor, product, reduced"):
        run("tile")
