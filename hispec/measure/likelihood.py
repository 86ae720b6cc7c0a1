"""How likely models find the tokens of given answers, and how far apart two models are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ee_models.decoder import Decoder
from ee_models.training.examples import Example
from ee_models.training.hidden_states import FINAL, trunk_states

from ..utils.console import make_bar
from ..utils.devices import on_device

LOGITS_AT_ONCE = 2**22  # of each model: 17 MB in float32
TOKENS_PER_PASS = 4096  # padding included


@torch.inference_mode()
def score(
    decoders: Sequence[Decoder],
    examples: Sequence[Example],
    batch_size: int,
    what: str,
    *,
    progress: bool = True,
) -> list[list[float]]:
    """Of each example, in sums over the tokens of its response: nats by each model, and with two models
    KL(second || first) and the number of places where both find the same token likeliest. what: of the
    progress bar."""
    scores: list[list[float]] = [[] for _ in examples]
    order = sorted(range(len(examples)), key=lambda index: len(examples[index].token_ids))
    with make_bar(len(examples), what, "row", progress) as bar:
        while order:  # the longest first, so that what does not fit into memory shows at once
            longest = len(examples[order[-1]].token_ids)
            num_rows = min(batch_size, max(1, TOKENS_PER_PASS // longest))
            taken = order[-num_rows:]
            del order[-num_rows:]
            part = [examples[index] for index in taken]
            places, targets, start = [], [], 0
            for example in part:
                stop = start + len(example.token_ids)
                places.append(torch.arange(start + example.prompt_len - 1, stop - 1))
                targets += example.token_ids[example.prompt_len :]
                start = stop
            read = torch.cat(places)
            states = [_final_states(each, part, read) for each in decoders]
            found = figures_of(decoders, states, torch.tensor(targets)).split([len(each) for each in places])
            for index, of_row in zip(taken, found, strict=True):
                scores[index] = of_row.sum(0).tolist()
            bar.update(len(taken))
    return scores


def _final_states(decoder: Decoder, examples: Sequence[Example], places: Tensor) -> Tensor:
    """States [places, hidden] after the final norm."""
    with on_device(decoder.device):
        return trunk_states(decoder, (), examples, decoder.dtype)[FINAL][places.to(decoder.device)]


def figures_of(decoders: Sequence[Decoder], states: Sequence[Tensor], targets: Tensor) -> Tensor:
    """What `score` sums, [places, figures] float64 on the CPU, of states [places, hidden] after the final
    norm; logits are made a piece at a time."""
    at_once = max(1, LOGITS_AT_ONCE // decoders[0].config.vocab_size)
    found = []
    for start in range(0, len(targets), at_once):
        part = slice(start, start + at_once)
        logs = []
        for decoder, of_model in zip(decoders, states, strict=True):
            with on_device(decoder.device):
                logs.append(decoder.head(of_model[part]).float().log_softmax(-1))
        wanted = targets[part, None].to(logs[0].device)
        columns = [-log.gather(1, wanted)[:, 0] for log in logs]
        if len(logs) == 2:
            model, original = logs
            columns.append(F.kl_div(model, original, reduction="none", log_target=True).sum(-1))
            columns.append(model.argmax(-1) == original.argmax(-1))
        found.append(torch.stack([column.double().cpu() for column in columns], dim=1))
    return torch.cat(found)
