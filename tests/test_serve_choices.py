"""What `domino-deploy serve` makes of its flags, and what it says of them at the start, without serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from domino_deploy.cli import main
from domino_deploy.cli.ranges import TokenCount
from domino_deploy.server.sampling_defaults import described
from tests.support.serve_command import invoke


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    from domino_deploy.runtime.engine import Engine
    from domino_deploy.server import run

    found: dict[str, Any] = {}
    real = Engine.open.__func__  # type: ignore[attr-defined]

    def open_engine(cls: type[Engine], bundle: Path, **choices: Any) -> Engine:
        found.update(choices)
        engine: Engine = real(cls, bundle, **choices)
        return engine

    def serve(app: Any, listening: Any, *, announce: Callable[[], None]) -> int:
        found["server"] = app.state.server.settings
        announce()
        return 0

    monkeypatch.setattr(Engine, "open", classmethod(open_engine))
    monkeypatch.setattr(run, "run", serve)
    return found


@pytest.fixture(autouse=True)
def logging_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)


@pytest.mark.parametrize(
    ("flags", "drafter", "count"),
    [
        ([], "bundle", None),
        (["--no-speculation"], "none", None),
        (["--num-speculative-tokens", "2"], "bundle", 2),
        (["--speculative-config", '{"method": "domino", "num_speculative_tokens": 3}'], "bundle", 3),
        (["--speculative-config", '{"method": "ngram"}'], "prompt-lookup", None),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'],
            "prompt-lookup",
            3,
        ),
    ],
)
def test_speculation(tiny_bundle: Path, opened: dict[str, Any], flags: list[str], drafter: str, count: int | None) -> None:
    done = invoke(tiny_bundle, "--port", 0, *flags)
    assert done.exit_code == 0, done.output
    assert (opened["drafter"], opened["settings"].num_speculative_tokens) == (drafter, count)


def test_a_flag_that_the_environment_sets_to_false_asks_for_nothing(
    tiny_bundle: Path, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOMINO_DEPLOY_SERVE_NO_SPECULATION", "false")
    done = invoke(tiny_bundle, "--port", 0, "--drafter", "prompt-lookup")
    assert done.exit_code == 0, done.output
    assert opened["drafter"] == "prompt-lookup"


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (["--num-speculative-tokens", "40"], "the drafter drafts 6 at most; --num-speculative-tokens 40 is the same as 6."),
        (["--num-speculative-tokens", "6"], None),
        (["--num-speculative-tokens", "3", "--no-speculation"], "plain decoding drafts 0 at most"),
        (["--speculative-config", '{"num_speculative_tokens": 40}'], "--speculative-config's number of tokens 40 is the same as 6."),
    ],
)
def test_an_upper_limit_above_what_there_is_is_said_in_one_line(
    tiny_bundle: Path, opened: dict[str, Any], caplog: pytest.LogCaptureFixture, flags: list[str], note: str | None
) -> None:
    done = invoke(tiny_bundle, "--port", 0, *flags)
    assert done.exit_code == 0, done.output
    notes = caplog.messages
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
    assert "40 per cycle" not in done.stdout


@pytest.mark.parametrize(
    ("flags", "slots", "note"),
    [
        ([], "8 sequences of up to 512 tokens; 64 more may wait", None),
        (["--max-num-seqs", "1"], "1 sequence of up to 512 tokens; 64 more may wait", None),
        (
            ["--backend", "eager"],
            "one request at a time of up to 512 tokens, all that eager serves; 64 more may wait for their turn",
            None,
        ),
        (
            ["--backend", "eager", "--max-num-seqs", "4"],
            "one request at a time",
            "eager serves 1 at most; --max-num-seqs 4 is the same as 1.",
        ),
    ],
)
def test_the_plan_says_how_many_requests_run_together(
    tiny_bundle: Path, opened: dict[str, Any], caplog: pytest.LogCaptureFixture, flags: list[str], slots: str, note: str | None
) -> None:
    done = invoke(tiny_bundle, "--port", 0, *flags)
    assert done.exit_code == 0, done.output
    assert slots in next(line for line in done.stdout.splitlines() if line.startswith("slots"))
    assert caplog.messages == ([] if note is None else [note])


def test_a_provider_that_batches_nothing_gets_one_slot(tiny_bundle: Path, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from domino_deploy.runtime.backends import ort
    from domino_deploy.runtime.backends.ort_provider import Provider

    real = ort.open_pair
    monkeypatch.setattr(ort, "open_pair", lambda bundle, **asked: real(bundle, **(asked | {"provider": Provider.CPU})))
    done = invoke(tiny_bundle, "--port", 0, "--provider", "cuda")
    assert done.exit_code == 0, done.output
    assert "all that ort, cuda serves" in done.stdout
    assert opened["settings"].max_sequences == 1


def test_no_drafted_tokens_are_plain_decoding_in_the_plan(tiny_bundle: Path, opened: dict[str, Any]) -> None:
    for flags in (["--num-speculative-tokens", "0"], ["--no-speculation"]):
        assert "proposals  none, plain decoding" in invoke(tiny_bundle, "--port", 0, *flags).stdout


def test_keys_come_from_flags_files_and_the_environment(tiny_bundle: Path, opened: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("c\nd\n")
    invoke(tiny_bundle, "--port", 0, "--api-key-file", tmp_path / "keys", DOMINO_DEPLOY_SERVE_API_KEY="a\n b \n")
    assert opened["server"].api_keys == ("a", "b", "c", "d")


def test_a_key_that_is_typed_takes_the_place_of_an_empty_variable(tiny_bundle: Path, opened: dict[str, Any]) -> None:
    done = invoke(tiny_bundle, "--port", 0, "--api-key", "a", DOMINO_DEPLOY_SERVE_API_KEY="")
    assert done.exit_code == 0, done.output
    assert opened["server"].api_keys == ("a",)


def test_allowed_hosts(tiny_bundle: Path, opened: dict[str, Any]) -> None:
    done = invoke(tiny_bundle, "--port", 0, "--allowed-host", "a.example", "--allowed-host", "b.example")
    assert done.exit_code == 0, done.output
    assert opened["server"].allowed_hosts == ("a.example", "b.example")


def test_a_server_open_to_the_network_without_a_key_is_warned_of(
    tiny_bundle: Path, opened: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for quiet in ([], ["-q"]):
        CliRunner().invoke(main, [*quiet, "serve", str(tiny_bundle), "--port", "0", "--host", "0.0.0.0"])
        (record,) = caplog.records
        assert (record.levelname, record.message[:22]) == ("WARNING", "0.0.0.0 can be reached")
        caplog.clear()
    invoke(tiny_bundle, "--port", 0, "--host", "0.0.0.0", "--api-key", "k")
    assert not caplog.records


def test_more_memory_than_there_is_is_warned_of(
    tiny_bundle: Path, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("domino_deploy.cli.serve.free_memory", lambda: 1000)
    invoke(tiny_bundle, "--port", 0)
    assert "Expected at least" in caplog.text


@pytest.mark.parametrize(("typed", "length"), [("96", 96), ("0.1k", None), ("32k", 32_000), ("32K", 32_768), ("1m", 10**6), ("k", None)])
def test_numbers_of_tokens_may_end_as_vllms(typed: str, length: int | None) -> None:
    tokens = TokenCount(min=1)
    if length is None:
        with pytest.raises(click.BadParameter, match="not a valid integer"):
            tokens.convert(typed, None, None)
    else:
        assert tokens.convert(typed, None, None) == length


def test_variables_of_no_option_are_warned_of(tiny_bundle: Path, opened: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    invoke(tiny_bundle, "--port", 0, DOMINO_DEPLOY_SERVE_PROT="1", DOMINO_DEPLOY_SERVE_THREADS="1", DOMINO_DEPLOY_SERVE_ZZZ="1")
    assert caplog.messages == [
        "Expected environment variables of options alone, found DOMINO_DEPLOY_SERVE_PROT, which is ignored. "
        "DOMINO_DEPLOY_SERVE_PORT may have been meant.",
        "Expected environment variables of options alone, found DOMINO_DEPLOY_SERVE_ZZZ, which is ignored. Unset it.",
    ]


def test_quiet_leaves_the_plan_out(tiny_bundle: Path, opened: dict[str, Any]) -> None:
    done = CliRunner().invoke(main, ["-q", "serve", str(tiny_bundle), "--port", "0"])
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["Serving"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "temperature 1, where a request does not say"),
        (["--override-generation-config", '{"temperature": 0, "top_k": 5}'], "temperature 0, top_k 5, where a request does not say"),
    ],
)
def test_defaults_of_sampling_are_set_and_told(tiny_bundle: Path, opened: dict[str, Any], flags: list[str], told: str) -> None:
    done = invoke(tiny_bundle, "--port", 0, *flags)
    assert done.exit_code == 0, done.output
    assert next(line for line in done.stdout.splitlines() if line.startswith("sampling")).endswith(told)
    assert described(opened["server"].sampling) in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--override-generation-config", '{"temperature": -1}'], "temperature must be"),
        (["--override-generation-config", "hot"], "Expected --override-generation-config as a JSON object"),
        (["--generation-config", "vllm"], "'auto', 'none'"),
    ],
)
def test_defaults_that_cannot_be_used_are_refused_at_once(tiny_bundle: Path, flags: list[str], told: str) -> None:
    done = invoke(tiny_bundle, "--port", 0, *flags)
    assert done.exit_code == 2
    assert told in done.output
