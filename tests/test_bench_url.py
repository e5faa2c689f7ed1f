"""`domino-deploy bench --url` against scripted servers: what is timed and counted, and what servers do wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from domino_deploy.bench import load, tasks
from domino_deploy.bench.client import Answer, Client
from domino_deploy.bench.load import LoadSettings
from domino_deploy.cli import main
from domino_deploy.errors import OutOfRangeError
from tests.support.loopback import served
from tests.support.scripted_server import KEY, ScriptedServer, answer, chunk


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Prompt {number}"}) + "\n" for number in range(3)))
    return path


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], env={"OPENAI_API_KEY": KEY})


class TestFigures:
    def test_a_level_is_its_answers(self) -> None:
        good = [
            Answer(started=0, ended=2.0 + extra, text_times=(1.0 + extra, 1.2 + extra, 1.6 + extra), prompt_tokens=4, completion_tokens=7)
            for extra in (0.0, 1.0)
        ]
        bad = Answer(started=0, ended=9, text_times=(8.0,), error="timeout")
        found = load.level(2, [*good, bad], 4.0, speculation=load.Speculation(drafts=4, drafted=12, accepted=6))
        assert (found.succeeded, found.errors) == (2, {"timeout": 1})
        assert (found.tokens_per_second, found.requests_per_second) == (14 / 4, 2 / 4)
        assert (found.prompt_tokens, found.cached_tokens) == (8, None)
        assert found.first_text_ms == pytest.approx({50: 1500, 90: 1900, 99: 1990})
        assert found.token_ms == pytest.approx({50: 100, 90: 100, 99: 100})
        assert found.chunk_gap_ms == pytest.approx({50: 300, 90: 400, 99: 400})
        assert found.total_ms is not None
        assert found.total_ms[50] == pytest.approx(2500)
        assert found.speculation is not None
        assert (found.speculation.acceptance_length, found.speculation.acceptance_rate) == (2.5, 0.5)

    @pytest.mark.parametrize(
        ("cached", "tokens", "share"), [((3, 0), 3, 3 / 8), ((3, None), 3, 3 / 8), ((0, 0), 0, 0.0), ((None, None), None, None)]
    )
    def test_the_cached_share_is_of_all_prompt_tokens(
        self, cached: tuple[int | None, ...], tokens: int | None, share: float | None
    ) -> None:
        answers = [Answer(started=0, ended=1, prompt_tokens=4, cached_tokens=count) for count in cached]
        found = load.level(1, answers, 1.0, speculation=None)
        assert (found.cached_tokens, found.cached_share) == (tokens, share)

    def test_the_first_words_for_each_kind_of_failure_are_kept(self) -> None:
        kinds = [("http_500", None), ("http_500", "first"), ("http_500", "second"), ("timeout", None), ("http_429", "full")]
        answers = [Answer(started=0, ended=1, error=error, message=message) for error, message in kinds]
        assert load.level(1, answers, 1.0, speculation=None).messages == {"http_429": "full", "http_500": "first"}

    def test_nothing_measured_is_none_and_not_zero(self) -> None:
        found = load.level(1, [Answer(started=0, ended=1, error="http_500")], 1.0, speculation=None)
        assert (found.tokens_per_second, found.first_text_ms, found.total_ms) == (None, None, None)
        nothing = load.Speculation(drafts=0, drafted=0, accepted=0)
        assert (nothing.acceptance_length, nothing.acceptance_rate) == (None, None)

    def test_values_out_of_range_are_all_named(self) -> None:
        with pytest.raises(OutOfRangeError) as raised:
            LoadSettings(concurrency=(1, 0), requests=0, max_new_tokens=0, warm_up_requests=-1, timeout_seconds=1e308)
        assert str(raised.value).count("\n  - ") == 5

    @pytest.mark.parametrize("counted", [math.nan, math.inf, 1.0], ids=["not a number", "infinite", "less than before"])
    def test_counters_that_do_not_count_are_not_measured(self, counted: float) -> None:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        before = {f"vllm:spec_decode_{name}_total": 2.0 for name in names}
        assert load.speculation_since(before, before) == load.Speculation(drafts=0, drafted=0, accepted=0)
        assert load.speculation_since(before, {**before, "vllm:spec_decode_num_drafts_total": counted}) is None

    def test_lines_of_metrics_that_are_no_numbers_are_passed_over(self) -> None:
        text = "good 1.5\nbad 1.2.3\nbad ...\ngood 2 1700000000\nlarge 1e999\n"
        with served(Starlette(routes=[Route("/metrics", lambda request: PlainTextResponse(text))])) as url:
            assert Client(url).metrics() == {"good": 3.5, "large": math.inf}


class TestCommand:
    def test_a_sweep_sends_the_same_requests_at_every_level(self, prompt_file: Path) -> None:
        server = ScriptedServer([*answer("Hel", "lo")[:2], 0.05, *answer("Hel", "lo")[2:]])
        with server.url() as url:
            flags = ("--concurrency", "1,3", "--requests", "6", "--warm-up", "1", "--max-tokens", "9", "--seed", "4")
            done = bench("--url", url + "/v1/", "--prompts", prompt_file, *flags, "--json")
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        assert made["model"] == "tiny"
        assert [(level["concurrency"], level["succeeded"], level["completion_tokens"]) for level in made["levels"]] == [
            (1, 6, 30),
            (3, 6, 30),
        ]
        assert server.most_in_flight == 3
        bodies = server.asked[1:]
        assert len(bodies) == 12
        by_prompt = [body["messages"][0]["content"] for body in bodies]
        assert sorted(by_prompt[:6]) == sorted(by_prompt[6:])
        assert set(by_prompt) == {"Prompt 0", "Prompt 1", "Prompt 2"}
        expected = {
            "model": "tiny",
            "max_tokens": 9,
            "temperature": 0.0,
            "seed": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert {name: bodies[0][name] for name in expected} == expected
        assert "speculative" not in bodies[0]
        for level in made["levels"]:
            assert level["speculation"] == {
                "drafts": 24, "drafted": 72, "accepted": 48, "acceptance_length": 3.0, "acceptance_rate": pytest.approx(2 / 3),
            }  # fmt: skip
            assert level["cached_prompt_tokens"] == 18
            assert level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"]
            assert level["tpot_ms_per_token"]["p50"] < level["itl_ms_per_chunk"]["p50"]
        assert "--concurrency 1,3" in made["command"]
        assert KEY not in done.output

    def test_tables_say_what_is_per_token_and_what_per_chunk(self, prompt_file: Path) -> None:
        with ScriptedServer(answer("a", "b"), has_metrics=False).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "2", "--requests", "3", "--markdown")
        assert done.exit_code == 0, done.output
        names = ("TTFT ms", "TPOT ms per token", "ITL ms per chunk", "E2E ms")
        assert f"| concurrency | cached prompt | {' | '.join(f'{name}, p50/p90/p99' for name in names)} |" in done.stdout
        row = next(line for line in done.stdout.splitlines() if line.startswith("| 2 | 3 | 0 |"))
        assert row.endswith("| - | - |")  # no metrics, no acceptance

    def test_text_labels_percentiles_and_says_how_much_of_the_prompts_was_cached(self, prompt_file: Path) -> None:
        with ScriptedServer(answer("a", "b")).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "2", "--requests", "3")
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        start = next(index for index, row in enumerate(rows) if row[:3] == ["concurrency", "cached prompt", "TTFT ms, p50/p90/p99"])
        assert rows[start + 1][:2] == ["2", "43%"]  # 3 tokens of 7
        assert len(rows[start + 1][2].split(" / ")) == 3
        assert "cached prompt is the part of the prompt tokens that the server found in its cache" in done.stdout

    def test_kinds_that_are_not_installed_are_no_matter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tasks.PackagedSet, "path", lambda packaged: None)
        with ScriptedServer(answer("a")).url() as url:
            done = bench("--url", url, "--concurrency", "1", "--requests", "1", "--prompts-per-kind", "1", "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        assert json.loads(done.stdout)["settings"]["kinds"] == list(tasks.OWN)

    def test_raw_prompts_go_to_completions_and_plain_asks_for_no_speculation(self, prompt_file: Path) -> None:
        server = ScriptedServer(answer("a"))
        with server.url() as url:
            done = bench(
                "--url", url, "--prompts", prompt_file, "--concurrency", "1", "--requests", "1", "--raw", "--plain", "--model", "m"
            )
        assert done.exit_code == 0, done.output
        assert set(server.paths) == {"/v1/completions"}
        assert server.asked[-1]["prompt"].startswith("Prompt")
        assert (server.asked[-1]["speculative"], server.asked[-1]["model"]) == (False, "m")

    def test_a_baseline_asks_for_every_level_both_ways_and_gives_the_ratio(self, prompt_file: Path) -> None:
        server = ScriptedServer(answer("a"))
        flags = ("--prompts", prompt_file, "--concurrency", "1,2", "--requests", "4", "--warm-up", "1", "--baseline")
        with server.url() as url:
            done = bench("--url", url, *flags, "--json")
            table = bench("--url", url, *flags[:-5], "--requests", "1", "--baseline")
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        assert [(level["concurrency"], level["is_baseline"]) for level in made["levels"]] == [(1, True), (1, False), (2, True), (2, False)]
        assert [level["speculation"]["drafts"] for level in made["levels"]] == [0, 16, 0, 16]
        assert [(pair["concurrency"], pair["drafting"]) for pair in made["against_plain"]] == [(1, "as asked"), (2, "as asked")]
        rates = [level["output_tokens_per_second"] for level in made["levels"]]
        assert [pair["ratio"] for pair in made["against_plain"]] == [rates[1] / rates[0], rates[3] / rates[2]]
        # Every prompt has been asked for before the first level, so that neither way finds more of them cached.
        assert {body["messages"][0]["content"] for body in server.asked[:4]} == {f"Prompt {number}" for number in range(3)}
        assert sorted(body["max_tokens"] for body in server.asked[:4]) == [1, 1, 1, 64], "two at a time, in any order"
        assert {body["max_tokens"] for body in server.asked[4:20]} == {64}
        ways = ["speculative" in body for body in server.asked[4:20]]
        assert ways == [True] * 4 + [False] * 8 + [True] * 4
        rows = [line.split("\t") for line in table.stdout.splitlines()]
        start = rows.index(["concurrency", "plain output tok/s", "output tok/s", "ratio", "drafting"])
        assert [(row[0], row[-1]) for row in rows[start + 1 : start + 3]] == [("1", "as asked"), ("2", "as asked")]
        assert "the ratio has no interval" in table.stdout
        assert "not checked" not in table.stdout
        assert "nothing drafted" not in table.stdout

    @pytest.mark.parametrize(
        ("server", "found"),
        [({"has_metrics": False, "ignores_wishes": True}, "not checked"), ({"never_drafts": True}, "nothing drafted")],
        ids=["no counters", "no drafts"],
    )
    def test_a_ratio_that_may_not_be_one_of_speculation_is_marked(self, prompt_file: Path, server: dict[str, bool], found: str) -> None:
        flags = ("--prompts", prompt_file, "--concurrency", "1,2", "--requests", "2", "--warm-up", "0", "--baseline")
        with ScriptedServer(answer("a"), **server).url() as url:
            made = bench("--url", url, *flags, "--json")
            table = bench("--url", url, *flags)
        assert made.exit_code == 0, made.output
        assert [pair["drafting"] for pair in json.loads(made.stdout)["against_plain"]] == [found, found]
        rows = [line.split("\t") for line in table.stdout.splitlines()]
        assert [row[0] for row in rows if row[-1] == found] == ["1", "2"]
        assert sum(line.startswith(f"{found}: ") for line in table.stdout.splitlines()) == 1, "a note says what that means"

    @pytest.mark.parametrize(
        ("plain", "ours", "drafting"),
        [(0, 3, "as asked"), (0, 0, "nothing drafted"), (None, 3, "not checked"), (0, None, "not checked"), (None, None, "not checked")],
    )
    def test_both_turns_need_counters(self, plain: int | None, ours: int | None, drafting: str) -> None:
        def turn(drafts: int | None, *, is_baseline: bool) -> load.Level:
            speculation = None if drafts is None else load.Speculation(drafts=drafts, drafted=drafts, accepted=0)
            return load.level(1, [], 1.0, speculation=speculation, is_baseline=is_baseline)

        found = load.Turns(level=turn(ours, is_baseline=False), baseline=turn(plain, is_baseline=True))
        assert (found.drafting, found.ratio) == (drafting, None)

    def test_a_server_that_drafts_all_the_same_has_no_baseline(self, prompt_file: Path) -> None:
        with ScriptedServer(answer("a"), ignores_wishes=True).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "1", "--requests", "2", "--baseline")
        assert (done.exit_code, done.stdout) == (1, "")
        assert "found that it drafted 24 tokens. Drop --baseline" in done.stderr

    def test_failed_requests_are_counted_by_kind(self, prompt_file: Path) -> None:
        refused = JSONResponse({"error": {"message": "full"}}, status_code=429)
        with ScriptedServer(refused, [chunk("x")], answer("a", "b")).url() as url:
            flags = ("--concurrency", "1", "--requests", "4", "--warm-up", "0", "--json")
            done = bench("--url", url, "--prompts", prompt_file, *flags)
        assert done.exit_code == 0, done.output
        level = json.loads(done.stdout)["levels"][0]
        assert level["errors"] == {"broken_stream": 1, "http_429": 1}
        assert level["error_messages"] == {"http_429": "full"}
        assert level["completion_tokens"] == 10
        assert "http_429" not in done.stderr

    def test_the_tables_count_failed_requests_by_kind_and_say_what_each_is(self, prompt_file: Path) -> None:
        refused = JSONResponse({"error": {"message": "full"}}, status_code=429)
        with ScriptedServer(refused, [chunk("x")], refused, answer("a", "b")).url() as url:
            flags = ("--concurrency", "1", "--requests", "4", "--warm-up", "0")
            done = bench("--url", url, "--prompts", prompt_file, *flags)
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        assert ["concurrency", "requests", "kind", "found", "the server's words"] in rows
        assert ["1", "2", "http_429", "status 429 Too Many Requests", "full"] in rows
        assert ["1", "1", "broken_stream", "a connection that ended before the answer did", "-"] in rows
        assert done.output.count("http_429") == 1

    @pytest.mark.parametrize("flags", [(), ("--model", "tiny")], ids=["by its list", "named"])
    def test_no_server_is_said_in_words_and_what_to_do(self, prompt_file: Path, flags: tuple[str, ...]) -> None:
        with ScriptedServer(answer("a")).url() as url:
            gone = url
        done = bench("--url", gone, "--prompts", prompt_file, "--concurrency", "1", "--requests", "1", *flags)
        assert done.exit_code == 1
        for words in (gone, "connection refused: no server listens there", "Start the server, or correct --url."):
            assert words in done.stderr
        assert "ConnectionRefusedError" not in done.stderr

    @pytest.mark.parametrize("given", ["Welcome", '{"data": [{"id": null}]}', "[" * 100_000], ids=["words", "null", "deep"])
    def test_a_server_without_a_list_of_models_shows_what_it_gave(self, prompt_file: Path, given: str) -> None:
        with served(Starlette(routes=[Route("/v1/models", lambda request: PlainTextResponse(given))])) as url:
            done = bench("--url", url, "--prompts", prompt_file)
        assert done.exit_code == 1
        assert f"found no such list at /v1/models, but '{given[:80]}'. Correct --url, or name the --model." in done.stderr

    def test_a_timeout_that_no_socket_can_wait_for_is_refused(self) -> None:
        done = bench("--url", "http://x", "--timeout", "1e308")
        assert done.exit_code == 2
        assert "'--timeout': 1e+308 is not in the range 0<x<=86400" in done.stderr

    @pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret€", "sk secret", "sk-secret\n"])
    def test_a_key_that_no_head_can_carry_is_refused_and_not_shown(self, key: str) -> None:
        typed = bench("--url", "http://127.0.0.1:1", "--api-key", key)
        read = CliRunner().invoke(main, ["bench", "--url", "http://127.0.0.1:1"], env={"OPENAI_API_KEY": key})
        for done in (typed, read):
            assert done.exit_code == 2
            assert "Expected an API key of visible ASCII characters without spaces, found 1 other(s)" in done.stderr
            assert "secret" not in done.output
        assert "--api-key was read from the environment variable OPENAI_API_KEY." in read.stderr
        assert "environment" not in typed.stderr

    def test_a_password_in_an_address_is_in_no_output(self, prompt_file: Path) -> None:
        url = "http://user:secret@127.0.0.1:1"
        typed = bench("--url", url, "--prompts", prompt_file)
        read = CliRunner().invoke(main, ["bench"], env={"DOMINO_DEPLOY_BENCH_URL": url})
        for done in (typed, read):
            assert done.exit_code == 2
            assert "Drop them from --url; a key is --api-key." in done.stderr
            assert "secret" not in done.output

    def test_a_run_in_which_every_request_fails_is_an_error(self, prompt_file: Path) -> None:
        with ScriptedServer(JSONResponse({}, status_code=500)).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "1", "--requests", "2")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.count("concurrency 1: 2 x http_500, status 500 Internal Server Error") == 1

    def test_what_the_server_says_to_a_wrong_model_is_shown_once(self, prompt_file: Path) -> None:
        refused = JSONResponse({"error": {"message": "Expected one of: tiny.\nFound 'nope'."}}, status_code=404)
        with ScriptedServer(refused).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "1,2", "--requests", "2", "--model", "nope")
        assert done.exit_code == 1
        assert done.stderr.count("  - http_404, in the server's words: Expected one of: tiny. Found 'nope'.\n") == 1
        assert done.stderr.count("tiny") == 1

    def test_a_wrong_key_is_named_before_anything_is_measured(self, prompt_file: Path) -> None:
        with ScriptedServer(answer("a")).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--api-key", "wrong")
        assert done.exit_code == 1
        assert 'status 401 Unauthorized at /v1/models ("no")' in done.stderr
        assert "--api-key" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "found neither"),
            (("b", "--url", "http://x"), "found both"),
            (("b", "--concurrency", "2", "--requests", "3"), "Expected no --concurrency, --requests when measuring a bundle"),
            (("--url", "http://x", "--backend", "eager", "--threads", "2"), "Expected no --backend, --threads when measuring a server"),
            (("--url", "http://x", "--concurrency", "1,x"), "Expected whole numbers of at least 1 separated by commas"),
            (("--url", "http://x", "--plain", "--baseline"), "Expected at most one of --plain and --baseline"),
            (("b", "--baseline"), "Expected no --baseline when measuring a bundle"),
            (("--url", "http://x", "--concurrency", "0"), "'--concurrency': Expected whole numbers of at least 1"),
        ],
    )
    def test_options_of_the_other_way_are_refused(self, arguments: tuple[str, ...], message: str) -> None:
        done = bench(*arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
