"""Identity of the custom operators: the only place where these strings exist.

The fused correction looks at the whole vocabulary; the pooled one at a candidate pool, and says whether that was enough.
"""

from __future__ import annotations

DOMAIN = "domino"
NAME = "FusedLogitCorrection"
POOLED_NAME = "PooledLogitCorrection"
VERSION = "1"
# Without the attribute of this name TensorRT takes the function body even if the plugin is registered.
NAMESPACE_ATTRIBUTE = "plugin_namespace"
# Of the pooled operator: 1 to look at every token that could beat the pool's winner as well, 0 to take that winner.
EXACT_ATTRIBUTE = "exact"
DOMAIN_OPSET = 1

INPUTS = ("base_logits", "hidden_projection", "state_projection", "codebook")
OUTPUTS = ("token_ids", "corrected_logits")
POOLED_INPUTS = (*INPUTS, "codebook_mean", "deviations", "candidates")
POOLED_OUTPUTS = (*OUTPUTS, "uncertified")
