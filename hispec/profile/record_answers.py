"""Makes recordings: one teacher-forced pass over every answer, of the model and of a draft model, and prompt
lookup at each of its places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cache.paged_kv import PagedKV
from cache.view import BatchView, packed_slots_of
from ee_models.decoder import Decoder
from ee_models.exits import Exit

from ..config import NgramConfig
from ..decoding.batch import RoundBatch
from ..decoding.draft_tree import DraftTree
from ..drafters.ngram import NgramDrafter
from ..drafters.ngram_table import NgramTable
from ..sampling.confidence import likeliest, max_probability
from ..sampling.logits import Logits
from ..sampling.sampler import Sampler
from ..utils.console import make_bar
from ..utils.devices import on_device
from .recording import NOTHING, Answer, Ints, LookedUp, Recording, Said

RANKS = 8  # likeliest tokens that are noted of each candidate exit
_PROMPT_TOKENS_PER_PASS = 512
_ANSWER_TOKENS_PER_PASS = 256  # of logits over the whole vocabulary
_BLOCK_SIZE = 16
_ROWS = 64  # answers that are looked up together


@torch.inference_mode()
def record(
    decoder: Decoder,
    layers: Sequence[int],
    exits: Sequence[Exit],
    answers: Sequence[Answer],
    *,
    ngrams: Sequence[NgramConfig] = (),
    most_looked_up: int = 0,
    tables: Sequence[NgramTable] = (),
    draft_model: Decoder | None = None,
    batch_size: int = 1,
    progress: bool = False,
) -> Recording:
    """Feeds every prompt with its answer through the model, and notes the tokens that each drafter and each
    check would say.

    layers          of the candidate exits; those that are not among `exits` are read through the model's own
                    head
    ngrams          sizes of prompt lookup, of which up to `most_looked_up` proposals are noted
    tables          that prompt lookup guesses from
    batch_size      answers that are made together: only what is looked up or learnt in earlier outputs
                    depends on it
    """
    all_layers = range(1, decoder.config.num_layers + 1)
    reader = _Reader(decoder, exits, answers, own=all_layers, said=layers)
    with on_device(decoder.device):
        with make_bar(len(answers), "agreement", "answer", progress) as bar:
            for answer in answers:
                reader.read(answer)
                bar.update()
        model = None
        if draft_model is not None:
            last = draft_model.config.num_layers
            drafts = _Reader(draft_model, [], answers, own=[], said=[last], most=decoder.config.vocab_size)
            for answer in answers:
                drafts.read(answer)
            model = drafts.said(last)
        looked_up = {
            sizes: look_up(sizes, answers, most_looked_up, batch_size, decoder.device, tables)
            for sizes in ngrams
        }
    said = {layer: reader.said(layer) for layer in layers}
    return Recording(answers, said, {layer: reader.own(layer) for layer in all_layers}, looked_up, model)


class _Reader:
    """One row of scratch KV, used anew for every sequence. As in the engine, KV of exits follows that of the
    model's layers.

    own    layers at which the likeliest token by the model's own norm and head is noted
    said   layers at which more is noted of what the exit says, a trained one where there is one
    most   tokens of the vocabulary that can be said: a draft model may have more than its target; None = all
    """

    def __init__(
        self,
        decoder: Decoder,
        exits: Sequence[Exit],
        answers: Sequence[Answer],
        *,
        own: Sequence[int],
        said: Sequence[int],
        most: int | None = None,
    ) -> None:
        self._decoder, self._most = decoder, most
        # What is read, in the order of a Recording: tokens, likeliest tokens, their probability. Made once:
        # pieces that stay between the logits of many sizes cost gigabytes of memory in fragments.
        places = sum(len(answer.token_ids) + 1 for answer in answers)
        self._own = {layer: torch.full((places,), NOTHING) for layer in own}
        self._ranked = {layer: torch.full((places, RANKS), NOTHING) for layer in said}
        self._probability = {
            layer: torch.full((places,), float(NOTHING), dtype=torch.float32) for layer in said
        }
        self._place = 0  # of the next token that is said
        self._exit_at: dict[int, tuple[Exit, int]] = {}
        num_kv_layers = decoder.config.num_layers
        for exit_ in sorted(exits, key=lambda exit_: exit_.layer):
            self._exit_at[exit_.layer] = exit_, num_kv_layers
            num_kv_layers += exit_.num_kv_layers
        longest = max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers)
        config, num_blocks = decoder.config, -(-longest // _BLOCK_SIZE)
        self._table = torch.arange(num_blocks, device=decoder.device).unsqueeze(0)
        self._kv = PagedKV(
            num_kv_layers,
            num_blocks,
            _BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
            decoder.kv_dtype,
            decoder.device,
        )

    def own(self, layer: int) -> Ints:
        """[places]: the likeliest token by the model's own norm and head after `layer`."""
        return np.asarray(self._own[layer])

    def said(self, layer: int) -> Said:
        return Said(np.asarray(self._ranked[layer]), np.asarray(self._probability[layer]))

    def read(self, answer: Answer) -> None:
        """Notes what is said at each place of the answer, of the true context; NOTHING after its last."""
        if not answer.token_ids:
            self._place += 1
            return
        last = self._decoder.config.vocab_size - 1
        token_ids = [
            min(token, last) for token in (*answer.prompt_token_ids, *answer.token_ids[:-1])
        ]  # as a draft model is fed
        first = len(answer.prompt_token_ids) - 1  # the place that says the answer's first token
        for start in range(0, first, _PROMPT_TOKENS_PER_PASS):
            self._pass(token_ids, start, min(start + _PROMPT_TOKENS_PER_PASS, first), says=False)
        for start in range(first, len(token_ids), _ANSWER_TOKENS_PER_PASS):
            self._pass(token_ids, start, min(start + _ANSWER_TOKENS_PER_PASS, len(token_ids)), says=True)
        self._place += 1

    def _pass(self, token_ids: list[int], start: int, stop: int, *, says: bool) -> None:
        """Computes positions start..stop-1, one layer at a time; with `says`, notes what is said there."""
        decoder, device = self._decoder, self._decoder.device
        here = slice(self._place, self._place + stop - start)
        positions = torch.arange(start, stop, device=device)
        slots = packed_slots_of(self._table, torch.zeros_like(positions), positions, _BLOCK_SIZE)
        view = BatchView(
            positions, slots, self._table, torch.tensor([0, stop - start], device=device), stop - start, stop
        )
        hidden = decoder.embed(torch.tensor(token_ids[start:stop], device=device))
        for layer in range(1, decoder.config.num_layers + 1):
            hidden = decoder.run_layers(hidden, layer - 1, layer, self._kv, view)
            logits = None
            if says and (layer in self._own or layer in self._ranked):
                logits = decoder.logits(hidden, layer)[:, : self._most]
            if logits is not None and layer in self._own:
                self._own[layer][here] = likeliest(logits).cpu()
            if layer in self._exit_at:
                exit_, kv_layer = self._exit_at[layer]
                if says:
                    values = exit_.logits(hidden, self._kv, kv_layer, view)
                    logits = Logits(values, decoder.config.vocab_size, exit_.vocabulary).wide()
                else:
                    exit_.fill(hidden, self._kv, kv_layer, view)
            if logits is not None and layer in self._ranked:
                self._ranked[layer][here] = _ranked(logits).cpu()
                self._probability[layer][here] = max_probability(logits).cpu()
        self._place += (stop - start) * says


def _ranked(logits: Tensor) -> Tensor:
    """The RANKS likeliest tokens [tokens, RANKS], first among equals as `Sampler.choose_top` has them."""
    best = likeliest(logits).unsqueeze(1)
    others = logits.scatter(1, best, -torch.inf).topk(min(RANKS, logits.shape[-1]) - 1, dim=-1).indices
    return torch.nn.functional.pad(
        torch.cat((best, others), dim=1), (0, RANKS - 1 - others.shape[1]), value=NOTHING
    )


def look_up(
    sizes: NgramConfig,
    answers: Sequence[Answer],
    most: int,
    batch_size: int,
    device: torch.device,
    tables: Sequence[NgramTable] = (),
) -> LookedUp:
    """What the engine's own drafter proposes at every place, after the true text.

    The rows of a batch advance together, one token at a time. That matters only where outputs are kept, each
    when it ends: with one row that is as in the engine, with several nearly so.
    """
    num_rows = batch_size if sizes.keeps_outputs else _ROWS
    longest = max(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers)
    drafter = NgramDrafter(sizes, num_rows, longest, device, tables)
    counts = [np.zeros(len(answer.token_ids) + 1, np.int64) for answer in answers]
    tokens = [np.full((len(answer.token_ids) + 1, most), NOTHING, np.int64) for answer in answers]
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    by_task = sorted(range(len(answers)), key=lambda number: tasks.index(answers[number].task))
    for start in range(0, len(by_task), num_rows):
        live, place = by_task[start : start + num_rows], 0
        while live:
            texts = [answers[number].prompt_token_ids + answers[number].token_ids[:place] for number in live]
            drafter.follow(list(zip(live, texts, strict=True)))
            batch = _text_ends(texts, most, device)
            proposed = drafter.propose(
                batch, torch.zeros_like(batch.limits), DraftTree.chain(most)
            ).proposals.counts.tolist()
            window = batch.tokens[:, 1:].cpu().numpy()
            for row, number in enumerate(live):
                counts[number][place], tokens[number][place, : proposed[row]] = (
                    proposed[row],
                    window[row, : proposed[row]],
                )
            place += 1
            for number in (number for number in live if len(answers[number].token_ids) == place):
                drafter.finish(number, answers[number].token_ids)
            live = [number for number in live if len(answers[number].token_ids) > place]
    return LookedUp(np.concatenate(counts), np.concatenate(tokens))


def _text_ends(texts: Sequence[Sequence[int]], most: int, device: torch.device) -> RoundBatch:
    """Rows with these texts at the beginning of a round of most + 1 places; without KV."""
    tokens = torch.zeros(len(texts), most + 2, dtype=torch.int64)
    tokens[:, 0] = torch.tensor([text[-1] for text in texts])
    starts = torch.tensor([len(text) - 1 for text in texts])
    return RoundBatch(
        tokens=tokens.to(device),
        starts=starts.to(device),
        limits=torch.full((len(texts),), most + 1, device=device),
        most_drafts=torch.full((len(texts),), most, device=device),
        most_checks=torch.ones(len(texts), dtype=torch.int64, device=device),
        block_tables=torch.zeros(len(texts), 0, dtype=torch.int64, device=device),
        block_size=_BLOCK_SIZE,
        max_context_len=int(starts.max()) + most + 1,
        sampler=Sampler([None] * len(texts), 1, device),
    )
