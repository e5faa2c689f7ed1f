"""Chat templates, rendered as transformers renders them: a template is a stranger's code, so in Jinja's sandbox.

The environment (options, extensions, filters, globals) is that of transformers 5, `utils/chat_template_utils.py`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from domino_deploy.errors import BundleError, MissingDependencyError, RequestError

if TYPE_CHECKING:
    import jinja2


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
        except TemplateError as error:
            raise BundleError(
                f"Expected a Jinja chat template, found one that does not compile: {error}. Export the bundle again."
            ) from error

    def render(self, **variables: object) -> str:
        """The text of a conversation.

        Raises:
            RequestError: the template refuses the messages, or fails on them.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(**variables)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(
                f"Expected messages that the chat template accepts, found: {error}. Change the messages, or send a plain prompt."
            ) from error


def _environment() -> jinja2.Environment:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
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

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment
