"""Identity of the custom operators: the only place where these strings exist.

`FusedLogitCorrection` looks at the whole vocabulary and gives one token; `TopKLogitCorrection` gives the k best, with log-probabilities;
`PooledLogitCorrection` looks at a candidate pool, and says whether that was enough.  `LogitCorrectionTiles` is the first half of the
fused one, for a plugin that is a single kernel launch: the best token of every tile of the vocabulary.

TensorRT and TensorRT-RTX build no TopK of more than `MAX_TOP_K`: they accept such a graph and fail when the engine is built
("K exceeds the maximum value allowed").  So a larger k is refused where a graph is made.
"""

from __future__ import annotations

DOMAIN = "domino"
NAME = "FusedLogitCorrection"
TOP_K_NAME = "TopKLogitCorrection"
POOLED_NAME = "PooledLogitCorrection"
TILES_NAME = "LogitCorrectionTiles"
VERSION = "1"
# Without the attribute of this name TensorRT takes the function body even if the plugin is registered.
NAMESPACE_ATTRIBUTE = "plugin_namespace"
# Of the pooled operator: 1 to look at every token that could beat the pool's winner as well, 0 to take that winner.
EXACT_ATTRIBUTE = "exact"
# Of the top-k operator: how many tokens, 1 to `MAX_TOP_K` and at most the vocabulary's.
K_ATTRIBUTE = "k"
DOMAIN_OPSET = 1

MAX_TOP_K = 3840
# Rows of the vocabulary that one tile covers; the last tile may be shorter.
TILE_SIZE = 128

INPUTS = ("base_logits", "hidden_projection", "state_projection", "codebook")
OUTPUTS = ("token_ids", "corrected_logits")
TOP_K_OUTPUTS = (*OUTPUTS, "log_probs")
POOLED_INPUTS = (*INPUTS, "codebook_mean", "deviations", "candidates")
POOLED_OUTPUTS = (*OUTPUTS, "uncertified")
TILES_OUTPUTS = ("tile_values", "tile_ids")
