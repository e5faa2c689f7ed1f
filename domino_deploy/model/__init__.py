"""The PyTorch models, written for export: plain tensors in, plain tensors out."""
