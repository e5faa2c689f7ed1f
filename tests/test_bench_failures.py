"""Why requests of `bench --url` fail: kinds, their words, and what to do."""

from __future__ import annotations

import http.client
import socket
import ssl

import pytest

from domino_deploy.bench import failures


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError(), "timeout"),
        (ConnectionRefusedError(), "connection_refused"),
        (socket.gaierror(), "unknown_host"),
        (ssl.SSLCertVerificationError(), "no_tls"),
        (http.client.RemoteDisconnected(), "broken_stream"),
        (http.client.IncompleteRead(b""), "broken_stream"),
        (http.client.BadStatusLine("x"), "no_http"),
        (failures.LongAnswer(), "long_answer"),
        (OSError("network is unreachable"), "no_connection"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_exception_is_a_kind_with_words_and_advice(error: Exception, kind: str) -> None:
    assert failures.kind_of(error) == kind
    assert "_" not in failures.words(kind)
    assert failures.advice(kind).endswith(".")


@pytest.mark.parametrize(("status", "flag"), [(401, "--api-key"), (403, "--url"), (404, "--model"), (429, "--concurrency"), (500, "log")])
def test_a_status_says_its_meaning_and_the_flag_to_look_at(status: int, flag: str) -> None:
    kind = failures.kind_of_status(status)
    assert failures.words(kind).startswith(f"status {status} ")
    assert flag in failures.advice(kind)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "no such model", "code": 404}}', "no such model"),
        ('{"object": "error", "message": "no such model"}', "no such model"),
        ('{"error": "overloaded", "error_type": "overloaded"}', "overloaded"),
        ('{"detail": [{"loc": ["model"]}]}', '[{"loc": ["model"]}]'),
        ('{"error": {"message": "two\\n\\tlines \\u001b[31mred \\ud800"}}', r"two lines \x1b[31mred \ud800"),
        ("upstream\nfailed", "upstream failed"),
        (" <html>502</html>", None),
        ('{"error": {}}', None),
        ('{"choices": []}', None),
        ("null", None),
        ("", None),
        ("[" * 100_000, "[" * 197 + "..."),
    ],
    ids=lambda value: None if value is None else repr(value)[:40],
)
def test_a_servers_own_words_are_found_and_become_one_short_line(body: str, message: str | None) -> None:
    assert failures.message_in(body.encode()) == message


def test_a_status_that_no_standard_knows_is_its_number() -> None:
    assert failures.words("http_799") == "status 799"
