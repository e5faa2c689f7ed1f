"""The variables of the chat template that a drafter was trained with: from training or export to every prompt, and to the log."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_deploy.bundle import Bundle, file_entry, open_bundle
from domino_deploy.cli import main
from domino_deploy.errors import BundleError, CheckpointError, RequestError
from domino_deploy.exporters import export
from domino_deploy.exporters.export import export_bundle
from domino_deploy.exporters.options import ExportOptions
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.runtime.session import Session
from domino_deploy.template_variables import differing, shown, trained_with
from domino_deploy.training.save import save_drafter
from tests.support.bundles import change_manifest
from tests.support.checkpoints import write_drafter, write_target
from tests.support.fake_engine import ScriptedEngine, client_of
from tests.support.serve_command import invoke

CALM = {"enable_thinking": False}
TEMPLATE = "{{ messages[-1].content }} {{ enable_thinking }}"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture
def pair(tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Drafter and target whose export skips the graphs, which take seconds."""

    def copied(target: object, drafter: object, stored: object, form: object, options: object, folder: Path, progress: object) -> Any:
        for file in tiny_bundle.glob("*.onnx"):
            shutil.copyfile(file, folder / file.name)
        return dict(open_bundle(tiny_bundle).manifest.graphs)

    monkeypatch.setattr(export, "_export_graphs", copied)
    target = write_target(tmp_path / "source" / "target")
    return write_drafter(tmp_path / "source" / "drafter", target), target


def state(drafter: Path, value: object) -> None:
    file = drafter / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template_kwargs": value}))


@pytest.fixture(scope="module")
def calm_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a drafter that was trained without thinking, and a template that shows it."""
    folder = tmp_path_factory.mktemp("calm") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    state(folder / "drafter", CALM)
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    def change(manifest: dict[str, Any]) -> None:
        for name in ("drafter/config.json", "chat_template.jinja"):
            entry = file_entry(folder / name)
            manifest["files"][name] = {"bytes": entry.bytes, "sha256": entry.sha256}

    change_manifest(folder, change)
    return folder


@pytest.mark.parametrize(
    ("stated", "option", "expected"),
    [
        (None, None, {}),
        (CALM, None, CALM),
        (None, CALM, CALM),
        (CALM, {"enable_thinking": True}, {"enable_thinking": True}),
        (CALM, {}, {}),
    ],
)
def test_an_export_keeps_what_the_drafter_says_or_takes_what_it_is_told(
    pair: tuple[Path, Path], tmp_path: Path, stated: Any, option: Any, expected: dict[str, Any]
) -> None:
    state(pair[0], stated)
    bundle = export_bundle(*pair, tmp_path / "bundle", ExportOptions(trained_with=option), verify=False)
    assert trained_with(bundle) == expected


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ([], "list"),
        (False, "bool"),
        ([1], "list"),
        ({"tools": 1}, "tools: "),
        ({"a": None, "b": {}}, "b: expected"),
        ({f"a{name}": 1 for name in range(40)}, "at most 32"),
        ({"bos_token": "x"}, "bos_token: not a variable"),
        ({"a\n2026-11-30 ERROR forged": 1}, r"'a\n2026-11-30 ERROR forged': expected a name"),
        ({"": 1, "a b": 1, "\u202e": 1, "a" * 65: 1}, "'\\u202e': expected a name"),
        ({"a": "x" * 1001}, "a: expected"),
        ({"a": 10**400}, "a: expected"),
    ],
)
def test_a_drafter_that_says_it_in_another_form_is_refused_with_the_way_around_it(
    pair: tuple[Path, Path], tmp_path: Path, stated: Any, told: str
) -> None:
    state(pair[0], stated)
    with pytest.raises(CheckpointError) as caught:
        export_bundle(*pair, tmp_path / "bundle", verify=False)
    assert all(words in str(caught.value) for words in (told, "chat_template_kwargs", "--drafter-chat-template-kwargs"))
    assert trained_with(export_bundle(*pair, tmp_path / "bundle", ExportOptions(trained_with=CALM), verify=False)) == CALM


def test_the_command_takes_them_and_refuses_others(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from click.testing import CliRunner

    command = ["export", "--ckpt", str(pair[0]), "--target", str(pair[1]), "-o", str(tmp_path / "bundle"), "--skip-verification"]
    for text, told in (
        ("{", "as a JSON object"),
        ('{"messages": 1}', "messages: "),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "a: expected"),
        ('{"a": 1, "a": 2}', "duplicate"),
    ):
        done = CliRunner().invoke(main, [*command, "--drafter-chat-template-kwargs", text])
        assert (done.exit_code, told in done.output) == (2, True), done.output
    assert CliRunner().invoke(main, [*command, "--drafter-chat-template-kwargs", json.dumps(CALM)]).exit_code == 0
    assert trained_with(open_bundle(tmp_path / "bundle")) == CALM
    with pytest.raises(RequestError):
        ExportOptions(trained_with={"chat_template": "x"})


def test_training_states_them(pair: tuple[Path, Path], tmp_path: Path) -> None:
    from domino_deploy.checkpoint import open_drafter
    from domino_deploy.model.loading import load_drafter

    drafter: DrafterModel = load_drafter(open_drafter(pair[0]))
    scales = torch.ones(len(drafter.config.target_layer_ids))
    for name, given, expected in (("with", CALM, CALM), ("without", {}, None)):
        save_drafter(drafter, scales, tmp_path / name, trained_with=given)
        assert json.loads((tmp_path / name / "config.json").read_text()).get("chat_template_kwargs") == expected


def test_a_bundle_that_was_changed_into_another_form_is_refused(calm_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(calm_bundle)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text('{"chat_template_kwargs": 3}')
    with pytest.raises(BundleError, match="int"):
        trained_with(Bundle(path=tmp_path, manifest=bundle.manifest))


def test_a_sessions_prompts_are_those_that_the_drafter_knows(calm_bundle: Path) -> None:
    with Session.open(calm_bundle, threads=1) as session:
        assert session.tokenizer.decode(session.prompt_ids("Hello")) == "Hello False"


@pytest.fixture(scope="module")
def engine(calm_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(calm_bundle, "ok") as engine:
        yield engine


@pytest.mark.parametrize(
    ("server", "request_", "prompt", "line"),
    [
        ({}, {}, "Hello False", None),
        ({}, {"chat_template_kwargs": {"enable_thinking": False, "tone": "kind"}}, "Hello False", None),
        (
            {},
            {"chat_template_kwargs": {"enable_thinking": True}},
            "Hello True",
            "enable_thinking is true, the drafter was trained with false",
        ),
        ({"enable_thinking": True}, {}, "Hello True", "enable_thinking is true, the drafter was trained with false"),
        ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": False}}, "Hello False", None),
        ({"enable_thinking": True}, {"speculative": False}, "Hello True", None),
    ],
)
def test_a_request_that_the_drafter_was_not_trained_for_is_a_warning_in_its_line(
    engine: ScriptedEngine, caplog: pytest.LogCaptureFixture, server: Any, request_: Any, prompt: str, line: str | None
) -> None:
    client = client_of(engine, chat_template_kwargs=server, trained_with=CALM)
    with caplog.at_level(logging.INFO, "domino_deploy.server.requests"):
        assert client.post("/v1/chat/completions", json={**BODY, **request_}).status_code == 200
    assert engine.tokenizer.decode(engine.requests[-1].prompt_ids) == prompt
    (record,) = [record for record in caplog.records if record.name == "domino_deploy.server.requests"]
    assert record.levelno == (logging.INFO if line is None else logging.WARNING)
    assert getattr(record, "domino_fields").get("template_differs") == line  # noqa: B009


def test_without_that_drafter_nothing_differs(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        client_of(engine).post("/v1/chat/completions", json={**BODY, "chat_template_kwargs": {"enable_thinking": True}})
    assert not caplog.records


@pytest.mark.parametrize(
    ("flags", "template", "warnings"),
    [
        ([], "enable_thinking false", 0),
        (["--chat-template-kwargs", '{"enable_thinking": true, "tone": "kind"}'], 'enable_thinking true, tone "kind"', 1),
        (["--no-speculation", "--chat-template-kwargs", '{"enable_thinking": true}'], "enable_thinking true", 0),
    ],
)
def test_the_start_says_what_templates_get(
    calm_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: list[str], template: str, warnings: int
) -> None:
    from domino_deploy.server import run

    monkeypatch.setattr(run, "run", lambda app, listening, *, announce: 0)
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    done = invoke(calm_bundle, "--port", 0, *flags)
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("template"))
    assert line.split(maxsplit=1)[1] == f"{template}, where a request does not say"
    assert len([text for text in caplog.messages if "the drafter was trained with false" in text]) == warnings


def test_words_are_short() -> None:
    assert shown({"enable_thinking": False, "tone": "x" * 100}) == f'enable_thinking false, tone "{"x" * 36}...'
    assert differing(CALM, {}) == []
    assert differing({"a": 1, "b": True}, {"a": 2, "b": 1}) == [
        "a is 2, the drafter was trained with 1",
        "b is 1, the drafter was trained with true",
    ]
    assert differing(CALM, {"enable_thinking": [1] * 10**6}) == ["enable_thinking is a list, the drafter was trained with false"]
    assert differing(CALM, {"enable_thinking": None}) == ["enable_thinking is null, the drafter was trained with false"]
