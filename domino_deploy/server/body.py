"""From the bytes of a request to a checked model: strict JSON, then pydantic, and every complaint with its place in the body."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from domino_deploy.errors import listed, shortened
from domino_deploy.server.errors import ApiError
from domino_deploy.server.not_honoured import Neutral, asks_for_nothing
from domino_deploy.server.problems import Place, Problem, described, joined, shown
from domino_deploy.server.state import ServerState, state_of
from domino_deploy.server.unknown_fields import UnknownFields
from domino_deploy.strict_json import JsonObject, strict_value

# JSON schemas of tools nest some ten levels; Python's own limit is the stack.
MAX_DEPTH = 64
# Lists and objects of a body; a body full of empty ones would take a hundred times its size.
MAX_CONTAINERS = 2**19
_MOST_PROBLEMS = 10
_ADVICE = "Correct the body and send the request again."


class Body(BaseModel):
    """A JSON object of a client: types as they are, no conversions; unknown fields are ignored.

    not_honoured: known fields that this server has no use for, each with values that ask for nothing (see `asks_for_nothing`); instead:
    of some of them, the field of ours that does their work; parts: fields that are objects with such fields of their own.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    not_honoured: ClassVar[Neutral] = {}
    instead: ClassVar[Mapping[str, str]] = {}
    parts: ClassVar[Mapping[str, type[Body]]] = {}

    @classmethod
    def names(cls) -> dict[str, str]:
        """Fields as bodies spell them, each with its attribute."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}

    def problems(self) -> Iterator[Problem]:
        """What is wrong across fields, once every field is right by itself."""
        yield from ()


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, model: type[AnyBody]) -> AnyBody:
    """The body of a request, checked.

    Raises:
        ApiError: 408; it did not come in time.  400; not declared as JSON, not strict JSON, or not what the model asks for; `param` is
            the first place of all.
    """
    _check_content_type(request.headers.get("content-type"))
    state = state_of(request)
    seconds = state.settings.body_seconds
    try:
        async with asyncio.timeout(seconds):
            text = await request.body()
    except TimeoutError as error:
        raise ApiError(
            408,
            f"Expected the whole body within {seconds:g} s, found a part of it. Send the request again.",
            code="request_timeout",
            headers={"Connection": "close"},  # the rest of the body may still come
        ) from error
    # Long token lists take a while, in which others' streams must go on.
    return await run_in_threadpool(_parsed, text, model, state)


def _parsed(text: bytes, model: type[AnyBody], state: ServerState) -> AnyBody:
    value = _json_object(text)
    problems = list(_refused_fields(value, model))
    if problems:
        raise invalid(problems, code="unsupported_parameter")
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        problems = described(error.errors(include_url=False), value)
        raise invalid([_naming_models(problem, value, state.model_names) for problem in problems]) from error
    problems = list(body.problems())
    if problems:
        raise invalid(problems)
    _note_unknown(value, body, state.unknown_fields)
    return body


def invalid(problems: Sequence[Problem], *, code: str | None = None) -> ApiError:
    """The answer to a body with `problems`, all of them named."""
    lines = [f"{place}: {problem}" if place else problem for place, problem in problems]
    message = (
        f"{lines[0]}. {_ADVICE}"
        if len(lines) == 1
        else listed(f"The body has {len(lines)} problems:", shortened(lines, _MOST_PROBLEMS), _ADVICE)
    )
    return ApiError(400, message, param=problems[0][0] or None, code=code)


def _check_content_type(header: str | None) -> None:
    # A browser sends other types, or none, to any server without asking it first (CORS): these must not start work.
    media_type, _, parameters = (header or "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        found = shown(header) if header else "none"
        raise ApiError(400, f"Expected the header Content-Type: application/json (in UTF-8), found {found}. Send the body as JSON.")


def _json_object(text: bytes) -> JsonObject:
    # An upper bound, since brackets inside of strings count as well; it costs next to nothing.
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise ApiError(400, f"Expected JSON of at most {MAX_CONTAINERS} lists and objects, found more brackets than that. {_ADVICE}")
    try:
        value = strict_value(text)
    except RecursionError as error:
        raise ApiError(400, f"Expected JSON of at most {MAX_DEPTH} levels, found far more. {_ADVICE}") from error
    except ValueError as error:  # not UTF-8, not JSON, or more than JSON allows
        raise ApiError(400, f"Expected a valid JSON object, found: {str(error)[:200]}. {_ADVICE}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"Expected a JSON object, found {shown(value)}. {_ADVICE}")
    _check_tree(value)
    return value


def _check_tree(value: JsonObject) -> None:
    """Depth, strings without lone surrogates, which no UTF-8 text holds (JSON's escapes can spell them), and no 1e999."""
    waiting: list[tuple[Place, Any]] = [((), value)]
    while waiting:
        place, item = waiting.pop()
        if len(place) > MAX_DEPTH:
            raise ApiError(400, f"Expected JSON of at most {MAX_DEPTH} levels, found more. {_ADVICE}", param=joined(place[:1]))
        for step, inner in item.items() if isinstance(item, dict) else enumerate(item):
            if isinstance(step, str):
                _check_text(step, place, step)
            if isinstance(inner, dict | list):
                waiting.append(((*place, step), inner))
            elif isinstance(inner, str):
                _check_text(inner, place, step)
            elif isinstance(inner, float) and not math.isfinite(inner):
                raise invalid([(joined((*place, step)), "expected a finite number, found one that no double can hold")])


def _check_text(text: str, place: Place, step: str | int) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = joined((*place, step)).encode("ascii", "backslashreplace").decode()
        raise ApiError(
            400, f"{where}: expected text that UTF-8 can hold, found the lone surrogate {text[error.start]!a}. {_ADVICE}", param=where
        ) from error


def _naming_models(problem: Problem, value: JsonObject, names: Sequence[str]) -> Problem:
    """Who sent no model is told what there is."""
    if problem[0] != "model" or value.get("model") is not None:
        return problem
    found = "null" if "model" in value else "no such field"
    return "model", f"expected {' or '.join(map(shown, names))}, which is served here, found {found}"


def _note_unknown(value: JsonObject, body: Body, unknown_fields: UnknownFields, place: str = "") -> None:
    """Tell the log of fields of no name that is known, in the objects inside too."""
    names = body.names()
    unknown_fields.note([name for name in value if name not in names and name not in body.not_honoured], names, place)
    for name, given in value.items():
        parsed = getattr(body, names[name]) if name in names else None
        if isinstance(parsed, Body):
            _note_unknown(given, parsed, unknown_fields, f"{place}{name}.")
        elif isinstance(parsed, list):
            for item, part in zip(given, parsed, strict=True):
                if isinstance(part, Body):
                    _note_unknown(item, part, unknown_fields, f"{place}{name}[].")


def _refused_fields(value: JsonObject, model: type[Body], place: str = "") -> Iterator[Problem]:
    for name, neutral in model.not_honoured.items():
        given = value.get(name)
        if not asks_for_nothing(name, given, neutral, value):
            wanted = " or ".join(["left out", *(shown(allowed) for allowed in neutral)])
            other = f", with {model.instead[name]} in its place" if name in model.instead else ""
            yield f"{place}{name}", f"this server does not support it; expected it {wanted}{other}, found {shown(given)}"
    for name, part in model.parts.items():
        inner = value.get(name)
        if isinstance(inner, dict):
            yield from _refused_fields(inner, part, f"{place}{name}.")
