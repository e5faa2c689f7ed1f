"""Writes a drafter of noise in the shape of another one: python scripts/random_drafter.py DRAFTER OUT

Speculation must give the target's own text for any drafter; this is the worst one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def main() -> None:
    source, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True)
    shutil.copyfile(source / "config.json", output / "config.json")
    generator = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    noise = {name: (0.05 * generator.standard_normal(tensor.shape)).astype(tensor.dtype) for name, tensor in sorted(tensors.items())}
    save_file(noise, output / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
