"""What Triton's attention launches: grids from host integers alone, splits that fill a device, kernels that
compile without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cache.paged_kv import PagedKV
from cache.view import BatchView
from ee_models.attention import triton_pages
from ee_models.attention.triton_pages import TritonAttention
from tests.helpers.triton_passes import LAYER, Heads


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("num_sms", [1, 132])
def test_splits_fill_the_device_but_are_not_short(num_sms: int, tile: int) -> None:
    for programs in (1, 8, 64, 264, 5000):
        for context_len in (1, 64, 255, 256, 511, 512, 4096, 131072):
            split_len = triton_pages._split_len(programs, context_len, tile, num_sms)
            num_splits = -(-context_len // split_len)
            assert split_len % tile == 0
            assert num_splits == 1 or (split_len >= 4 * tile and programs * num_splits <= 2 * num_sms)
    assert triton_pages._split_len(8, 4096, 64, 132) == 256
    assert triton_pages._split_len(1, 131072, 64, 132) == 2048


class Recorder:
    """Stands for a kernel and keeps (grid, args, kwargs) of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


def launches(
    backend: TritonAttention, heads: Heads, dtype: torch.dtype, q_len: int, tree: bool
) -> tuple[Recorder, Recorder]:
    """What a pass would launch. Its tensors have no data, so any look at one is an error."""
    meta, num_rows, bucket = torch.device("meta"), 2, 1024
    tokens = num_rows * q_len
    indices = torch.empty(tokens, dtype=torch.int64, device=meta)
    tables, ends = indices.new_empty(num_rows, 64), indices.new_empty(num_rows + 1)
    view = BatchView(
        indices,
        indices,
        tables,
        ends,
        q_len,
        bucket,
        indices.new_empty(tokens, 4) if tree else None,
        indices if tree else None,
    )
    kv = PagedKV(LAYER + 1, 4, 16, heads[1], heads[2], dtype, meta)
    attend, combine = Recorder(), Recorder()
    with (
        mock.patch.object(triton_pages, "attend_pages", attend),
        mock.patch.object(triton_pages, "combine_splits", combine),
    ):
        out = backend.attend(
            torch.empty(tokens, *heads[::2], dtype=dtype, device=meta), kv, LAYER, backend.prepare(view, kv)
        )
    assert out.shape == (tokens, heads[0] * heads[2])
    return attend, combine


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_launch_reads_nothing_on_the_host(invariant: bool, tree: bool) -> None:
    """So a pass can be captured in a graph."""
    attend, combine = launches(TritonAttention(invariant), (32, 8, 64), torch.bfloat16, 6, tree)
    block_pairs = 16 if tree else 32
    assert [call[0] for call in attend.calls] == [(2 * -(-24 // block_pairs), 8, 4)]
    assert [call[0] for call in combine.calls] == [(2 * 6 * 32 // triton_pages._COMBINED_PAIRS,)]
    attend, combine = launches(TritonAttention(invariant), (32, 8, 64), torch.bfloat16, 500, tree)
    assert [call[0][1:] for call in attend.calls] == [(8, 1)]
    assert combine.calls == []


POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64"}


def compile_call(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> str:
    """Compiles a kernel as a launch with these arguments would -> its registers and stack."""
    options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
    values = {
        **dict(zip(kernel.arg_names, args, strict=False)),
        **{name: kwargs[name] for name in kwargs.keys() - options.keys()},
    }
    if "WIDEN" in values:
        values["WIDEN"] = False
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = (
            POINTERS[value.dtype]
            if isinstance(value, Tensor)
            else "i32"
            if isinstance(value, int)
            else "fp32"
        )
        if not parameter.do_not_specialize and (
            isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return f"registers {found[1]} stack {found[2]} shared {compiled.metadata.shared}"


def compile_offline(every: bool) -> None:
    """Compiles what passes of all kinds launch, for two generations of devices, and prints what each kernel
    takes."""
    plain, invariant = TritonAttention(), TritonAttention(invariant=True)
    passes = [(plain, 5, True)]
    if every:
        passes += [
            (plain, 1, False),
            (plain, 6, False),
            (plain, 12, False),
            (invariant, 1, False),
            (invariant, 5, True),
        ]
    for capability in (80, 90):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,):
            for head_dim in (64, 80, 128, 256) if every else (64 if capability == 80 else 128,):
                for backend, q_len, tree in passes:
                    attend, combine = launches(backend, (32, 8, head_dim), dtype, q_len, tree)
                    for name, recorder in (("attend_pages", attend), ("combine_splits", combine)):
                        for grid, args, kwargs in recorder.calls:
                            taken = compile_call(getattr(triton_pages, name), args, kwargs, capability)
                            kind = (
                                f"q_len {q_len} {'tree' if tree else 'chain'}"
                                f" {'invariant' if backend.row_invariant else 'plain'} grid {grid}"
                            )
                            print(
                                f"{name} sm_{capability} {dtype} head_dim {head_dim} {kind}: {taken}",
                                flush=True,
                            )


def run_compile_offline(every: bool) -> list[str]:
    """The printed lines of a process in which Triton compiles rather than interprets, with an empty cache."""
    code = f"from tests.gpu.test_attention_triton_launch import compile_offline; compile_offline({every})"
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_kernels_compile_for_devices_of_two_generations() -> None:
    lines = run_compile_offline(every=False)
    assert len(lines) == 2 * 2  # of each generation one size; the next test, of `make test-slow`, has all


@pytest.mark.slow
def test_all_kernels_compile_without_large_spills() -> None:
    for line in run_compile_offline(every=True):
        print(line)
        found = re.search(r"stack (\d+) shared (\d+)", line)
        assert found is not None
        assert int(found[1]) <= 128, line
        assert int(found[2]) <= 99 * 1024, line  # what the smallest devices since sm_80 have
