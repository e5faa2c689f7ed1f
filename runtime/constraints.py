"""What an answer must match, and the masks that make it so (llguidance; imported when the first constraint comes)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from domino_deploy.errors import ConstraintError, MissingDependencyError
from domino_deploy.runtime.protocols import FloatArray

ConstraintKind = Literal["json_object", "json_schema", "regex", "lark"]

# Longest source. With the limits below, the worst schemas of this length that we tried (1000 objects in an anyOf, 1000 patterns) compile
# in a quarter of a second; twice the length is refused or takes half a second and more.
MAX_SOURCE_CHARACTERS = 64 * 1024
# What llguidance says of a source may quote all of it.
_MAX_QUOTED_CHARACTERS = 300
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "max_grammar_size": 100_000, "verbose_errors": False}
# Between the tokens of JSON: one blank, or one line break with up to sixteen levels of indentation.  Compact and indented JSON, and no
# way for a weak model to write empty lines until its tokens are used up.
_JSON_WHITESPACE = r" |\r?\n[ \t]{0,32}"

OPEN_CALL = "<tool_call>"
CLOSE_CALL = "</tool_call>"
# In characters, as sources are counted: escapes and blanks would make the same schema up to six times as long.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What the text of an answer must match, as a whole.

    Args:
        kind: "json_object": any JSON object; "json_schema": a JSON value of a schema; "regex": a regular expression; "lark": a grammar
            in llguidance's dialect of Lark.
        source: the schema (JSON text), the expression or the grammar; none for "json_object".
        called: what messages call it; the kind if empty.

    Raises:
        ConstraintError: another kind, or a source that is missing, too long or too much.
    """

    kind: ConstraintKind
    source: str = ""
    called: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise ConstraintError(
                f"Expected a constraint of {', '.join(get_args(ConstraintKind))}, found {self.kind!r:.40}. Use one of them."
            )
        if self.kind == "json_object" and self.source:
            raise ConstraintError(f"json_object: expected no source, found {self.source!r:.40}. Leave it out, or use json_schema.")
        if self.kind != "json_object" and not self.source:
            raise ConstraintError(f"{self.kind}: expected a source, found none. Give one.")
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise _too_long(self.name, str(len(self.source)))

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.called or self.kind


class Matcher(Protocol):
    """How far one answer has come in its constraint."""

    def mask(self, logits_V: FloatArray) -> None:
        """Set to -inf, in place, the logits of all tokens that may not come next.

        Raises:
            ConstraintError: that is more work than allowed.
        """

    def advance(self, token_id: int) -> None:
        """Take a chosen token in."""


class ConstraintCompiler:
    """Makes matchers for one tokenizer; may be used by several threads.

    Args:
        tokenizer_json: text of a `tokenizer.json`.
        vocab_size: logits of the target; may be more than the tokenizer has tokens.
        eos_token_ids: tokens that may come where an answer may end, and nowhere else.

    Raises:
        MissingDependencyError: llguidance is not installed.
        ConstraintError: the target has no end-of-sequence token, so that nothing could end an answer.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise MissingDependencyError(
                "Expected the package llguidance for constrained answers, found none. Run: pip install 'domino-deploy[serve]'"
            ) from error
        if not eos_token_ids:
            raise ConstraintError(
                "Expected a target with an end-of-sequence token for a constrained answer, found none. Leave the constraint out."
            )
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size

    def matcher(self, constraint: Constraint) -> Matcher:
        """A matcher at the start of an answer.

        Raises:
            ConstraintError: the source does not parse, asks for what cannot be enforced, or costs too much.
        """
        from llguidance import LLMatcher

        try:
            grammar = _grammar_of(constraint)
        except ValueError as error:
            raise _refused(constraint.name, str(error)) from error
        compiled = LLMatcher(self._tokenizer, grammar, limits=self._limits, log_level=0)  # 0: nothing is printed
        if compiled.is_error():
            raise _refused(constraint.name, compiled.get_error())
        return _GrammarMatcher(compiled, self._vocab_size, self._eos_token_ids, constraint.name)


class _GrammarMatcher:
    """A `Matcher` of llguidance's.  Behind an end-of-sequence token it forbids nothing: what is chosen there is dropped."""

    def __init__(self, compiled: Any, vocab_size: int, eos_token_ids: frozenset[int], name: str) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._compiled = compiled
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._name = name
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._has_ended = False

    def mask(self, logits_V: FloatArray) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        if self._has_ended:
            return
        fill_next_token_bitmask(self._compiled, self._bits)
        self._check()
        is_allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)
        np.copyto(logits_V, np.float32(-np.inf), where=~is_allowed)

    def advance(self, token_id: int) -> None:
        if self._has_ended:
            return
        self._compiled.consume_token(token_id)
        self._check()
        self._has_ended = token_id in self._eos_token_ids

    def _check(self) -> None:
        if self._compiled.is_error():
            found = _one_line(self._compiled.get_error())
            raise ConstraintError(
                f"{self._name}: expected an answer that can be checked step by step, found: {found}. Simplify the source."
            )


def tool_calls(parameters: Mapping[str, Mapping[str, Any] | None], *, is_forced: bool, is_parallel: bool) -> Constraint:
    """The grammar of an answer with calls of tools, in the form of Hermes' and Qwen's templates.

        <tool_call>
        {"name": "weather", "arguments": {"city": "Paris"}}
        </tool_call>

    Args:
        parameters: the tools that may be called, each with the JSON schema of its arguments; None for a tool without any.
        is_forced: the answer is nothing but calls; otherwise it is text, or text (or none) and calls.
        is_parallel: there may be several calls, a line break between them.

    Raises:
        ConstraintError: no tools, or too much of them.
    """
    if not parameters:
        raise ConstraintError("tools: expected at least one, found none. Leave the constraint out.")
    calls = [
        _quoted(f'{json.dumps(name, ensure_ascii=False)}, "arguments": ') + f" %json {_schema_source(schema or _NO_PARAMETERS)}"
        for name, schema in parameters.items()
    ]
    more = f'("\\n{OPEN_CALL}" body)*' if is_parallel else ""
    start = f'start: "{OPEN_CALL}" body {more}' if is_forced else f"start: TEXT | opening body {more}"
    rules = [
        start,
        "body: " + _quoted('\n{"name": ') + " call " + _quoted("}\n" + CLOSE_CALL),
        "call: " + " | ".join(f"call_{index}" for index in range(len(calls))),
        *(f"call_{index}: {call}" for index, call in enumerate(calls)),
    ]
    if not is_forced:
        # Lazy: the first opening tag ends the text, so that no tag stands in a text without a call behind it.
        rules += [f'opening[lazy]: TEXT "{OPEN_CALL}"', r"TEXT: /(.|\n)*/"]
    return Constraint(kind="lark", source="\n".join(rules), called="tools")


def choices(texts: Sequence[str]) -> Constraint:
    """The grammar of an answer that is one of `texts`, at least one, letter by letter.

    Raises:
        ConstraintError: too much of them.
    """
    # As a terminal, which is one expression: llguidance follows 2000 alternatives of a rule at most.
    if sum(map(len, texts)) > MAX_SOURCE_CHARACTERS:  # before they are written out
        raise _too_long("choice", "more")
    return Constraint(kind="lark", source="start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, texts)), called="choice")


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    """A JSON value of `schema`.

    Raises:
        ConstraintError: too much of it.
    """
    text = source_json(schema)
    if text is None:
        raise _too_long("json_schema", "more")
    return Constraint(kind="json_schema", source=text)


def source_json(value: object) -> str | None:
    """Compact JSON of a value, None if it is longer than a source may be: no more is written than tells."""
    pieces, characters = [], 0
    for piece in _ENCODER.iterencode(value):
        pieces.append(piece)
        characters += len(piece)
        if characters > MAX_SOURCE_CHARACTERS:
            return None
    return "".join(pieces)


def _too_long(name: str, found: str) -> ConstraintError:
    return ConstraintError(f"{name}: expected at most {MAX_SOURCE_CHARACTERS} characters, found {found}. Shorten or simplify it.")


def _refused(name: str, found: str) -> ConstraintError:
    return ConstraintError(f"{name}: expected a source that can be enforced, found: {_one_line(found)}. Correct or simplify it.")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_QUOTED_CHARACTERS]


def _grammar_of(constraint: Constraint) -> str:
    """Raises ValueError for some schemas that do not parse; others are found when the grammar is compiled."""
    from llguidance import LLMatcher

    match constraint.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides={"whitespace_pattern": _JSON_WHITESPACE})
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.source, overrides={"whitespace_pattern": _JSON_WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.source)
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.source)


def _schema_source(schema: Mapping[str, Any]) -> str:
    """A schema inside a grammar, with the whitespace that `_grammar_of` gives to one of its own."""
    return _ENCODER.encode({"x-guidance": {"whitespace_pattern": _JSON_WHITESPACE}, **schema})


def _quoted(text: str) -> str:
    """Text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)
