"""The frozen trunk's hidden states at the exits' layers: computed once, kept on disk, read in any order.

The trunk never changes while adapters are trained, so a second epoch over states costs a fraction of the
first. A token takes (number of exits + 1) * hidden_size * 2 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of

from ..decoder import Decoder
from ..errors import TrainingError
from .examples import Example
from .loop import progress_bar, write_atomically

FINAL = "final"
_EXAMPLES_PER_SHARD = 128
_TOKENS_PER_PASS = 4096
_BLOCK_SIZE = 16


def trunk_states(
    decoder: Decoder,
    layers: Sequence[int],
    examples: Sequence[Example],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:
    """Hidden states of all tokens, packed example after example: "layer<l>" after l layers, and "final" after
    the final norm, which the head turns into the full model's logits. Each [tokens, hidden] of `dtype` on the
    decoder's device.
    """
    if not examples:
        raise ValueError("trunk_states needs at least one example")
    device = decoder.device
    lengths = torch.tensor([len(example.token_ids) for example in examples])
    max_blocks = -(-int(lengths.max()) // _BLOCK_SIZE)
    tables = torch.arange(len(examples) * max_blocks, device=device).view(len(examples), max_blocks)
    rows = torch.repeat_interleave(torch.arange(len(examples)), lengths).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()]).to(device)
    cu_q_lens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(device)
    slots, longest = packed_slots_of(tables, rows, positions, _BLOCK_SIZE), int(lengths.max())
    view = BatchView(positions, slots, tables, cu_q_lens, max_q_len=longest, max_context_len=longest)
    config = decoder.config
    sizes = (tables.numel(), _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv = PagedKV(config.num_layers, *sizes, decoder.kv_dtype, device)
    token_ids = [token for example in examples for token in example.token_ids]
    hidden = decoder.embed(torch.tensor(token_ids, device=device))
    states, lo = {}, 0
    for hi in sorted(layers):
        hidden = decoder.run_layers(hidden, lo, hi, kv, view)
        states[f"layer{hi}"] = hidden.to(dtype, copy=True)
        lo = hi
    hidden = decoder.run_layers(hidden, lo, config.num_layers, kv, view)
    states[FINAL] = decoder.normed(hidden).to(dtype)
    return states


class StateStore:
    """Hidden states of `examples` in `folder`: for every 128 of them a folder with a file per exit and one of
    the final states. Those that are there already, from whatever run, are not computed again."""

    def __init__(
        self,
        folder: Path,
        decoder: Decoder,
        layers: Sequence[int],
        examples: Sequence[Example],
        model: str,
        *,
        progress: bool = True,
    ) -> None:
        """`model` identifies the trunk and its dtype. Raises TrainingError if the disk is full; what is
        written by then is used by the next run."""
        self._names = [*(f"layer{layer}" for layer in sorted(layers)), FINAL]
        self._files: dict[Path, Any] = {}
        self._places: list[tuple[Path, int, int]] = []
        with progress_bar("hidden states", "example", len(examples), 0, progress) as bar:
            for first in range(0, len(examples), _EXAMPLES_PER_SHARD):
                shard = examples[first : first + _EXAMPLES_PER_SHARD]
                path = folder / _identity(model, shard)
                missing = [name for name in self._names if not (path / f"{name}.safetensors").exists()]
                if missing:
                    _write(path, missing, decoder, shard)
                start = 0
                for example in shard:
                    self._places.append((path, start, start + len(example.token_ids)))
                    start += len(example.token_ids)
                bar.update(len(shard))

    def read(self, index: int) -> dict[str, Tensor]:
        """The states of example `index`, each [tokens, hidden] bfloat16, on the CPU. Raises TrainingError for
        a damaged file."""
        folder, start, stop = self._places[index]
        return {name: self._read(folder, name)[start:stop] for name in self._names}

    def _open(self, path: Path) -> Any:
        if path not in self._files:  # mapped into memory for as long as the store lives
            self._files[path] = safe_open(path, "pt").__enter__()
        return self._files[path]

    def _read(self, folder: Path, name: str) -> Any:
        try:
            return self._open(folder / f"{name}.safetensors").get_slice(name)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"{folder / name}.safetensors is damaged ({error}); delete it, and go on with"
                " output.resume=true"
            ) from error


def _write(folder: Path, names: Sequence[str], decoder: Decoder, shard: Sequence[Example]) -> None:
    """Computes the states `names` of a shard and writes a file of each. Examples of similar length share a
    pass, so that little is computed for padding."""
    layers = [int(name.removeprefix("layer")) for name in names if name != FINAL]
    order = sorted(range(len(shard)), key=lambda i: len(shard[i].token_ids))
    parts: dict[int, dict[str, Tensor]] = {}
    while order:
        longest = len(shard[order[-1]].token_ids)
        taken = order[-max(1, _TOKENS_PER_PASS // longest) :]
        del order[-len(taken) :]
        states = trunk_states(decoder, layers, [shard[i] for i in taken])
        lengths = [len(shard[i].token_ids) for i in taken]
        split = {name: tensor.cpu().split(lengths) for name, tensor in states.items()}
        for place, i in enumerate(taken):
            parts[i] = {name: pieces[place] for name, pieces in split.items()}
    for name in names:
        whole = torch.cat([parts[i][name] for i in range(len(shard))])
        write_atomically(folder / f"{name}.safetensors", partial(save_file, {name: whole}))


def num_bytes(examples: Sequence[Example], num_exits: int, hidden_size: int) -> int:
    """The size on disk of a store of `examples`."""
    return sum(len(example.token_ids) for example in examples) * (num_exits + 1) * hidden_size * 2


def _identity(model: str, shard: Sequence[Example]) -> str:
    digest = hashlib.blake2b(model.encode(), digest_size=12)
    for example in shard:
        digest.update(torch.tensor([len(example.token_ids), *example.token_ids]).numpy().tobytes())
    return digest.hexdigest()
