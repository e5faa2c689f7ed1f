"""Chat templates, rendered as transformers renders them: a template is a stranger's code, so in Jinja's sandbox.

The environment (options, extensions, filters, globals) is that of transformers 5, `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from domino_deploy.errors import BundleError, MissingDependencyError, RequestError, one_line

if TYPE_CHECKING:
    import jinja2

# Of one conversation; a million tokens take some 5 million.  Bounds the memory that a template can take by looping.
MAX_CHARACTERS = 2**25


class ChatTemplate:
    """A compiled template.

    Raises:
        MissingDependencyError: the package jinja2 is not installed.
        BundleError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        from jinja2 import TemplateError

        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, OverflowError, SyntaxError) as error:  # the last three from Python's compiler
            raise BundleError(
                f"Expected a Jinja chat template, found one that does not compile: {_reason(error)}. Export the bundle again."
            ) from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text of a conversation.

        Raises:
            RequestError: the template refuses the messages, or fails on them.
        """
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise ValueError(f"more than {MAX_CHARACTERS} characters of output")
        except Exception as error:  # whatever a stranger's code can raise: ZeroDivisionError, RecursionError, MemoryError, ...
            raise RequestError(
                f"Expected messages that the chat template accepts, found: {_reason(error)}. Change the messages, or send a plain prompt."
            ) from error
        return "".join(pieces)


def _reason(error: Exception) -> str:
    """What a template says, which may quote a whole message."""
    return one_line(str(error).rstrip(".")) or type(error).__name__


def _environment() -> jinja2.Environment:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError, TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.runtime import Context
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError("Expected the package jinja2, found none. Run: pip install domino-deploy") from error

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's own text for training; here its body is text like any other."""

        tags = {"generation"}  # noqa: RUF012  the name and type that Jinja looks for

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's sandbox without powers: 9**9**9 is one operation that nothing can interrupt."""

        intercepted_binops = frozenset({"**"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> NoReturn:
            raise SecurityError(f"the operator {operator} is not available in chat templates")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter would escape HTML characters.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    del environment.globals["lipsum"]  # runs for as long as its argument says
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
