"""The command line's frame: help stays light, errors become exit codes, results go to stdout and the rest to stderr."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from domino_deploy import __version__, errors
from domino_deploy.cli import COMMANDS, console, main
from domino_deploy.cli.command import Command

HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "tokenizers", "jinja2", "numpy", "safetensors", "rich")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = f"""
import sys
from domino_deploy.cli import main
main(["--help"], standalone_mode=False)
print("LOADED", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout
    for command, summary in COMMANDS.items():
        assert command in done.stdout
        assert summary in done.stdout


@pytest.mark.parametrize("module", ["domino_deploy", "domino_deploy.cli"])
def test_it_runs_as_a_module_too(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"domino-deploy, version {__version__}\n"), done.stderr


def test_help_answers_within_three_tenths_of_a_second() -> None:
    def seconds() -> float:
        """Processor time of one run: wall time would measure what else the machine does."""
        process = subprocess.Popen([sys.executable, "-m", "domino_deploy.cli", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def command_named(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_line_in_the_list_is_the_first_line_of_its_own_help(name: str) -> None:
    command = command_named(name)
    assert (command.help or "").splitlines()[0] == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained_and_named_as_its_variable(name: str) -> None:
    command = command_named(name)
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert [option.opts for option in options if not option.help] == []
    # DOMINO_DEPLOY_<COMMAND>_<OPTION> is made from the parameter's name.
    assert [option.opts for option in options if f"--{option.name.replace('_', '-')}" not in option.opts] == []


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"domino-deploy, version {__version__}\n"


class Failing:
    """Takes the place of a command's work and raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *arguments: object, **options: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.VerificationError("off"), 1),
        (errors.CapacityError("full"), 1),
        (errors.RequestError("odd"), 2),
        (errors.MissingDependencyError("gone"), 3),
        (errors.BundleError("torn"), 4),
        (errors.CheckpointError("torn"), 4),
        (errors.PairingError("strangers"), 4),
    ],
)
def test_errors_of_the_package_become_a_message_and_their_exit_code(
    error: errors.DominoDeployError, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("domino_deploy.cli.inspect.describe", Failing(error))
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert (done.exit_code, done.stderr, done.stdout) == (code, f"Error: {error}\n", "")


def test_ctrl_c_exits_with_the_shells_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("domino_deploy.cli.inspect.describe", Failing(KeyboardInterrupt()))
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (130, "\nInterrupted.\n")


def test_sigterm_cleans_up_as_ctrl_c_does(tmp_path: Path) -> None:
    code = f"""
import os, signal
from domino_deploy.bundle import create_bundle
from domino_deploy.cli import inspect, main
def half_a_bundle(path):
    with create_bundle({str(tmp_path / "out")!r}) as folder:
        (folder / "target.onnx").write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
inspect.describe = half_a_bundle
main(["inspect", "x"])
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_a_callback_where_python_drops_what_is_raised_ends_it_too(name: str, code: int) -> None:
    done = python(f"""
import signal, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from domino_deploy.cli import inspect, main
class Thing:
    pass
def watched(path):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.{name}))
    del thing
    time.sleep(30)
inspect.describe = watched
main(["inspect", "x"])
""")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (code, "", "Interrupted." if code == 130 else "")


def test_another_error_in_a_callback_is_reported_as_ever() -> None:
    done = python("""
import weakref
from domino_deploy.cli import inspect, main
class Thing:
    pass
def watched(path):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: 1 / 0)
    del thing
    return {}
inspect.describe = watched
main(["inspect", "x"])
""")
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr


def test_a_full_disk_is_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("domino_deploy.cli.inspect.describe", Failing(OSError(errno.ENOSPC, "No space left on device", "drafter")))
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "found a full disk at drafter" in done.stderr


def test_a_character_that_the_terminal_lacks_does_not_end_the_run() -> None:
    code = "from domino_deploy.cli import inspect, main; inspect.describe = lambda path: {'text': '東京'}; main(['inspect', 'x'])"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, b"text: \\u6771\\u4eac\n"), done.stderr


def test_bytes_that_the_locale_cannot_decode_are_read_as_utf8() -> None:
    assert console.as_utf8("plain ä", "--prompt") == "plain ä"
    assert console.as_utf8(os.fsdecode("東京".encode()), "--prompt") == "東京"
    assert console.as_utf8("東京".encode().decode("ascii", "surrogateescape"), "--prompt") == "東京"


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("domino_deploy.cli.inspect.describe", Failing(ZeroDivisionError("a fault of ours")))
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert isinstance(done.exception, ZeroDivisionError)


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("domino_deploy.cli.inspect.describe", lambda path: {"kind": "test"})
    done = CliRunner().invoke(main, ["inspect", str(tmp_path)], env={"DOMINO_DEPLOY_INSPECT_JSON": "1"})
    assert json.loads(done.stdout) == {"kind": "test"}


def test_a_bad_value_in_the_environment_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "x"], env={"DOMINO_DEPLOY_GENERATE_TOP_K": "many"})
    assert done.exit_code == 2
    assert "'many'" in done.stderr
    assert "--top-k was read from the environment variable DOMINO_DEPLOY_GENERATE_TOP_K." in done.stderr


class TestVariables:
    """A refusal names the variable that the value came from, and no other."""

    @pytest.mark.parametrize(
        ("arguments", "variable", "value"),
        [
            (["serve", "b"], "DOMINO_DEPLOY_SERVE_PORT", "abc"),
            (["serve", "b"], "DOMINO_DEPLOY_SERVE_NO_PAGE", "maybe"),
            (["serve", "b"], "DOMINO_DEPLOY_SERVE_LOG_LEVEL", "loud"),
            (["serve", "b"], "DOMINO_DEPLOY_SERVE_CHAT_TEMPLATE_KWARGS", "[]"),
            (["generate", "b", "--prompt", "x", "--no-speculation"], "DOMINO_DEPLOY_GENERATE_DRAFTER", "none"),
            (["bench", "b"], "DOMINO_DEPLOY_BENCH_CONCURRENCY", "0"),
            (["export", "--ckpt", "d", "--target", "t", "-o", "o"], "DOMINO_DEPLOY_EXPORT_CANDIDATE_POOL", "-1"),
            (["verify", "b"], "DOMINO_DEPLOY_VERIFY_NUM_LAYERS", "0"),
            (["build-engine", "b"], "DOMINO_DEPLOY_BUILD_ENGINE_WORKSPACE", "much"),
            (["inspect", "b"], "DOMINO_DEPLOY_INSPECT_BATCH", "0"),
            (["regenerate", "--target", "t", "-o", "o"], "DOMINO_DEPLOY_REGENERATE_TEMPERATURE", "hot"),
            (["train", "--target", "t"], "DOMINO_DEPLOY_TRAIN_STEPS", "few"),
            (["doctor"], "DOMINO_DEPLOY_DOCTOR_JSON", "maybe"),
            (["doctor"], "DOMINO_DEPLOY_QUIET", "maybe"),
        ],
        ids=lambda value: value if isinstance(value, str) and value.startswith("DOMINO") else "",
    )
    def test_of_every_command(self, arguments: list[str], variable: str, value: str) -> None:
        done = CliRunner().invoke(main, arguments, env={variable: value, "DOMINO_DEPLOY_SERVE_THREADS": "1"})
        assert done.exit_code == 2, done.output
        assert f"was read from the environment variable {variable}." in done.stderr
        assert done.stderr.count("environment variable") == 1

    def test_one_that_depends_on_the_bundle(self, tiny_bundle: Path) -> None:
        variable = "DOMINO_DEPLOY_GENERATE_MAX_MODEL_LEN"
        done = CliRunner().invoke(main, ["generate", str(tiny_bundle), "--prompt", "x"], env={variable: "1000000"})
        assert done.exit_code == 2
        assert "--max-model-len must lie in" in done.stderr
        assert f"--max-model-len was read from the environment variable {variable}." in done.stderr

    def test_the_one_that_an_option_states_itself(self) -> None:
        command = Command("x", params=[click.Option(["--key"], type=int, envvar=["FIRST_KEY", "SECOND_KEY"])])
        done = CliRunner().invoke(command, [], env={"FIRST_KEY": "", "SECOND_KEY": "abc"})
        assert "--key was read from the environment variable SECOND_KEY." in done.stderr

    def test_the_long_name_is_told_where_a_short_one_comes_first(self) -> None:
        command = Command("x", params=[click.Option(["-k", "--key"], type=int, envvar="KEY")])
        assert "\n--key was read from the environment variable KEY." in CliRunner().invoke(command, [], env={"KEY": "abc"}).stderr

    def test_what_was_typed_has_none(self) -> None:
        done = CliRunner().invoke(main, ["serve", "b", "--port", "abc"], env={"DOMINO_DEPLOY_SERVE_PORT": "1"})
        assert done.exit_code == 2
        assert "environment variable" not in done.stderr


def test_the_model_of_export_is_told_apart() -> None:
    done = CliRunner().invoke(main, ["export", "--model", "x"])
    assert done.exit_code == 2
    assert "found --model. Name the target by --target, and the drafter by --ckpt." in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_its_errors_alike(name: str) -> None:
    assert isinstance(command_named(name), Command)


class TestConsole:
    def test_progress_is_silent_away_from_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.progress(context(console.Verbosity.NORMAL)) as step:
            step("Loading")
        assert capsys.readouterr() == ("", "")

    @pytest.mark.parametrize(
        ("verbosity", "told"), [(console.Verbosity.NORMAL, "Loading ...\nRunning ...\n"), (console.Verbosity.QUIET, "")]
    )
    def test_long_runs_tell_their_steps_in_a_pipe_too(
        self, verbosity: console.Verbosity, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with console.progress(context(verbosity), also_piped=True) as step:
            step("Loading")
            step("Running")
        assert capsys.readouterr() == ("", told)

    def test_verbose_progress_is_a_line_per_step_on_stderr(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console.progress(context(console.Verbosity.VERBOSE)) as step:
            step("Loading")
            step("Running")
        out, err = capsys.readouterr()
        assert out == ""
        assert [line.split("] ")[1] for line in err.splitlines()] == ["Loading", "Running"]

    def test_tables_are_tab_separated_away_from_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        console.echo_table(("name", "size"), [("a", "1"), ("[b]", "2")])
        assert capsys.readouterr().out == "name\tsize\na\t1\n[b]\t2\n"

    @pytest.mark.parametrize(
        ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (538_000_000, "538.0 MB"), (2_340_000_000, "2.34 GB")]
    )
    def test_sizes_read_in_steps_of_a_thousand(self, count: int, text: str) -> None:
        assert console.as_bytes(count) == text


def context(verbosity: console.Verbosity) -> click.Context:
    return click.Context(main, obj=verbosity)
