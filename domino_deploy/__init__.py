"""Domino speculative decoding in production: export, verify, run."""

__version__ = "0.1.0"
