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


def prompt_bucket(num_tokens: int) -> int:
    """Tokens of the static pass over prompts that `num_tokens` are computed in: powers of 2 from 16 on, and
    from 256 on also what lies in the middle of two."""
    power = 1 << max(4, (num_tokens - 1).bit_length())
    between = power * 3 // 4
    return between if power > 256 and num_tokens <= between else power


def prompt_rows_bucket(num: int) -> int:
    """Rows of such a pass, or tokens of its longest row: powers of 4."""
    return 1 << 2 * (max(0, num - 1).bit_length() + 1 >> 1)
