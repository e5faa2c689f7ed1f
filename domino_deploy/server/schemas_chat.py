"""The body of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from domino_deploy.errors import shortened
from domino_deploy.runtime.constraints import MAX_SOURCE_CHARACTERS, Constraint, source_json, tool_calls
from domino_deploy.server.body import Body
from domino_deploy.server.fields import MAX_TOKENS, NO_LIMIT, GenerationFields, TopLogprobs
from domino_deploy.server.not_honoured import CHAT_INSTEAD, CHAT_NOT_HONOURED, Neutral
from domino_deploy.server.problems import Problem, shown
from domino_deploy.server.schemas_structured import MAX_NAME_CHARACTERS, Name
from domino_deploy.server.strict_schema import closed
from domino_deploy.template_variables import OWN_VARIABLES

# Far above what conversations hold, low enough for a template to run through; OpenAI takes 128 tools.
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_TEMPLATE_VARIABLES = 64
_MOST_NAMES = 8  # in a message


def _text_only(found: object) -> object:
    if isinstance(found, str) and found != "text":
        raise PydanticCustomError("no_text_part", "expected text")  # told in words of `problems.EXPECTED`
    return found


class TextPart(Body):
    """A piece of a message's text; images, audio and files are refused."""

    type: Annotated[Literal["text"], BeforeValidator(_text_only)]
    text: str


class CalledFunction(Body):
    """What the assistant called, and with what."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Body):
    """One call of a tool in an earlier message of the assistant."""

    id: str | None = Field(default=None, description="What the tool's message names as `tool_call_id`.")
    type: Literal["function"] | None = None
    function: CalledFunction

    @property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments as an object, which is what templates expect; None if they are none."""
        try:
            found = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


class Message(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        default=None, description="Text, or text in parts, which are joined by line breaks; null for an assistant that only calls tools."
    )
    name: str | None = Field(default=None, description="Who speaks; the template may show it.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="The assistant's."
    )
    tool_call_id: str | None = Field(default=None, description="The call that a tool's message answers.")
    reasoning_content: str | None = Field(default=None, description="The assistant's; the template may show it.")
    audio: None = Field(default=None, description="Not supported.")
    function_call: None = Field(default=None, description="Not supported; see tool_calls.")

    @property
    def text(self) -> str:
        """The text in one piece, "" for none."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def problems(self) -> Iterator[Problem]:
        if self.content is None and self.role != "assistant":
            yield "content", f"expected text in a message of the role {self.role}, found none"
        if self.content is None and self.role == "assistant" and not self.tool_calls:
            yield "content", "expected text in an assistant's message without tool_calls, found none"
        if self.tool_calls and self.role != "assistant":
            yield "tool_calls", f"expected it in an assistant's message only, found it in one of the role {self.role}"
        for index, call in enumerate(self.tool_calls or ()):
            if call.arguments is None:
                yield f"tool_calls[{index}].function.arguments", f"expected a JSON object as text, found {shown(call.function.arguments)}"
        if self.role == "tool" and self.tool_call_id is None:
            yield "tool_call_id", "expected it in a tool's message, found no such field"


class Function(Body):
    """A function that the model may call."""

    name: Name = Field(description="Each tool needs one of its own.")
    description: str | None = Field(default=None, description="For the model: what it does and when to call it.")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of its arguments; none if left out.")
    strict: bool | None = Field(
        default=None, description="true: calls match the schema, whose objects have no other properties; forced ones match in any case."
    )

    @property
    def schema_of_arguments(self) -> dict[str, Any] | None:
        """What calls must match where they are constrained; None for no arguments."""
        found: dict[str, Any] | None = closed(self.parameters) if self.strict else self.parameters
        return found


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function among the tools."""

    name: str


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationFields):
    """A request for the next message of a conversation."""

    not_honoured: ClassVar[Neutral] = CHAT_NOT_HONOURED
    instead: ClassVar[Mapping[str, str]] = CHAT_INSTEAD

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation, oldest message first; the bundle's own chat template makes the prompt of it."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        default=None, description="Newer name of max_tokens; if both are left out, as many as the model's length allows."
    )
    logprobs: bool | None = Field(default=None, description="Report the log-probability of every token.")
    top_logprobs: TopLogprobs | None = Field(default=None, description="Likeliest tokens to report at each position; with logprobs only.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="auto (left out): as the model likes; required or a name: the answer is forced to be a call."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: one call at most.")
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = Field(
        default=None, description="Variables of the model's own chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(default=None, description="End the prompt where the assistant begins; true if left out.")

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model is told of: none if it may not call any."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def constraint_field(self) -> str | None:
        """The field that says what the answer must match; tools do, where calls are forced or must fit their schemas."""
        return "tools" if self._constrains_calls else super().constraint_field

    def constraint(self) -> Constraint | None:
        """The grammar of calls, or the response format's."""
        if not self._constrains_calls:
            return super().constraint()
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in self.usable_tools}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return tool_calls({name: schemas[name]}, is_forced=True, is_parallel=False)
        return tool_calls(schemas, is_forced=self.tool_choice == "required", is_parallel=self.parallel_tool_calls is not False)

    @property
    def _constrains_calls(self) -> bool:
        is_forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        is_strict = self.parallel_tool_calls is False or any(tool.function.strict for tool in self.usable_tools)
        return bool(self.usable_tools) and (is_forced or is_strict)

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens to generate at most; None for what the model's length allows."""
        wanted = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return None if wanted == NO_LIMIT else wanted

    @property
    def wanted_logprobs(self) -> int | None:
        """Likeliest tokens to report, None for no report."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for index, message in enumerate(self.messages):
            yield from ((f"messages[{index}].{place}", problem) for place, problem in message.problems())
        if self.max_tokens == 0:
            yield "max_tokens", "expected at least 1, found 0"
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield (
                "max_tokens",
                f"expected it equal to max_completion_tokens, {self.max_completion_tokens}, or left out, found {self.max_tokens}",
            )
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", "expected it with logprobs: true only, found it without"
        for name in self.chat_template_kwargs or ():
            if name in OWN_VARIABLES:
                yield f"chat_template_kwargs.{name}", "expected variables of the model's template, found one that the server sets itself"
        yield from self._tool_problems()

    def _tool_problems(self) -> Iterator[Problem]:
        names = [tool.function.name for tool in self.tools or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield "tools", f"expected each name once, found more of {', '.join(shortened(twice, _MOST_NAMES))}"
        if source_json([tool.model_dump() for tool in self.tools or ()]) is None:
            yield "tools", f"expected at most {MAX_SOURCE_CHARACTERS} characters of JSON, found more"
        if not names and self.tool_choice in (None, "none"):
            return
        if not names:
            yield "tool_choice", "expected it with tools only, found no tools"
        elif isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            yield "tool_choice", f"expected the name of one of the tools, found {shown(self.tool_choice.function.name)}"
        form = super().constraint_field
        if self.usable_tools and form is not None:
            yield form, "expected no form of the answer beside tools that may be called, found both"
