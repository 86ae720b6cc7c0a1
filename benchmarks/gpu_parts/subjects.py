"""What is measured on: SmolLM2 with its exits and real prompts where they are, else random weights of its
shape; and decoders of larger shapes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.gpu_parts.run import Bench
from ee_models.attention import select_backend
from ee_models.config import ModelConfig, RopeConfig
from ee_models.decoder import AttentionWeights, Decoder, LayerWeights, MlpWeights
from ee_models.exits import Exit
from ee_models.linear import Linear
from ee_models.linear_factory import LinearMaker
from hispec.config import SpeculativeConfig
from hispec.errors import HiSpecError
from hispec.llm import LLM
from hispec.loading.fetch import resolve_model

PROMPTS = Path(__file__).resolve().parents[2] / "configs" / "quickstart_prompts.jsonl"
# Weights of these sizes write varied text, over logits that spread as a trained model's do. Larger ones would
# make differences of whole logits of bfloat16's roundings, and then no near-tie could be told from a fault.
_MATRIX_GAIN, _LOGIT_SPREAD = 1.3, 7.0
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
SMOLLM2_LAYERS, TINY_LAYERS = (4, 7, 15), (1, 2, 3)


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the layers of its exits; `is_real`: SmolLM2 itself, with the exits that come with
    HiSpec, and a tokenizer."""

    path: str
    label: str
    is_real: bool
    layers: Sequence[int]

    @property
    def exit_kind(self) -> Literal["adapter", "exit"]:
        return "adapter" if self.is_real else "exit"


@dataclass(frozen=True)
class Texts:
    """Prompts as token ids, and the task of each."""

    prompts: list[list[int]]
    tasks: list[str]
    label: str


@dataclass(frozen=True)
class Loaded:
    subject: Subject
    decoder: Decoder
    llm: LLM = field(repr=False)

    def exits(self, plan: SpeculativeConfig | None) -> Sequence[Exit]:
        return self.llm.trained_exits.load(plan, self.decoder)


@contextmanager
def found_subject(bench: Bench) -> Iterator[Subject]:
    """The model of --model, else SmolLM2 where `hispec fetch` has put it, else random weights in a folder
    that is gone afterwards."""
    wanted = bench.options.get("model")
    if wanted is None and not bench.is_tiny:
        try:
            wanted = resolve_model("smollm2")
        except (HiSpecError, OSError):
            wanted = None
    if wanted is not None and Path(wanted).expanduser().exists():
        yield Subject(
            str(Path(wanted).expanduser()), "SmolLM2-135M-Instruct with its exits", True, SMOLLM2_LAYERS
        )
        return
    if bench.options.get("model") is not None:
        raise FileNotFoundError(f"--model {wanted}: there is no such folder")
    with TemporaryDirectory() as folder:
        save_random(Path(folder), TINY if bench.is_tiny else SMOLLM2)
        label = (
            "a tiny model of random weights" if bench.is_tiny else "random weights of SmolLM2-135M's shape"
        )
        yield Subject(folder, label, False, TINY_LAYERS if bench.is_tiny else SMOLLM2_LAYERS)


def save_random(folder: Path, sizes: dict[str, Any]) -> None:
    """A Llama checkpoint that transformers loads too."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = LlamaConfig(
        **sizes,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = (
                    _LOGIT_SPREAD / math.sqrt(config.hidden_size)
                    if "embed" in name
                    else _MATRIX_GAIN / math.sqrt(parameter.shape[-1])
                )
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder)


@contextmanager
def loaded(bench: Bench, subject: Subject, dtype: str, length: int, exact: bool = False) -> Iterator[Loaded]:
    """Its decoder, for sequences of `length` positions."""
    with LLM(
        subject.path,
        skip_tokenizer_init=not subject.is_real,
        dtype=dtype,
        device=str(bench.device),
        max_num_seqs=1,
        max_model_len=length,
        num_kv_blocks=-(-length // 16),
        exact_verify=exact,
    ) as llm:
        yield Loaded(subject, llm.decoder, llm)


def texts_of(bench: Bench, model: Loaded, longest: int) -> Texts:
    """Real prompts, cut to `longest` tokens, where the model has a tokenizer; else random tokens."""
    if not model.subject.is_real:
        prompts = random_prompts(
            4 if bench.is_tiny else 24, model.decoder.config.vocab_size, 10, 14 if bench.is_tiny else 60
        )
        return Texts(
            prompts, [("odd", "even")[number % 2] for number in range(len(prompts))], "random tokens"
        )
    path = Path(bench.options.get("prompts") or PROMPTS)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if bench.is_tiny:
        rows = rows[:4]
    texts = [
        model.llm.encode(row.get("messages") or row["prompt"], chat="messages" in row)[:longest]
        for row in rows
    ]
    return Texts(texts, [task_of(row) for row in rows], f"{len(rows)} prompts of {path.name}")


def task_of(row: dict[str, Any]) -> str:
    metadata = row.get("metadata") or {}
    return str(row.get("task") or metadata.get("task") or metadata.get("category") or "all")


def random_prompts(number: int, vocab_size: int, shortest: int, longest: int) -> list[list[int]]:
    generator = random.Random(0)
    return [
        [generator.randrange(2, vocab_size) for _ in range(generator.randint(shortest, longest))]
        for _ in range(number)
    ]


def shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, theta: float
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope=RopeConfig(theta=theta),
    )


def random_decoder(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, max_positions: int
) -> Decoder:
    """Weights made on the device, layer by layer."""
    generator, make_linear = torch.Generator(device).manual_seed(0), LinearMaker(device, dtype)

    def matrix(outputs: int, inputs: int, scale: float) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator, device=device, dtype=dtype).mul_(scale)

    def linear(outputs: int, inputs: int) -> Linear:
        return make_linear(matrix(outputs, inputs, _MATRIX_GAIN / math.sqrt(inputs)), None)

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, device=device, dtype=dtype)

    layers = [
        LayerWeights(
            AttentionWeights(
                norm(),
                linear(config.q_size + 2 * config.kv_size, config.hidden_size),
                linear(config.hidden_size, config.q_size),
            ),
            MlpWeights(
                norm(),
                linear(2 * config.intermediate_size, config.hidden_size),
                linear(config.hidden_size, config.intermediate_size),
            ),
        )
        for _ in range(config.num_layers)
    ]
    spread = _LOGIT_SPREAD / math.sqrt(config.hidden_size)
    embedding = matrix(config.vocab_size, config.hidden_size, spread)
    head = make_linear(matrix(config.vocab_size, config.hidden_size, spread), None)
    return Decoder(
        config,
        embedding,
        layers,
        norm(),
        head,
        select_backend("auto", device, dtype),
        max_positions,
        make_linear,
    )
