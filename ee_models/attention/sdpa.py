"""The reference backend: pages gathered into rectangles, then torch's scaled_dot_product_attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, slots_of


@dataclass(frozen=True)
class _Rectangle:
    """A pass as a rectangle of rows.

    query_index     [rows, max_q_len]: token of each place, 0 where there is none
    mask            [rows, 1, max_q_len, context]
    context_slots   [rows, context]
    places          [tokens]: flat place of each token
    """

    query_index: Tensor
    mask: Tensor
    context_slots: Tensor
    places: Tensor


class SdpaAttention:
    name = "sdpa"
    row_invariant = False  # its kernel, and with it the order of sums, depends on the shape of the pass

    def prepare(self, view: BatchView, kv: PagedKV) -> _Rectangle:
        device = view.positions.device
        row_ids = view.row_ids()
        if view.paths is not None and view.path_starts is not None:
            return _prepare_tree(view, row_ids, view.paths, view.path_starts, kv.block_size)
        places = (
            row_ids * view.max_q_len + torch.arange(view.num_tokens, device=device) - view.cu_q_lens[row_ids]
        )
        query_index = torch.zeros(view.num_rows * view.max_q_len, dtype=torch.int64, device=device)
        query_index[places] = torch.arange(view.num_tokens, device=device)
        query_index = query_index.view(view.num_rows, view.max_q_len)
        context = torch.arange(view.max_context_len, device=device)
        mask = context <= view.positions[query_index].unsqueeze(-1)
        # Past a row's end the table names other rows' blocks, and a mask does not hide NaN: 0 * NaN is NaN.
        last = torch.zeros(view.num_rows, dtype=torch.int64, device=device).scatter_reduce_(
            0, row_ids, view.positions, "amax"
        )
        context_slots = slots_of(view.block_tables, torch.minimum(context, last.unsqueeze(-1)), kv.block_size)
        return _Rectangle(query_index, mask.unsqueeze(1), context_slots, places)

    def attend(self, q: Tensor, kv: PagedKV, layer: int, prepared: _Rectangle) -> Tensor:
        group = q.shape[1] // kv.num_kv_heads
        queries = q[prepared.query_index].transpose(1, 2)
        # Heads are expanded by hand: with `enable_gqa` a mask sends torch to its slow path.
        keys, values = (
            x.to(q.dtype).transpose(1, 2).repeat_interleave(group, dim=1)
            for x in kv.read(layer, prepared.context_slots)
        )
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=prepared.mask)
        return out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[2])[prepared.places]


def _prepare_tree(
    view: BatchView, row_ids: Tensor, paths: Tensor, path_starts: Tensor, block_size: int
) -> _Rectangle:
    """The rectangle of a pass over trees: every token is a row of its own, with a context of its own."""
    sizes = (view.num_tokens, view.max_context_len)
    tokens, context = (torch.arange(size, device=row_ids.device) for size in sizes)
    positions, starts = view.positions.unsqueeze(-1), path_starts.unsqueeze(-1)
    seen = torch.minimum(context, positions)  # as for chains: places past a token's own position repeat it
    # Neither the table nor the path need cover the positions that the other tells.
    by_table = slots_of(view.block_tables[row_ids], torch.minimum(seen, starts - 1).clamp(min=0), block_size)
    by_path = paths.gather(1, (seen - starts).clamp(min=0))
    mask = (context <= positions).view(view.num_tokens, 1, 1, -1)
    return _Rectangle(tokens.unsqueeze(-1), mask, torch.where(seen < starts, by_table, by_path), tokens)
