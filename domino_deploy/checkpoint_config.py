"""config.json of a target -> TargetConfig, and what a drafter's config.json shares with it.

Field names are those of transformers' LlamaConfig, Qwen2Config and Qwen3Config.  A setting that would change the maths and
is not honoured is refused by name; other keys that transformers or trainers write are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from domino_deploy.config import DecoderConfig, Family, RopeConfig, RopeType, TargetConfig
from domino_deploy.config_fields import REQUIRED, Fields, shown, shown_key
from domino_deploy.errors import CheckpointError, listed, shortened
from domino_deploy.strict_json import JsonObject

ConfigT = TypeVar("ConfigT", bound=DecoderConfig)

_ADVICE = "Correct config.json, or use another checkpoint."
_MOST_PROBLEMS = 50

# More layers than any published model; bounds the work that a made-up number can cause.
_MAX_LAYERS = 1024

# Settings of related architectures that change the maths, each with the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "output_multiplier": (1,),
    "input_embedding_scale": (1,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "is_encoder_decoder": (False,),
}

_DRAFTER_KEYS = ("dflash_config", "domino_config", "target_layer_ids", "projector_type", "speculators_config")

_ROPE_KEYS = frozenset(
    {"rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
    | {"attention_factor", "original_max_position_embeddings", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"}
)
_DEFAULT_THETA = 10000.0  # of LlamaConfig, Qwen2Config and Qwen3Config when the field is absent


def target_config(raw: JsonObject, where: str, generation: JsonObject | None = None) -> TargetConfig:
    """Parse a target's config.json.

    Args:
        raw: config.json.
        where: names it in errors.
        generation: generation_config.json, whose end-of-sequence ids win, as they do in transformers.

    Raises:
        CheckpointError: every missing, mistyped, contradictory, unsupported or out-of-range field.
    """
    if is_drafter(raw):
        raise CheckpointError(
            f"{where}: expected a target, found a drafter ({_evidence(raw)}). "
            "Pass the target model here, and this checkpoint as the drafter."
        )
    problems: list[str] = []
    fields = Fields([("", raw)], problems)
    family = _family(fields)
    values = decoder_values(raw, fields)
    bias = family is not Family.QWEN2 and fields.boolean("attention_bias", default=False)
    fields.neutral_only({"use_sliding_window": (False,)})
    _refuse_sliding_layers(fields)
    eos_token_ids = _token_ids(Fields([("", generation or {})], problems), "eos_token_id") or _token_ids(fields, "eos_token_id")
    values |= {
        "family": family,
        "has_qk_norm": family is Family.QWEN3,
        "has_qkv_bias": bias or family is Family.QWEN2,
        "has_output_bias": bias,
        "has_mlp_bias": family is Family.LLAMA and fields.boolean("mlp_bias", default=False),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "bos_token_id": next(iter(_token_ids(fields, "bos_token_id")), None),
        "eos_token_ids": eos_token_ids,
    }
    return build(TargetConfig, values, problems, where)


def decoder_values(raw: JsonObject, fields: Fields) -> dict[str, Any]:
    """The arguments of DecoderConfig that a target and a drafter name alike; problems go to `fields`."""
    fields.neutral_only(_NEUTRAL)
    if "text_config" in raw or "vision_config" in raw:
        fields.problems.append("text_config or vision_config is present: multimodal checkpoints are not supported")
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": width,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", default=heads),
        # Not hidden_size / heads where the config says otherwise: Qwen3's heads are wider.
        "head_dim": fields.integer("head_dim", default=max(width // heads, 1)),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope": _rope_values(raw, fields.problems),
    }


def is_drafter(raw: JsonObject) -> bool:
    """Whether a config.json describes a drafter rather than a language model of its own."""
    return any(raw.get(key) is not None for key in _DRAFTER_KEYS) or any(name.endswith("DraftModel") for name in architectures(raw))


def architectures(raw: JsonObject) -> tuple[str, ...]:
    names = raw.get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def build(config_class: type[ConfigT], values: Mapping[str, Any], problems: list[str], where: str) -> ConfigT:
    """The config made of `values`, unless reading them met `problems` or the config itself finds some."""
    if problems:
        distinct = list(dict.fromkeys(problems))
        raise CheckpointError(listed(f"{where}: {len(distinct)} problem(s)", shortened(distinct, most=_MOST_PROBLEMS), _ADVICE))
    try:
        return config_class(**{**values, "rope": RopeConfig(**values["rope"])})
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _evidence(raw: JsonObject) -> str:
    return ", ".join([*(shown(name) for name in architectures(raw)[:3]), *(key for key in _DRAFTER_KEYS if raw.get(key) is not None)])


def _family(fields: Fields) -> Family:
    name = fields.text("model_type")
    if name not in tuple(Family):
        if name:
            fields.problems.append(f"model_type {shown(name)} is not supported; supported are {', '.join(Family)}")
        return Family.LLAMA
    return Family(name)


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """An id, a list of ids or nothing."""
    value = fields.value(name)
    return fields.integers(name, default=()) if value is None or isinstance(value, list) else (fields.integer(name, minimum=0),)


def _refuse_sliding_layers(fields: Fields) -> None:
    layer_types = fields.value("layer_types", default=[])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        fields.problems.append(f"layer_types of a target may hold only 'full_attention', found {shown(layer_types)}")


def _rope_values(raw: JsonObject, problems: list[str]) -> dict[str, Any]:
    """The arguments of RopeConfig."""
    places = []
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if isinstance(value, dict):
            places.append((key, value))
            problems += [f"{key}.{shown_key(name)} is not supported" for name in sorted(value.keys() - _ROPE_KEYS)]
        elif value is not None:
            problems.append(f"{key} must be an object, found {shown(value)}")
    theta = Fields([*places, ("", raw)], problems).number("rope_theta", default=_DEFAULT_THETA, minimum=1.0)
    fields = Fields(places, problems)
    scaling = _rope_type(fields)
    # All three would change YaRN's result, and no checkpoint of the supported families sets them.
    fields.neutral_only({"mscale": (), "mscale_all_dim": (), "truncate": (True,), "partial_rotary_factor": (1,)})
    values: dict[str, Any] = {"theta": theta, "type": scaling}
    if scaling is RopeType.DEFAULT:
        fields.neutral_only({"factor": (1,)})
    else:
        values["factor"] = fields.number("factor")
    if scaling is RopeType.LLAMA3:
        values |= {name: fields.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if scaling is RopeType.YARN:
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}  # transformers' own
        values |= {name: fields.number(name, default=default) for name, default in defaults.items()}
    if scaling in (RopeType.LLAMA3, RopeType.YARN):
        values["original_max_position_embeddings"] = fields.integer("original_max_position_embeddings")
    return values


def _rope_type(fields: Fields) -> RopeType:
    has_factor = fields.value("factor") is not None
    name = fields.value("rope_type", "type", default=REQUIRED if has_factor else RopeType.DEFAULT.value)
    if name is None:
        return RopeType.DEFAULT
    if name not in tuple(RopeType):
        fields.problems.append(f"rope scaling {shown(name)} is not supported; supported are {', '.join(RopeType)}")
        return RopeType.DEFAULT
    return RopeType(name)
