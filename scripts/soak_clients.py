"""The soak's clients: each does one thing after the other, most of it right, and writes down what came of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from soak_cases import BadRequest, Case

# How often each is done.  Sampled requests are only checked for their form.
ACTIONS = {"finish": 56, "finish plainly": 8, "sample": 8, "close a stream": 10, "cancel": 8, "send a bad request": 10}
MAX_PAUSE_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An answer that came to its end, as the client saw it.

    cached_tokens: of the prompt; is_plain: drafts were not wanted; drafts, drafted_tokens, accepted_tokens: cycles that drafted, and
    their tokens; max_drafts: tokens that a cycle drafts at most.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    is_plain: bool
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    max_drafts: int


@dataclass(frozen=True, kw_only=True)
class Left:
    """A request that its client left; has_started: behind a part of its answer."""

    prompt_tokens: int
    max_tokens: int
    has_started: bool


@dataclass(kw_only=True)
class Ledger:
    """What was sent and what came of it.

    actions: requests by what was tried; statuses: answers by status, streams included; finished: whole answers; left:
    requests whose client went away first; wrong: answers that differ from their single run, or have a wrong form or status;
    checked: greedy answers that were compared; id_prefix: of the requests' ids.
    """

    actions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    finished: list[Finished] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    checked: int = 0
    sent: int = 0
    id_prefix: str = "soak-"

    def next_id(self) -> str:
        self.sent += 1
        return f"{self.id_prefix}{self.sent}"


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What all clients share."""

    client: httpx.AsyncClient
    cases: Sequence[Case]
    bad: Sequence[BadRequest]
    ledger: Ledger


async def run_client(soak: Soak, seed: int, ends: asyncio.Event) -> None:
    """Ask until `ends` is set."""
    rng = random.Random(seed)
    # However short the soak, its first actions are of every kind.
    action = list(ACTIONS)[seed % len(ACTIONS)]
    while True:
        soak.ledger.actions[action] += 1
        if action == "send a bad request":
            await _refused(soak, rng.choice(soak.bad))
        else:
            await ask(soak, rng.choice(soak.cases), action, rng)
        await asyncio.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))
        if ends.is_set():
            return
        action = rng.choices(list(ACTIONS), weights=list(ACTIONS.values()))[0]


async def ask(soak: Soak, case: Case, action: str, rng: random.Random) -> None:
    """Send a case's request in one of the two forms and do with it what the action says."""
    body = dict(case.body)
    if action == "sample":
        body |= {"temperature": 1.0, "seed": rng.randrange(2**31), "top_p": 0.9}
    if action == "finish plainly":
        body["speculative"] = False
    streams = action == "close a stream" or (action != "cancel" and rng.random() < 0.5)
    request_id = soak.ledger.next_id()
    wait = 0.0
    if action == "cancel":
        try:
            wait = await asyncio.wait_for(_whole(soak, case, body, request_id), timeout=rng.uniform(0, 1.5))
        except TimeoutError:
            soak.ledger.left.append(_left(case, has_started=False))
    elif streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        most = rng.randint(0, 4) if action == "close a stream" else None
        wait = await _streamed(soak, case, body, request_id, most)
    else:
        wait = await _whole(soak, case, body, request_id)
    await asyncio.sleep(wait)


async def _whole(soak: Soak, case: Case, body: dict[str, Any], request_id: str) -> float:
    """Ask and enter what comes; seconds to wait if the queue is full."""
    response = await soak.client.post(case.path, json=body, headers={"x-request-id": request_id})
    soak.ledger.statuses[response.status_code] += 1
    if response.status_code != 200:
        return _not_served(soak, response.status_code, response.headers, response.text)
    answer = response.json()
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    _note(soak, case, body, request_id, text, choice["finish_reason"], answer)
    return 0.0


async def _streamed(soak: Soak, case: Case, body: dict[str, Any], request_id: str, most: int | None) -> float:
    """Read a stream to its end, or leave behind its first `most` chunks; seconds to wait if the queue is full."""
    text, reason, last, seen = "", None, None, 0
    async with soak.client.stream("POST", case.path, json=body, headers={"x-request-id": request_id}) as response:
        soak.ledger.statuses[response.status_code] += 1
        if response.status_code != 200:
            return _not_served(soak, response.status_code, response.headers, (await response.aread()).decode())
        if most == 0:
            soak.ledger.left.append(_left(case, has_started=False))
            return 0.0
        async for chunk in _events(response):
            seen += 1
            last = chunk if chunk.get("usage") else last
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice["finish_reason"] or reason
            if seen == most:
                soak.ledger.left.append(_left(case, has_started=True))
                return 0.0
    if reason is None or last is None:
        soak.ledger.wrong.append(f"{request_id}: a stream without finish reason or usage: {text!r}")
    else:
        _note(soak, case, body, request_id, text, reason, last)
    return 0.0


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every event; not by httpx's lines, which also end at separators that JSON strings may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def _left(case: Case, *, has_started: bool) -> Left:
    return Left(prompt_tokens=case.prompt_tokens, max_tokens=case.body["max_tokens"], has_started=has_started)


def _not_served(soak: Soak, status: int, headers: httpx.Headers, text: str) -> float:
    """429 is what a full queue answers, and says how long to wait; nothing else may come back for a good request."""
    wait = headers.get("retry-after", "")
    if status == 429 and wait.isdecimal():
        return min(float(wait), 5.0)
    soak.ledger.wrong.append(f"a good request was answered with {status}: {text[:300]}")
    return 0.0


async def _refused(soak: Soak, bad: BadRequest) -> None:
    content = json.dumps(bad.body).encode() if bad.content is None else bad.content
    headers = {"content-type": "application/json", "x-request-id": soak.ledger.next_id()}
    response = await soak.client.post(bad.path, content=content, headers=headers)
    soak.ledger.statuses[response.status_code] += 1
    try:
        has_error = isinstance(response.json()["error"]["message"], str)
    except (ValueError, KeyError, TypeError):
        has_error = False
    # What only the engine can refuse, such as a schema that does not compile, may find its queue full first.
    if response.status_code not in (bad.status, 429) or not has_error:
        found = f"{response.status_code} {response.text[:200]}"
        soak.ledger.wrong.append(f"{bad.path} {content[:80]!r}: expected {bad.status} with an error, found {found}")


def _note(soak: Soak, case: Case, body: dict[str, Any], request_id: str, text: str, reason: str, told: dict[str, Any]) -> None:
    """Enter a whole answer, greedy ones compared with their single run; `told`: what bears its usage and its statistics."""
    usage, speculation = told["usage"], told["metrics"]["speculative_decoding"]
    found = (text, reason, usage["completion_tokens"])
    if body["temperature"] == 0:
        soak.ledger.checked += 1
        if found != (case.text, case.finish_reason, case.completion_tokens):
            wanted = (case.text, case.finish_reason, case.completion_tokens)
            soak.ledger.wrong.append(f"{request_id}: expected {wanted!r} as in the single run, found {found!r}")
    soak.ledger.finished.append(
        Finished(
            request_id=request_id,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            completion_tokens=usage["completion_tokens"],
            finish_reason=reason,
            is_plain=body.get("speculative") is False,
            drafts=speculation["num_spec_steps"],
            drafted_tokens=speculation["num_draft_tokens"],
            accepted_tokens=speculation["num_accepted_draft_tokens"],
            max_drafts=speculation["num_spec_tokens"],
        )
    )
