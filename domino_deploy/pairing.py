"""Does this drafter belong to this target?  Every mismatch is named at once."""

from __future__ import annotations

from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.errors import PairingError, listed


def check_pairing(target: TargetConfig, drafter: DrafterConfig) -> dict[str, object]:
    """The facts that tie the two together, for a bundle's manifest.

    The drafter embeds with the target's embedding, projects with its LM head and reads the outputs of its layers, so
    vocabulary, width and depth must agree.  Rotary settings and positions are the drafter's own: its attention is its own too.

    Raises:
        PairingError: every field in which they disagree, with both values.
    """
    problems = []
    if drafter.vocab_size != target.vocab_size:
        problems.append(
            f"vocab_size: drafter {drafter.vocab_size}, target {target.vocab_size} (the LM head is shared; rows of padding count)"
        )
    if drafter.hidden_size != target.hidden_size:
        problems.append(
            f"hidden_size: drafter {drafter.hidden_size}, target {target.hidden_size} (embedding, LM head and features are the target's)"
        )
    if drafter.num_target_layers != target.num_layers:
        problems.append(f"num_target_layers: drafter was trained on {drafter.num_target_layers}, target has {target.num_layers}")
    outside = [layer for layer in drafter.target_layer_ids if layer >= target.num_layers]
    if outside:
        problems.append(f"target_layer_ids: {outside} lie outside the target's layers 0..{target.num_layers - 1}")
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(f"mask_token_id: {drafter.mask_token_id} lies outside the target's embedding of {target.vocab_size} rows")
    for name, token_ids in (("eos", target.eos_token_ids), ("bos", (target.bos_token_id,))):
        if drafter.mask_token_id in token_ids:
            problems.append(
                f"mask_token_id: {drafter.mask_token_id} is the target's {name} token, which its text holds; a mask is none of them"
            )
    if problems:
        advice = "Use the target that the drafter was trained on."
        raise PairingError(listed(f"drafter and target do not belong together: {len(problems)} mismatch(es)", problems, advice))
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(drafter.target_layer_ids),
        "feature_size": drafter.feature_size,
        "mask_token_id": drafter.mask_token_id,
        "max_position_embeddings": min(target.max_position_embeddings, drafter.max_position_embeddings),
    }
