"""The few sizes of static rounds, so that few graphs serve all batches: rows and lengths of context are
rounded up to the next bucket."""

from __future__ import annotations

_LEAST_CONTEXT = 512  # positions; each bucket of context is four times the one before


def row_bucket(num_rows: int, most: int) -> int:
    """Rows of the static round that `num_rows` rows run in: powers of 2 up to 8, then multiples of 8 up to
    64, then of 32, and at most `most`."""
    step = 1 << max(0, num_rows - 1).bit_length() if num_rows <= 8 else 8 if num_rows <= 64 else 32
    return min(-(-num_rows // step) * step, most)


def row_buckets(most: int) -> list[int]:
    """All buckets of up to `most` rows, the largest first."""
    return sorted({row_bucket(num_rows, most) for num_rows in range(1, most + 1)}, reverse=True)


def context_bucket(context_len: int, most: int) -> int:
    """Positions that a static round attends within, at least context_len."""
    length = _LEAST_CONTEXT
    while length < context_len:
        length *= 4
    return min(length, max(most, context_len))


def context_buckets(most: int) -> list[int]:
    """All buckets of contexts up to `most`, the shortest first."""
    lengths = [context_bucket(1, most)]
    while lengths[-1] < most:
        lengths.append(context_bucket(lengths[-1] + 1, most))
    return lengths
