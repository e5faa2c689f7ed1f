"""The bar of long commands, and its lines where there is no terminal."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from domino_deploy.cli.console import Verbosity, progress_bar
from domino_deploy.training.progress import Progress


class TestProgressBar:
    def stages(self) -> list[Progress]:
        return [
            Progress(phase=phase, done=done, total=3, note=f"{done} tokens") for phase in ("responses", "training") for done in (1, 2, 3)
        ]

    def show(self, verbosity: Verbosity, *, is_shown: bool = True) -> str:
        import click

        @click.command()
        @click.pass_context
        def command(ctx: click.Context) -> None:
            ctx.obj = verbosity
            with progress_bar(ctx, is_shown=is_shown) as show:
                for stage in self.stages():
                    show(stage)

        done = CliRunner().invoke(command)
        assert done.exit_code == 0, done.exception
        assert done.stdout == ""
        return done.stderr

    def test_verbose_tells_the_first_and_last_of_each_phase_and_little_between(self) -> None:
        lines = [line.partition("] ")[2] for line in self.show(Verbosity.VERBOSE).splitlines()]
        assert lines == ["responses 1/3  1 tokens", "responses 3/3  3 tokens", "training 1/3  1 tokens", "training 3/3  3 tokens"]

    def test_nothing_is_shown_elsewhere(self) -> None:
        assert self.show(Verbosity.NORMAL) == ""
        assert self.show(Verbosity.QUIET) == ""
        assert self.show(Verbosity.VERBOSE, is_shown=False) == ""

    def test_a_terminal_gets_a_bar_with_the_runs_own_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import rich.console

        made = []
        real = rich.console.Console

        def on_a_terminal(**options: object) -> rich.console.Console:
            made.append(real(force_terminal=True, width=120, **options))  # type: ignore[arg-type]
            return made[-1]

        monkeypatch.setattr("rich.console.Console", on_a_terminal)
        monkeypatch.setattr("domino_deploy.cli.console.sys.stderr", Terminal())
        import click

        ctx = click.Context(click.Command("x"), obj=Verbosity.NORMAL)
        with progress_bar(ctx) as show:
            for stage in self.stages():
                show(stage)
        drawn = "".join(made[0].file.written)  # type: ignore[attr-defined]
        assert "training" in drawn
        assert "3/3" in drawn
        assert "3 tokens" in drawn


class Terminal:
    """Takes the place of stderr."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True
