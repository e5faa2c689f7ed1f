"""A corpus of bad checkpoints: named mutations of tiny good pairs, and what the one error about each must name.

    bad = write_good_pairs(tmp_path / "good")        # once
    write(case, good, folder)                        # folder/target and folder/drafter, one of them bad
    python -m tests.support.bad_checkpoints FOLDER   # opens FOLDER/* under a limit of memory, one line of JSON for each

The cases: `bad_files.py` (bytes, headers, links, sizes) and `bad_configs.py` (config.json and pairing).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS, INDEX, CONFIG, GENERATION = "model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"

# A third of it is torch-free Python with the tables of a 16 MiB header; a declared size of gigabytes does not fit.
MEMORY_BYTES = 3 * 2**29


@dataclass(frozen=True)
class Bad:
    """One bad pair.

    Attributes:
        name: its class, a slash, and what is wrong.
        culprit: "target" or "drafter", whose folder is changed.
        mutate: what makes the folder of the culprit bad.
        items: what the message must name.
        base: which good pair it is made of, a key of `GOOD`.
        error: name of the error's class.
    """

    name: str
    culprit: str
    mutate: Callable[[Path], object]
    items: tuple[str, ...]
    base: str = "plain"
    error: str = "CheckpointError"

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


# What the pairs are of; each is as good a pair as any, and a control.
GOOD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sharded": ({"shards": 2}, {"shards": 2}),
    "untied": ({"tied": False}, {}),
    "qwen3": ({"family": "qwen3", "dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "flat": ({}, {"layout": "flat"}),
    "dflash": ({}, {"kind": "dflash"}),
    "padded": ({"vocab_size": 320}, {"mask_token_id": 299}),
}


def write_good_pairs(folder: Path) -> Path:
    """One folder with `target` and `drafter` for each of `GOOD`."""
    from tests.support.checkpoints import write_drafter, write_target

    for name, (target, drafter) in GOOD.items():
        place = folder / name / "target"
        write_target(place, num_hidden_layers=4, **target)
        write_drafter(folder / name / "drafter", place, num_hidden_layers=1, **drafter)
    return folder


def write(case: Bad, good: Path, folder: Path) -> None:
    """The pair of `case` as folder/target and folder/drafter."""
    for role in ("target", "drafter"):  # the other one is not written to
        copy = shutil.copyfile if role == case.culprit else os.link
        shutil.copytree(good / case.base / role, folder / role, copy_function=copy)
    case.mutate(folder / case.culprit)


def rewritten(name: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A mutation that edits a JSON file of the folder."""

    def mutate(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        edit(content)
        path.write_text(json.dumps(content))

    return mutate


def open_pair(folder: Path) -> None:
    """What `domino-deploy export` does first."""
    from domino_deploy.checkpoint import open_drafter, open_target
    from domino_deploy.pairing import check_pairing

    target, drafter = open_target(folder / "target"), open_drafter(folder / "drafter")
    check_pairing(target.config, drafter.config)


def _open_all(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for pair in sorted(folder.iterdir(), key=lambda pair: pair.name):
        start, found = time.process_time(), ("", "")
        try:
            open_pair(pair)
        except Exception as error:  # whatever it is, it is what the test looks at
            found = type(error).__name__, str(error)
        print(json.dumps([pair.name, *found, time.process_time() - start]), flush=True)


if __name__ == "__main__":
    _open_all(Path(sys.argv[1]))
