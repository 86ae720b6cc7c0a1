"""The yardstick of a benchmark: the same prompts through transformers' own `generate`."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from ee_models.quantized import without_warnings

from ..errors import ConfigError

TokenIds = list[int]
IMPORTS_TORCHAO = "transformers.quantizers.auto"  # where torchao is installed; from_pretrained imports it


class TransformersBaseline:
    """Greedy, batched, left-padded generation with the model as transformers loads it."""

    def __init__(
        self, path: str, *, dtype: str, device: str, batch_size: int, max_tokens: int, ignore_eos: bool
    ) -> None:
        """Loads the checkpoint at `path` a second time, for transformers. Raises ConfigError if transformers
        can't."""
        import torch
        from transformers import GenerationConfig

        self._batch_size = batch_size
        self._torch = torch
        self._model = _load(path, dtype).to(device).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos: set[int] = (
            set() if ignore_eos or eos is None else set(eos if isinstance(eos, list) else [eos])
        )
        self._pad = 0  # masked wherever it stands
        # A checkpoint's own generation config may sample or penalise: only its EOS is taken.
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=sorted(self._eos) or None,
            pad_token_id=self._pad,
        )

    def generate(self, prompts: list[TokenIds]) -> list[TokenIds]:
        """New tokens of each prompt, up to its EOS, which is the last of them."""
        outputs: list[TokenIds] = []
        for start in range(0, len(prompts), self._batch_size):
            outputs += self._batch(prompts[start : start + self._batch_size])
        return outputs

    def _batch(self, prompts: list[TokenIds]) -> list[TokenIds]:
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._model.device
        with torch.inference_mode():
            result = self._model.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
        return [self._until_eos(row) for row in result[:, width:].tolist()]

    def _until_eos(self, tokens: TokenIds) -> TokenIds:
        end = next((at for at, token in enumerate(tokens, start=1) if token in self._eos), len(tokens))
        return tokens[:end]


def _load(path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would break the benchmark's own
    with without_warnings(), suppress(ImportError):
        import_module(IMPORTS_TORCHAO)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot load {path}: {error}\nLeave it out of the benchmark with --no-transformers"
        ) from None
