"""Training prompts: files, packaged sets, roles, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from domino_deploy.errors import RequestError, TrainingError
from domino_deploy.training.prompt_file import PACKAGED, packaged, read_conversations
from domino_deploy.training.prompts import is_held_out
from tests.support.regeneration import write_lines


class TestPromptFiles:
    def test_all_forms_are_read_with_their_kinds(self, tmp_path: Path) -> None:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
        chat += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        records = ({"prompt": "p", "kind": "code"}, {"turns": ["t", "second"]}, {"messages": chat, "kind": "chat"})
        found = read_conversations(write_lines(tmp_path / "p.jsonl", *records))
        assert [one.messages for one in found] == [[{"role": "user", "content": "p"}], [{"role": "user", "content": "t"}], chat]
        assert [one.kind for one in found] == ["code", "", "chat"]

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("", "at least one prompt"),
            ("not json\n", "line 1"),
            ('{"prompt": ""}\n', "line 1"),
            ('{"text": "hello"}\n', "line 1"),
            ('["hello"]\n', "line 1"),
            ('{"prompt": "a"}\n{"turns": [1]}\n', "line 2"),
            ('{"prompt": "a", "kind": 3}\n', 'line 1: expected "kind" to be a string, found 3'),
            ('{"messages": []}\n', "line 1"),
            ('{"messages": ["hi"]}\n', 'line 1: message 1: expected an object with "role" and "content"'),
            ('{"messages": [{"role": "user", "content": ["hi"]}]}\n', "line 1: message 1"),
            (
                '{"messages": [{"role": "user", "content": "x"}, {"role": "robot", "content": "hi"}]}\n',
                'line 1: message 2: expected a role out of system, user, assistant, found "robot"',
            ),
            ('{"messages": [{"content": "hi"}]}\n', "message 1: expected a role .* found null"),
            ('{"messages": [{"role": {"a": 1}, "content": "hi"}]}\n', "message 1: expected a role"),
            ('{"messages": [{"role": "assistant", "content": "hi"}]}\n', "last message to be the user's, found role 'assistant'"),
            ('{"messages": [{"role": "user", "content": " "}]}\n', "last message to be the user's, found an empty one"),
        ],
    )
    def test_lines_that_cannot_be_used_are_named(self, tmp_path: Path, text: str, found: str) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(text)
        with pytest.raises(TrainingError, match=found):
            read_conversations(path)

    def test_every_bad_line_is_named_at_once(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": 1}, {"messages": [{"role": "tool", "content": "x"}]})
        with pytest.raises(TrainingError, match=r"(?s)p\.jsonl: 2 line\(s\) .*line 2: .*line 3: "):
            read_conversations(path)

    def test_a_line_separator_inside_a_prompt_does_not_end_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
        [found] = read_conversations(path)
        assert found.messages == [{"role": "user", "content": "one\u2028two"}]

    @pytest.mark.parametrize(
        ("content", "found"),
        [(None, "No such file"), (b"\xff\n", "utf-8"), (b"[" * 100_000, "line 1: .*recursion")],
        ids=["missing", "not UTF-8", "nested"],
    )
    def test_a_file_that_cannot_be_read_is_refused(self, tmp_path: Path, content: bytes | None, found: str) -> None:
        path = tmp_path / "prompts.jsonl"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TrainingError, match=found):
            read_conversations(path)

    @pytest.mark.parametrize("name", PACKAGED)
    def test_packaged_sets_are_training_prompts_of_their_kind(self, name: str) -> None:
        found = packaged(f"{name}:30")
        assert [one.kind for one in found] == [name] * 30
        assert len(packaged(name)) > 300
        if name not in ("templated-code", "story-problems"):  # held out by task in all phrasings; for training only
            assert not any(is_held_out(one.messages[0]["content"]) for one in found)

    @pytest.mark.parametrize(
        "name", ["", "code", "word-problems:", "word-problems:0", "short-chat:-1", "short-chat:1.5", "short-chat:²", "short-chat:9999999"]
    )
    def test_unknown_kinds_and_counts_are_refused(self, name: str) -> None:
        with pytest.raises(RequestError, match="--kind"):
            packaged(name)
