"""The model families that the decoder runs, one `Family` each, and the settings that it refuses in all.

To add a family of Llama's shape, add an entry to `FAMILIES`, here or from a module of your own
(docs/extending.md). What an entry cannot say needs code:
`decoder.py` for the layer, `kernels/` for its arithmetic, `checkpoint/weights.py` for tensors of other names
or shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .errors import unsupported


@dataclass(frozen=True)
class Family:
    """One architecture of transformers: what its code fixes, whatever a checkpoint's config says.

    architecture      class name, as config.json lists it under `architectures`
    model_type        as config.json has it
    config_class      transformers' class for its config
    qkv_bias          whether q_proj, k_proj and v_proj have biases; None: if the config sets attention_bias
    output_bias       the same of o_proj
    mlp_bias          the same of gate_proj, up_proj and down_proj; None: if the config sets mlp_bias
    qk_norm           whether each head's queries and keys pass an RMS norm ahead of the rotary embedding
    all_layers_slide  whether sliding_window is that of every layer; otherwise `layer_types` says of which
    gguf_name         general.architecture of its GGUF files; None where none name it (Mistral's say "llama")
    gguf_interleaved  whether llama.cpp's converter puts the two dimensions of a rotated pair side by side
    """

    architecture: str
    model_type: str
    config_class: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    all_layers_slide: bool = False
    gguf_name: str | None = None
    gguf_interleaved: bool = False


FAMILIES: list[Family] = [
    Family(
        "LlamaForCausalLM", "llama", "LlamaConfig", mlp_bias=None, gguf_name="llama", gguf_interleaved=True
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        "MistralConfig",
        qkv_bias=False,
        output_bias=False,
        all_layers_slide=True,
    ),
    Family("Qwen2ForCausalLM", "qwen2", "Qwen2Config", qkv_bias=True, output_bias=False, gguf_name="qwen2"),
    Family("Qwen3ForCausalLM", "qwen3", "Qwen3Config", qk_norm=True, gguf_name="qwen3"),
]
OWN_FAMILIES = tuple(FAMILIES)  # before any is added by a program

# Fields of a config that change what a layer computes, with the values under which the decoder computes the
# same; unset is always one of them. Extra norms and attention sinks are told by their tensors, which
# `checkpoint.weights.check_tensors` refuses; rotary embeddings by `rope.read_rope`.
SUPPORTED_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "no_rope_layers": ([],),
    "alibi": (False,),
    "use_parallel_residual": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
}
# The same of a GGUF file's metadata, under the prefix of its architecture.
SUPPORTED_GGUF_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
}


def find_family(architectures: object, model_type: object) -> Family:
    """The family that a config names in `architectures`; `model_type` decides where that is empty.

    Otherwise both must agree: a known class over an unknown type is a variant that brings code of its own.
    Raises UnsupportedModelError.
    """
    if not architectures:
        return _find("model_type", model_type, {family.model_type: family for family in FAMILIES})
    name = architectures[0] if isinstance(architectures, list | tuple) else architectures
    family = _find("architectures", name, {family.architecture: family for family in FAMILIES})
    if model_type not in (None, family.model_type):
        raise unsupported("model_type", model_type, f"{family.model_type!r} for {family.architecture}")
    return family


def find_gguf_family(name: object) -> Family:
    """The family of GGUF files whose general.architecture is `name`. Raises UnsupportedModelError."""
    known = {family.gguf_name: family for family in FAMILIES if family.gguf_name is not None}
    return _find("general.architecture", name, known)


def check_settings(
    read: Callable[[str], object], supported: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raises UnsupportedModelError for the first field of `supported` that has another value than those given
    there. `read(prefix + field)` is a field's value, None where it is unset."""
    for field, values in supported.items():
        found = read(prefix + field)
        if found not in (None, *values):
            raise unsupported(prefix + field, found, " or ".join(map(repr, values)) or "unset")


def _find(field: str, value: object, known: Mapping[str, Family]) -> Family:
    if not isinstance(value, str) or value not in known:
        raise unsupported(field, value, ", ".join(known))
    return known[value]
