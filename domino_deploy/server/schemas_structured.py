"""What of a body says which form the answer must have: OpenAI's `response_format`, vLLM's `structured_outputs` and its older names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from domino_deploy.runtime.constraints import MAX_SOURCE_CHARACTERS, Constraint, choices, json_schema, source_json
from domino_deploy.server.body import Body
from domino_deploy.server.not_honoured import STRUCTURED_INSTEAD, STRUCTURED_NOT_HONOURED, Neutral
from domino_deploy.server.problems import Problem
from domino_deploy.server.strict_schema import closed

MAX_NAME_CHARACTERS = 64
# Choices are written out for every request; a list of words is far below.
MAX_CHOICES = 4096

# Of functions and schemas, as OpenAI allows them.
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS, pattern=r"^[a-zA-Z0-9_-]+$")]
_Source = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARACTERS)]
_Schema = dict[str, Any] | _Source
_Choices = Annotated[list[_Source], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchemaFormat(Body):
    """A JSON schema that the answer must match."""

    name: Name = Field(description="What OpenAI's clients call it; without effect.")
    description: str | None = Field(default=None, description="Accepted, without effect.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The schema; a masked grammar makes the answer match it.")
    strict: bool | None = Field(
        default=None, description="true: objects that list properties have no others, unless additionalProperties says so."
    )


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="For the type json_schema.")
    object_schema: dict[str, Any] | None = Field(
        default=None, alias="schema", description="llama-server's, for the type json_object: a JSON schema; {} for any object."
    )

    def constraint(self) -> Constraint | None:
        """What the answer must match; errors as `Constraint`."""
        if self.type == "json_object":
            return json_schema(self.object_schema) if self.object_schema else Constraint(kind="json_object")
        if self.type == "json_schema" and self.json_schema is not None:
            schema = self.json_schema.json_schema
            # One that is too long is refused as it is.
            return json_schema(closed(schema) if self.json_schema.strict and source_json(schema) is not None else schema)
        return None

    def problems(self) -> Iterator[Problem]:
        if self.type == "json_schema" and self.json_schema is None:
            yield "response_format.json_schema", "expected it for the type json_schema, found no such field"
        if self.type != "json_schema" and self.json_schema is not None:
            yield "response_format.json_schema", f"expected it for the type json_schema only, found it for {self.type}"
        if self.type != "json_object" and self.object_schema is not None:
            yield "response_format.schema", f"expected it for the type json_object only, found it for {self.type}"


class StructuredOutputs(Body):
    """vLLM's forms of the answer, one of them."""

    not_honoured: ClassVar[Neutral] = STRUCTURED_NOT_HONOURED
    instead: ClassVar[Mapping[str, str]] = STRUCTURED_INSTEAD

    json_schema: _Schema | None = Field(default=None, alias="json", description="A JSON schema, as an object or as text.")
    regex: _Source | None = Field(default=None, description="A regular expression that the whole answer matches.")
    choice: _Choices | None = Field(default=None, description="The answer is one of these texts.")
    json_object: bool | None = Field(default=None, description="true: any JSON object.")
    disable_fallback: bool | None = Field(default=None, description="Accepted, without effect.")

    def constraint(self) -> Constraint:
        """What the answer must match; errors as `Constraint`."""
        if self.json_schema is not None:
            return _json(self.json_schema)
        if self.regex is not None:
            return _regex(self.regex)
        return Constraint(kind="json_object") if self.choice is None else choices(self.choice)

    def problems(self) -> Iterator[Problem]:
        forms = {"json": self.json_schema, "regex": self.regex, "choice": self.choice, "json_object": self.json_object or None}
        given = [name for name, form in forms.items() if form is not None]
        if len(given) != 1:
            yield "structured_outputs", f"expected one of {', '.join(forms)}, found {' and '.join(given) or 'none of them'}"


def _none_if_without_form(found: object) -> object:
    # Of unknown keys, one may be a slip: these are not taken for nothing. Nor is false, where it is of the wrong type.
    known = {*StructuredOutputs.names(), *StructuredOutputs.not_honoured}
    may_be_false = known - {"json", "regex", "choice"}
    is_empty = isinstance(found, dict) and all(
        (value is None and name in known) or (value is False and name in may_be_false) for name, value in found.items()
    )
    return None if is_empty else found


class StructuredFields(Body):
    """The fields of both endpoints that say what the answer must match: one of them at most."""

    parts: ClassVar[Mapping[str, type[Body]]] = {"structured_outputs": StructuredOutputs}

    response_format: ResponseFormat | None = Field(default=None, description="Text (left out), any JSON object, or a schema's JSON.")
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_none_if_without_form)] = Field(
        default=None, description="vLLM's: a JSON schema, a regular expression, a choice of texts, or any JSON object; {} for none."
    )
    guided_json: _Schema | None = Field(default=None, description="Older name of vLLM's structured_outputs.json.")
    guided_regex: _Source | None = Field(default=None, description="Older name of vLLM's structured_outputs.regex.")
    guided_choice: _Choices | None = Field(default=None, description="Older name of vLLM's structured_outputs.choice.")

    def problems(self) -> Iterator[Problem]:
        for field in (self.response_format, self.structured_outputs):
            if field is not None:
                yield from field.problems()
        given = self._given_forms
        if len(given) > 1:
            yield given[1], f"expected it without {given[0]}, found both"

    @property
    def constraint_field(self) -> str | None:
        """The field that says what the answer must match; None if it may be anything."""
        return next(iter(self._given_forms), None)

    def constraint(self) -> Constraint | None:
        """What the answer must match.

        Raises:
            ConstraintError: something too long to be enforced.
        """
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint()
        if self.guided_json is not None:
            return _json(self.guided_json)
        if self.guided_regex is not None:
            return _regex(self.guided_regex)
        if self.guided_choice is not None:
            return choices(self.guided_choice)
        return None if self.response_format is None else self.response_format.constraint()

    @property
    def _given_forms(self) -> list[str]:
        is_free = self.response_format is None or self.response_format.type == "text"
        names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice")
        return ([] if is_free else ["response_format"]) + [name for name in names if getattr(self, name) is not None]


def _json(schema: dict[str, Any] | str) -> Constraint:
    return Constraint(kind="json_schema", source=schema) if isinstance(schema, str) else json_schema(schema)


def _regex(expression: str) -> Constraint:
    return Constraint(kind="regex", source=expression)
