"""`domino-deploy bench --url` against scripted servers: what is timed and counted, and what servers do wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from domino_deploy.bench import load
from domino_deploy.bench.client import Answer, Client
from domino_deploy.bench.event_stream import EventReader
from domino_deploy.bench.load import LoadSettings
from domino_deploy.cli import main
from domino_deploy.errors import RequestError
from tests.support.loopback import served
from tests.support.scripted_server import KEY, USAGE, ScriptedServer, answer, chunk


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Prompt {number}"}) + "\n" for number in range(3)))
    return path


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], env={"OPENAI_API_KEY": KEY})


def one(*stream: str | bytes | float, timeout_seconds: float = 60.0) -> Answer:
    with ScriptedServer(list(stream)).url() as url:
        return Client(url, timeout_seconds=timeout_seconds).stream(load.CHAT_PATH, {})


class TestEvents:
    CASES = (
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\rdata: b\r\r", ["a"]),  # the last carriage return may be half of a line end
        ("data: a\ndata: b\ndata\ndata:c\n\n", ["a\nb\n\nc"]),
        (": comment\n\n: another\ndata: a\n: within\n\n", ["a"]),
        ("event: x\nid: 7\nretry: 1\n\ndata:  two spaces\n\n", [" two spaces"]),
        ("\ufeffdata: schön 🦆\n\n", ["schön 🦆"]),
        ("data: cut off\n", []),
    )

    @pytest.mark.parametrize(("text", "expected"), CASES)
    @pytest.mark.parametrize("size", [1, 2, 3, 1000])
    def test_events_are_the_same_wherever_the_pieces_end(self, text: str, expected: list[str], size: int) -> None:
        reader, content = EventReader(), text.encode()
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == expected

    def test_data_that_is_no_utf8_is_an_error(self) -> None:
        with pytest.raises(UnicodeDecodeError):
            list(EventReader().feed(b"data: \xff\n\n"))


class TestOneRequest:
    def test_text_usage_and_times_are_read(self) -> None:
        found = one(": ping\n\n", chunk(""), 0.2, chunk("Hel"), 0.1, chunk("lo"), 0.1, chunk(None, usage=USAGE), "data: [DONE]\n\n")
        assert (found.error, found.text) == (None, "Hello")
        assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (7, 3, 5)
        # Bounds from below alone are certain: a busy machine only adds.
        assert found.first_text_ms is not None
        assert found.first_text_ms >= 200
        assert len(found.chunk_gaps_ms) == 1
        assert found.token_ms == pytest.approx(found.chunk_gaps_ms[0] / 4)
        assert found.total_ms >= found.first_text_ms + found.chunk_gaps_ms[0] + 100

    def test_thoughts_arguments_of_calls_and_completions_are_text(self) -> None:
        call = {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}
        thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
        completion = {"choices": [{"text": "!", "finish_reason": None}]}
        found = one(*(f"data: {json.dumps(piece)}\n\n" for piece in (thought, call, completion)), "data: [DONE]\n\n")
        assert found.text == "hm{}!"

    def test_a_server_without_usage_leaves_token_figures_unmeasured(self) -> None:
        found = one(chunk("a"), chunk("b"), "data: [DONE]\n\n")
        assert (found.error, found.completion_tokens, found.token_ms) == (None, None, None)
        assert found.first_text_ms is not None

    @pytest.mark.parametrize(
        ("stream", "error", "text"),
        [
            ([chunk("half")], "broken_stream", "half"),
            ([chunk("half"), 'data: {"error": {"message": "x"}}\n\n'], "error_in_stream", "half"),
            ([chunk("half"), "data: {no json\n\n"], "bad_chunk", "half"),
            (["data: [1]\n\n"], "bad_chunk", ""),
            ([b"data: \xff\n\n"], "bad_chunk", ""),
        ],
    )
    def test_a_stream_that_fails_says_how(self, stream: list[str | bytes | float], error: str, text: str) -> None:
        found = one(*stream)
        assert (found.error, found.text) == (error, text)

    def test_silence_is_a_timeout(self) -> None:
        assert one(chunk("a"), 1.5, chunk("b"), timeout_seconds=0.3).error == "timeout"

    @pytest.mark.parametrize(
        ("response", "error"),
        [
            (JSONResponse({"error": {}}, status_code=429, headers={"Retry-After": "1"}), "http_429"),
            (JSONResponse({}, status_code=500), "http_500"),
            (JSONResponse({"choices": []}), "no_event_stream"),
        ],
    )
    def test_a_refused_request_says_its_status(self, response: Response, error: str) -> None:
        with ScriptedServer(response).url() as url:
            assert Client(url).stream(load.CHAT_PATH, {}).error == error

    def test_no_server_is_a_refused_connection(self) -> None:
        with ScriptedServer(answer("a")).url() as url:
            gone = url
        client = Client(gone, timeout_seconds=5)
        assert client.stream(load.CHAT_PATH, {}).error == "connection_refused"
        assert client.metrics() is None

    @pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://x/?a=b"])
    def test_an_address_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(RequestError, match="Expected the address of a server"):
            Client(url)


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

    def test_nothing_measured_is_none_and_not_zero(self) -> None:
        found = load.level(1, [Answer(started=0, ended=1, error="http_500")], 1.0, speculation=None)
        assert (found.tokens_per_second, found.first_text_ms, found.total_ms) == (None, None, None)
        nothing = load.Speculation(drafts=0, drafted=0, accepted=0)
        assert (nothing.acceptance_length, nothing.acceptance_rate) == (None, None)

    def test_values_out_of_range_are_all_named(self) -> None:
        with pytest.raises(RequestError) as raised:
            LoadSettings(concurrency=(1, 0), requests=0, max_new_tokens=0, warm_up_requests=-1, timeout_seconds=0)
        assert str(raised.value).count("\n  - ") == 5


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
        assert "| concurrency | TTFT ms | TPOT ms per token | ITL ms per chunk | E2E ms |" in done.stdout
        row = next(line for line in done.stdout.splitlines() if line.startswith("| 2 | 3 | 0 |"))
        assert row.endswith("| - | - |")  # no metrics, no acceptance

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

    def test_failed_requests_are_counted_by_kind_and_told(self, prompt_file: Path) -> None:
        refused = JSONResponse({}, status_code=429)
        with ScriptedServer(refused, [chunk("x")], answer("a", "b")).url() as url:
            flags = ("--concurrency", "1", "--requests", "4", "--warm-up", "0", "--json")
            done = bench("--url", url, "--prompts", prompt_file, *flags)
        assert done.exit_code == 0, done.output
        level = json.loads(done.stdout)["levels"][0]
        assert level["errors"] == {"broken_stream": 1, "http_429": 1}
        assert level["completion_tokens"] == 10
        assert "concurrency 1: 1 x http_429, status 429 Too Many Requests" in done.stderr

    def test_the_tables_count_failed_requests_by_kind_and_say_what_each_is(self, prompt_file: Path) -> None:
        refused = JSONResponse({}, status_code=429)
        with ScriptedServer(refused, [chunk("x")], refused, answer("a", "b")).url() as url:
            flags = ("--concurrency", "1", "--requests", "4", "--warm-up", "0")
            done = bench("--url", url, "--prompts", prompt_file, *flags)
        rows = [line.split("\t") for line in done.stdout.splitlines()]
        assert ["concurrency", "requests", "kind", "found"] in rows
        assert ["1", "2", "http_429", "status 429 Too Many Requests"] in rows
        assert ["1", "1", "broken_stream", "a connection that ended before the answer did"] in rows

    @pytest.mark.parametrize("flags", [(), ("--model", "tiny")], ids=["by its list", "named"])
    def test_no_server_is_said_in_words_and_what_to_do(self, prompt_file: Path, flags: tuple[str, ...]) -> None:
        with ScriptedServer(answer("a")).url() as url:
            gone = url
        done = bench("--url", gone, "--prompts", prompt_file, "--concurrency", "1", "--requests", "1", *flags)
        assert done.exit_code == 1
        for words in (gone, "connection refused: no server listens there", "Start the server, or correct --url."):
            assert words in done.stderr
        assert "ConnectionRefusedError" not in done.stderr

    def test_a_server_without_a_list_of_models_shows_what_it_gave(self, prompt_file: Path) -> None:
        with served(Starlette(routes=[Route("/v1/models", lambda request: PlainTextResponse("Welcome"))])) as url:
            done = bench("--url", url, "--prompts", prompt_file)
        assert done.exit_code == 1
        assert "found no such list at /v1/models, but 'Welcome'. Correct --url, or name the --model." in done.stderr

    def test_a_run_in_which_every_request_fails_is_an_error(self, prompt_file: Path) -> None:
        with ScriptedServer(JSONResponse({}, status_code=500)).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--concurrency", "1", "--requests", "2")
        assert done.exit_code == 1
        assert "concurrency 1: 2 x http_500" in done.stderr

    def test_a_wrong_key_is_named_before_anything_is_measured(self, prompt_file: Path) -> None:
        with ScriptedServer(answer("a")).url() as url:
            done = bench("--url", url, "--prompts", prompt_file, "--api-key", "wrong")
        assert done.exit_code == 1
        assert "status 401" in done.stderr
        assert "--api-key" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "found neither"),
            (("b", "--url", "http://x"), "found both"),
            (("b", "--concurrency", "2", "--requests", "3"), "Expected no --concurrency, --requests when measuring a bundle"),
            (("--url", "http://x", "--backend", "eager", "--threads", "2"), "Expected no --backend, --threads when measuring a server"),
            (("--url", "http://x", "--concurrency", "1,x"), "Expected whole numbers of at least 1 separated by commas"),
            (("--url", "http://x", "--concurrency", "0"), "'--concurrency': Expected whole numbers of at least 1"),
        ],
    )
    def test_options_of_the_other_way_are_refused(self, arguments: tuple[str, ...], message: str) -> None:
        done = bench(*arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
