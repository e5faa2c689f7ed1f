"""Identity of the custom operator: the only place where these strings exist."""

from __future__ import annotations

DOMAIN = "domino"
NAME = "FusedLogitCorrection"
VERSION = "1"
# Without the attribute of this name TensorRT takes the function body even if the plugin is registered.
NAMESPACE_ATTRIBUTE = "plugin_namespace"
DOMAIN_OPSET = 1

INPUTS = ("base_logits", "hidden_projection", "state_projection", "codebook")
OUTPUTS = ("token_ids", "corrected_logits")
