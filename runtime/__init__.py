"""Decode time: a bundle opened by a backend, and lossless speculative generation with it; numpy alone outside `backends/`."""
