"""How much memory there is, how much a computation takes, and what an allocation failure looks like."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ..errors import ConfigError, cut

_GROUP = Path("/sys/fs/cgroup")  # a container's own
# Of it, by the two versions that Linux has: its folder, the limit there, what is used, and what `memory.stat`
# calls the cached files among that, which the kernel could free for us.
_LIMITS = (
    (".", "max", "current", ("inactive_file", "active_file")),
    ("memory", "limit_in_bytes", "usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. torch has a class for it on a GPU; on a CPU, and in libraries on a GPU,
    only the message tells."""
    cause = error.__cause__  # of a drafter's failure, for example
    if isinstance(cause, RuntimeError) and is_out_of_memory(cause):
        return True
    words = "can't allocate memory", "out of memory", "ALLOC_FAILED"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


@contextmanager
def or_too_large(sizes: str) -> Iterator[None]:
    """Raises ConfigError, which names these `sizes` and what to lower, where memory does not suffice for what
    is done here."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        raise ConfigError(
            f"{sizes}: there is not enough memory ({cut(reason)}); lower one of them"
        ) from error


def is_due_to_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from or followed, is a failed allocation: what ends a capture
    raises errors of its own, with the one that interrupted it in `__context__`."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if is_out_of_memory(each):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


def free_memory_bytes() -> int:
    """Bytes of the host's memory that can still be allocated: of a container's, where that has less."""
    within = [left for names in _LIMITS if (left := _left_of_limit(*names)) is not None]
    return min([_free_of_host(), *within])


def _free_of_host() -> int:
    try:
        # What the kernel could free for us; "free" alone leaves out the page cache.
        return 1024 * _number_of(Path("/proc/meminfo"), "MemAvailable:")
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_of_limit(folder: str, limit: str, used: str, cached: Sequence[str]) -> int | None:
    """Of what a container may use, what it does not, files that are cached left out; None = no limit."""
    place = _GROUP / folder
    try:
        most, now = (int((place / f"memory.{name}").read_text(encoding="ascii")) for name in (limit, used))
        return max(0, most - now + sum(_number_of(place / "memory.stat", name) for name in cached))
    except (OSError, ValueError, StopIteration):  # "max", or no such file
        return None


def _number_of(path: Path, name: str) -> int:
    """The number that follows a name in a file of names and numbers."""
    with open(path, encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.split()[:1] == [name])


def proportional_bytes(pid: int, *, private: bool = False) -> int | None:
    """Memory of a process, of a page that several have its part of it; with `private` only what no other has.
    None where the system does not tell, as Linux does, and for a process that has ended."""
    names = ("Private_Clean:", "Private_Dirty:") if private else ("Pss:",)
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(names))
    except OSError:
        return None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a GPU: free ones, and those that torch reserves but does not
    use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """GPU memory that `run` needs at its peak, besides what is there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def keep_loaded() -> None:
    """For a process that is ours alone, once its model is loaded: what is there now is not looked at by
    Python's garbage collector again, and never freed by it. Looking through all modules and the tokenizer
    takes a tenth of a second, again and again."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # what loading has freed
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def mb(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MB"
