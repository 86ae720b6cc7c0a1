"""lm-evaluation-harness: its model `hispec`, to see that a plan leaves a model's accuracy as it is.

    python -m hispec.integrations.lm_eval --model hispec --model_args model=smollm2,preset=FILE --tasks gsm8k

The command is the harness's own, `lm_eval`, with this model known to it; so it is to lm_eval.simple_evaluate
once this module was imported. docs/evaluation.md has more.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval.models  # noqa: F401 - the harness fills its registry only while that is empty
from jinja2.exceptions import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import BaseModel

from ..config import EngineConfig
from ..config.workers import Workers
from ..errors import ConfigError, RequestError, build, shown
from ..jobs.load import apply_overrides, load_preset
from ..jobs.schema import RunConfig
from ..sampling_params import SamplingParams
from ..version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_DEVICE = "cuda:0"
_log = logging.getLogger(__name__)
_Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (texts, tokens of context, of continuation)


class HiSpecLM(TemplateLM):
    """An LLM as the harness asks it. Generations are the plan's; likelihoods are the full model's, which
    verifies every plan's tokens, and do not depend on the plan.

    model, pretrained    two names of one argument: as LLM's `model`
    preset               a file of `hispec profile`, or another with a job's sections but input and output
    workers, revision    as those of LLM
    max_gen_toks         tokens of an output where a task does not say
    add_bos_token        whether texts are encoded with special tokens; None = as the tokenizer likes
    prefix_token_id      what the first token of a text without a context follows; None = BOS, else EOS
    chat_template_args   for the chat template
    think_end_token      what ends the part of an answer that is left out
    device               engine.device, but cuda:0, which the harness's command has where nobody has said it
    batch_size, max_batch_size   without effect: engine.max_num_seqs says how many requests run together
    settings             over those of the preset: engine settings by their names, or `section.name`, such as
                         speculative.num_draft_tokens; speculative=null is plain decoding

    Raises ConfigError and CheckpointError as LLM does.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        preset: str | None = None,
        workers: Workers = 1,
        revision: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        think_end_token: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if model is not None and pretrained is not None:
            raise ConfigError("model_args: model and pretrained are the same; give one of them")
        if device not in (None, _DEFAULT_DEVICE):
            settings = {"device": device, **settings}
        self.config = make_config(model or pretrained, preset, settings)
        self.llm = self.config.make_llm(workers=workers, revision=revision)
        if (tokenizer := self.llm.tokenizer) is None:
            raise ConfigError(
                f"model_args.model={self.config.model}: it has no tokenizer, and tasks are texts"
            )
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.max_gen_toks, self._add_bos_token = max_gen_toks, add_bos_token
        self._prefix_token_id, self._think_end_token = prefix_token_id, think_end_token
        self._chat_template_args = chat_template_args or {}

    @property
    def max_length(self) -> int:
        """Tokens that the model can read at once."""
        return self.llm.engine.max_model_len

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        for token in (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ConfigError("the tokenizer has neither BOS nor EOS; give model_args.prefix_token_id")

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path or self.config.model).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; of one whose system message the template refuses, without that."""

        def render(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._chat_template_args,
                )
            )

        try:
            return render(chat_history)
        except TemplateError:
            _log.warning("the chat template refuses a conversation: system messages are left out")
            return render([message for message in chat_history if message["role"] != "system"])

    def get_model_info(self) -> dict[str, Any]:
        """What the harness puts beside its results."""
        plan = self.config.speculative
        return {
            "hispec_version": __version__,
            "model_speculative": None if plan is None else plan.model_dump(mode="json", exclude_unset=True),
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_more: Any) -> list[int]:
        """Token ids of a text; without special tokens if it begins with the prefix token, as texts of chat
        templates do."""
        if add_special_tokens is None:
            has_begun = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
            add_special_tokens = False if has_begun else self._add_bos_token
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to the first of its stop strings. Raises ConfigError for
        generation_kwargs that HiSpec does not have, and RequestError if a request fails: a benchmark with
        holes would look like a worse model."""
        prompts: list[dict[str, Any]] = []
        params, stops, num_cut = [], [], 0
        for request in requests:
            context, given = request.args
            sampling, until = self._sampling(given)
            assert sampling.max_tokens is not None
            if (room := self.max_length - sampling.max_tokens) < 1:
                raise ConfigError(
                    f"generation_kwargs.max_gen_toks={sampling.max_tokens} leaves no room for a prompt in"
                    f" max_model_len={self.max_length}; choose at most {self.max_length - 1}"
                )
            tokens = self.tok_encode(context) or [self.prefix_token_id]
            num_cut += len(tokens) > room
            prompts.append({"prompt_token_ids": tokens[-room:]})
            params.append(sampling)
            stops.append(until)
        if num_cut:
            _log.warning(
                "%d of %d contexts are cut at their beginning: with max_gen_toks they are longer than"
                " max_model_len=%d",
                num_cut,
                len(prompts),
                self.max_length,
            )
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm) if prompts else []
        texts = []
        for request, output, until in zip(requests, outputs, stops, strict=True):
            if output.error is not None:
                raise RequestError(f"{output.request_id}: {output.error}")
            text = postprocess_generated_text(output.outputs[0].text, until, self._think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of max_length."""
        windows: list[_Request] = []
        counts = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text: list[_Request] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += of_text
            counts.append(len(of_text))
        each = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [math.fsum(next(each)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[_Request], disable_tqdm: bool = False, **_more: Any
    ) -> list[tuple[float, bool]]:
        """(sum of log-probabilities, whether greedy decoding writes it) of each continuation, after as much
        of the end of its context as max_length holds."""
        prompts, continuations = [], []
        for _texts, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(continuation)} tokens, but max_model_len={self.max_length} must"
                    " hold it but for its last, and one token before it; raise engine.max_model_len"
                )
            room = self.max_length + 1 - len(continuation)  # the last token is not read
            prompts.append(context[-room:])
            continuations.append(continuation)
        scores = self.llm.score(prompts, continuations, use_tqdm=not disable_tqdm)
        if errors := [score.error for score in scores if score.error is not None]:
            raise RequestError(f"{len(errors)} of {len(scores)} continuations have no score: {errors[0]}")
        answers = [(math.fsum(score.logprobs), score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _sampling(self, given: dict[str, Any]) -> tuple[SamplingParams, list[str]]:
        """What generation_kwargs ask for, by the harness's rules, and the strings that end the text. Raises
        ConfigError."""
        kwargs = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos, eos_id = None, self.eot_token_id
        if eos_id is not None:
            eos, kwargs["stop_token_ids"] = str(self.tokenizer.decode([eos_id])), [eos_id]
        until = [text for text in handle_stop_sequences(kwargs.pop("until"), eos) if text]
        # What stands before the end of thinking must not end the answer.
        kwargs["stop"] = [] if self._think_end_token else until
        kwargs["max_tokens"] = kwargs.pop("max_gen_toks")
        kwargs["temperature"] = float(kwargs.get("temperature", 1.0)) if kwargs.pop("do_sample") else 0.0
        if (beams := kwargs.pop("num_beams", 1)) != 1:
            raise ConfigError(f"generation_kwargs.num_beams={shown(beams)}: HiSpec has no beam search")
        return SamplingParams.of(kwargs, "generation_kwargs"), until


def make_config(model: str | None, preset: str | Path | None, settings: dict[str, Any]) -> RunConfig:
    """How model_args say that a model is to run. Raises ConfigError with all that is wrong."""
    values = {} if preset is None else load_preset(preset).model_dump(exclude_unset=True)
    overrides = []
    for name, value in settings.items():
        place = f"engine.{name}" if name in EngineConfig.model_fields else name
        if place.partition(".")[0] == "sampling":
            raise ConfigError(f"model_args.{name}: sampling is said by tasks, and by --gen_kwargs")
        plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        overrides.append(f"{place}={plain if isinstance(plain, str) else json.dumps(plain)}")
    try:
        apply_overrides(values, overrides)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--set", "model_args:", 1)) from None
    return build(RunConfig, {**values, **({} if model is None else {"model": model})}, "model_args")


def main() -> None:
    """The harness's own command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


# Versions of the harness that look for plug-ins have it by the entry point; for the others, by its name.
if "hispec" not in model_registry:
    model_registry.register("hispec", target="hispec.integrations.lm_eval:HiSpecLM")

if __name__ == "__main__":
    main()
