"""What the soak's clients ask: requests whose answers are known from single runs, and requests that must be refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_deploy.runtime.session import GenerationParams, Session
from domino_deploy.training.prompts import short_chat, templated_code

# Several requests begin with each of these: their rows are found in another slot.
PREFIXES = (
    "You are a patient teacher. You explain every idea in plain words, give one example, and end with a question to the pupil.",
    "You are a software engineer who reviews code. You name the defect first, then the line, then the smallest change that mends it.",
    "You write for a newspaper. Sentences are short, every claim has a source, and opinions are left to others.",
)
LENGTHS = (1, 6, 16, 32, 48)
STOPS = ("\n\n", ".", "def ")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A greedy request and its answer from a session that serves nothing else."""

    path: str
    body: dict[str, Any]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class BadRequest:
    """A request that must be refused with `status`; `content` is sent as it is, `body` as JSON."""

    path: str
    status: int
    body: Any = None
    content: bytes | None = None


def known_cases(bundle: Path, model: str, count: int, *, seed: int, max_model_len: int, threads: int | None) -> list[Case]:
    """`count` requests, chat and plain completions, some with stop strings, half of them with a shared beginning; run one by one."""
    rng = random.Random(seed)
    questions = [*short_chat("held-out"), *templated_code("held-out")]
    rng.shuffle(questions)
    with Session.open(bundle, max_model_len=max_model_len, threads=threads) as session:
        has_template = session.tokenizer.has_chat_template
        return [_case(session, model, question, number, rng, has_template) for number, question in enumerate(questions[:count])]


def _case(session: Session, model: str, question: str, number: int, rng: random.Random, has_template: bool) -> Case:
    prefix = PREFIXES[number % len(PREFIXES)] if number % 2 else None
    stops = (rng.choice(STOPS),) if number % 5 == 0 else ()
    tokens = rng.choice(LENGTHS)
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": tokens}
    if stops:
        body["stop"] = list(stops)
    if number % 4 == 3 or not has_template:
        prompt = f"{prefix or ''}\n{question}"
        path, ids = "/v1/completions", session.prompt_ids(prompt, chat=False)
        body["prompt"] = prompt
    else:
        system = [] if prefix is None else [{"role": "system", "content": prefix}]
        path, ids = "/v1/chat/completions", session.prompt_ids(question, system=prefix)
        body["messages"] = [*system, {"role": "user", "content": question}]
    chunks = list(session.generate(ids, GenerationParams(max_new_tokens=tokens, stop_strings=stops)))
    return Case(
        path=path,
        body=body,
        text="".join(chunk.text for chunk in chunks),
        finish_reason=str(chunks[-1].finish_reason),
        prompt_tokens=len(ids),
        completion_tokens=sum(len(chunk.step.token_ids) for chunk in chunks),
    )


def bad_requests(model: str, max_model_len: int) -> Sequence[BadRequest]:
    """One of each kind that clients get wrong."""
    chat, plain = "/v1/chat/completions", "/v1/completions"
    good: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    changes: list[dict[str, Any]] = [
        {"n": 2},
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 0},
        {"max_tokens": -2},
        {"stop": [""]},
        {"messages": []},
        {"messages": "Hello"},
        {"messages": [{"role": "nobody", "content": "Hello"}]},
        {"logit_bias": {"1": 1000}},
        {"stream_options": {"include_usage": True}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"guided_grammar": 'root ::= "a"'},
        {"presence_penalty": 3},
    ]
    return [
        *(BadRequest(path=chat, status=400, body={**good, **change}) for change in changes),
        BadRequest(path=chat, status=404, body={**good, "model": "another"}),
        BadRequest(path=chat, status=400, content=b'{"model": '),
        BadRequest(path=chat, status=400, content=b"\xff\xfe"),
        BadRequest(path=chat, status=400, body=[good]),
        BadRequest(path=plain, status=400, body={"model": model, "prompt": [1] * (max_model_len + 1), "max_tokens": 1}),
        BadRequest(path=plain, status=400, body={"model": model, "prompt": [-1], "max_tokens": 1}),
        BadRequest(path=plain, status=400, body={"model": model, "max_tokens": 1}),
        BadRequest(path="/v1/nothing", status=404, body={}),
    ]
