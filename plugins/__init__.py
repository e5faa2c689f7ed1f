"""The fused logit correction: its identity, its reference and its PyTorch operator."""
