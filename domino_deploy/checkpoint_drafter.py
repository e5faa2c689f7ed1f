"""config.json of a Domino or plain DFlash drafter -> DrafterConfig.

The drafter's own fields stand under `dflash_config`, under `domino_config` (SpecForge has written both) or at top level.
`projector_type` decides: "domino" or its alias "causal_v5" is a Domino drafter, none is plain DFlash, any other is refused.
A Domino drafter must state `shift_label`, `pure_draft_prefix_len`, `emb_dim` and `gru_hidden_dim`: public checkpoints differ
in them, and a wrong guess raises no error, it only costs acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_deploy.checkpoint_config import architectures, build, decoder_values, is_drafter
from domino_deploy.config import DrafterConfig, DrafterKind
from domino_deploy.config_fields import Fields, shown, shown_key
from domino_deploy.errors import CheckpointError
from domino_deploy.strict_json import JsonObject

_NESTS = ("dflash_config", "domino_config")
_ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel")
_DOMINO_NAMES = ("domino", "causal_v5")
_HEAD_FIELDS = ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim")
NEVER_AS_DFLASH = "a Domino checkpoint must never run as plain DFlash"

_KNOWN = frozenset(
    {"projector_type", "mask_token_id", "target_layer_ids", "block_size", "num_target_layers"}
    | {"shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"}
)
# Variants of the drafter that change the maths, each with the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_bias_gate": (False,),
    "use_bias_norm": (False,),
    "use_correction_target_fusion": (False,),
    "use_aux_hidden_state": (True,),
    "attention_mode": ("gqa",),
    "is_causal": (False,),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (),
}


def drafter_config(raw: JsonObject, where: str) -> DrafterConfig:
    """Parse a drafter's config.json; `where` names it in errors.

    Raises:
        CheckpointError: every missing, mistyped, contradictory, unsupported or out-of-range field.
    """
    if not is_drafter(raw):
        found = ", ".join(architectures(raw)) or raw.get("model_type") or "no architecture"
        raise CheckpointError(
            f"{where}: expected a Domino or DFlash drafter, found no dflash_config and no other field of a drafter ({shown(found)}): "
            "this looks like a target. Pass it as the target, and a drafter here."
        )
    problems: list[str] = []
    fields = _drafter_fields(raw, problems)
    values = decoder_values(raw, Fields([("", raw)], problems))
    _refuse_other_architectures(raw, fields)
    kind = _kind(raw, fields)
    bias = fields.boolean("attention_bias", default=False)
    target_layers = fields.integer("num_target_layers")
    values |= {
        "kind": kind,
        "has_qk_norm": True,
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "block_size": fields.integer("block_size", minimum=2),
        "num_target_layers": target_layers,
        "target_layer_ids": fields.integers("target_layer_ids", default=default_target_layer_ids(values["num_layers"], target_layers)),
        "mask_token_id": fields.integer("mask_token_id", minimum=0),
    }
    if kind is DrafterKind.DOMINO:
        values |= {
            "shift_label": fields.boolean("shift_label"),
            "pure_draft_prefix_len": fields.integer("pure_draft_prefix_len", minimum=0),
            "emb_dim": fields.integer("emb_dim"),
            "gru_hidden_dim": fields.integer("gru_hidden_dim"),
        }
    else:
        values["shift_label"] = fields.boolean("shift_label", default=False)
    values |= _sliding(raw, values["num_layers"], problems)
    return build(DrafterConfig, values, problems, where)


def default_target_layer_ids(count: int, target_layers: int) -> tuple[int, ...]:
    """Tapped layers spread evenly from layer 1 to the third from the top (DFlash); a config that names none means one per draft layer."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def has_room_for_taps(count: int, target_layers: int) -> bool:
    """Whether `default_target_layer_ids` names layers that the target has, rising as a drafter's must."""
    if count > target_layers:
        return False
    layers = default_target_layer_ids(count, target_layers)
    return layers[0] >= 0 and list(layers) == sorted(set(layers))


def _drafter_fields(raw: JsonObject, problems: list[str]) -> Fields:
    places = []
    for nest in _NESTS:
        value = raw.get(nest)
        if isinstance(value, dict):
            places.append((nest, value))
            # At top level transformers and trainers keep their own book; in here every key describes the drafter.
            problems += [f"{nest}.{shown_key(name)} is not supported" for name in sorted(value.keys() - _KNOWN - _NEUTRAL.keys())]
        elif value is not None:
            problems.append(f"{nest} must be an object, found {shown(value)}")
    fields = Fields([*places, ("", raw)], problems)
    fields.neutral_only(_NEUTRAL)
    return fields


def _refuse_other_architectures(raw: JsonObject, fields: Fields) -> None:
    names = architectures(raw)
    if names and not set(names) & set(_ARCHITECTURES):
        fields.problems.append(f"architectures {shown(list(names))} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    fields.neutral_only({"model_type": ("qwen3",), "draft_vocab_size": (raw.get("vocab_size"),)})
    if "transformer_layer_config" in raw:
        fields.problems.append("transformer_layer_config is present: the speculators format is not supported")


def _kind(raw: JsonObject, fields: Fields) -> DrafterKind:
    name = fields.value("projector_type")
    if name is None:
        signs = [name for name in _HEAD_FIELDS if fields.value(name) is not None]
        signs += {"DominoDraftModel"} & set(architectures(raw))
        if signs:
            fields.problems.append(
                f"projector_type is absent, which means plain DFlash, but {', '.join(signs)} says Domino: {NEVER_AS_DFLASH}"
            )
        return DrafterKind.DFLASH
    if name not in _DOMINO_NAMES:
        accepted = ", ".join(_DOMINO_NAMES)
        fields.problems.append(f"projector_type {shown(name)} is not supported; supported are {accepted}, or none for plain DFlash")
    return DrafterKind.DOMINO


def _sliding(raw: JsonObject, layers: int, problems: list[str]) -> dict[str, Any]:
    fields = Fields([("", raw)], problems)
    layer_types, use = fields.value("layer_types"), fields.boolean("use_sliding_window", default=None)
    if layer_types is None:
        if use:
            problems.append("use_sliding_window is true, but layer_types does not say for which layers")
        return {}
    if not isinstance(layer_types, list) or any(kind not in ("full_attention", "sliding_attention") for kind in layer_types):
        problems.append(f"layer_types must be a list of 'full_attention' and 'sliding_attention', found {shown(layer_types)}")
        return {}
    if len(layer_types) != layers:
        problems.append(f"layer_types must have one entry per layer ({layers}), found {len(layer_types)}")
    sliding = tuple(kind == "sliding_attention" for kind in layer_types)
    if not any(sliding):
        return {}
    if raw.get("use_sliding_window") is False:
        problems.append("contradiction: layer_types has sliding_attention, but use_sliding_window is false")
    return {"sliding_layers": sliding, "sliding_window": fields.integer("sliding_window")}
