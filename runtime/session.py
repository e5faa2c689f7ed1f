"""A session: a bundle opened with a backend and a drafter, ready for one request after the other.

with Session.open("bundle") as session:
    for chunk in session.generate(session.prompt_ids("Hello"), GenerationParams()):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from domino_deploy.backends import Backend
from domino_deploy.bundle import Bundle
from domino_deploy.errors import RequestError
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.runtime.choosing import Chooser
from domino_deploy.runtime.constraints import ConstraintCompiler
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.opening import DEFAULT_MAX_MODEL_LEN, DrafterChoice, backend_module, checked_bundle, chosen_drafter
from domino_deploy.runtime.output import OutputStream
from domino_deploy.runtime.protocols import Drafter, Step, Target
from domino_deploy.runtime.requests import GenerationParams, OutputToken, TokenLogprobs
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.text import Tokenizer

__all__ = ["DEFAULT_MAX_MODEL_LEN", "Backend", "Chunk", "DrafterChoice", "GenerationParams", "Provider", "SamplingParams", "Session"]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens whose text one step made certain (there may be none), and the step; joined, the texts are the answer.

    prompt_logprobs: of the whole prompt, None for its first token; on the first chunk, if asked for.
    """

    tokens: tuple[OutputToken, ...]
    step: Step
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finish_reason(self) -> str | None:
        return self.step.finish_reason


class Session:
    """Serves one request at a time; a context manager that owns target and drafter.

    Made by `open`; the constructor takes the parts as they are.
    """

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer, target: Target, drafter: Drafter | None) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.target = target
        self.drafter = drafter
        self._requests = 0
        self._is_open = True

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        *,
        backend: Backend = Backend.ORT,
        provider: Provider = Provider.CPU,
        drafter: DrafterChoice = DrafterChoice.BUNDLE,
        max_model_len: int | None = None,
        threads: int | None = None,
    ) -> Self:
        """Open a bundle.

        Args:
            bundle: the bundle's folder.
            backend: what runs the models.
            provider: what ONNX Runtime computes on; for that backend only.
            drafter: where proposals come from.
            max_model_len: longest prompt and answer together, in tokens; None for the target's own maximum, but not
                above `DEFAULT_MAX_MODEL_LEN`, or for what the engines were built for (TensorRT).
            threads: threads inside an operator; None for one per physical core (ORT) or PyTorch's own choice (eager).

        Raises:
            BundleError: not a bundle, a damaged one, or one with another model's tokenizer.
            EngineError: no engines that fit this machine, or damaged ones (TensorRT).
            RequestError: a value out of range, one that the backend has no use for, or a precision that it does not run.
            MissingDependencyError: the backend's package is not installed, or its driver.
            CapacityError: the GPU has too little memory (TensorRT).
        """
        opened, tokenizer, asked = checked_bundle(bundle, backend, provider, drafter, max_model_len, threads)
        target, loaded = backend_module(backend).open_pair(opened, **asked)
        return cls(opened, tokenizer, target, chosen_drafter(drafter, loaded))

    @property
    def default_num_speculative_tokens(self) -> int:
        """What a request that does not say gets: the bundle's number, or fewer if the drafter proposes fewer."""
        if self.drafter is None:
            return 0
        return min(self.bundle.manifest.num_speculative_tokens, self.drafter.max_proposals)

    def prompt_ids(self, prompt: str, *, chat: bool = True, system: str | None = None) -> list[int]:
        """Tokens of a prompt.

        Args:
            prompt: the user's text.
            chat: put it into the target's chat template; otherwise it is taken as it is.
            system: a system message; for `chat` only.

        Raises:
            RequestError: a system message without `chat`, no chat template, or one that refuses these messages.
        """
        if not chat:
            if system is not None:
                raise RequestError("Expected a system message in a chat prompt only, found one with a plain prompt. Drop one of the two.")
            return self.tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        # The template spells special tokens out; the tokenizer must not add its own once more.
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)

    def steps(self, prompt_ids: Sequence[int], params: GenerationParams) -> Iterator[Step]:
        """Generate tokens; stop strings are not looked for.

        Raises:
            RequestError: a request that cannot be served, or, while iterating, one that was overtaken by another.
            CapacityError: a prompt that leaves no room for an answer in this session's model length.
        """
        params = self._with_end(params)
        return self._steps(prompt_ids, params, self._chooser(prompt_ids, params))

    def generate(self, prompt_ids: Sequence[int], params: GenerationParams) -> Iterator[Chunk]:
        """Generate text, one chunk per step; errors as `steps`.

        A stop string ends it with its first character: what follows is in no chunk's text, tokens that follow the one
        that completes it are in no chunk's step, and the step's counters are those of the tokens kept.
        """
        params = self._with_end(params)
        chooser = self._chooser(prompt_ids, params)
        return self._chunks(self._steps(prompt_ids, params, chooser), chooser, OutputStream(self.tokenizer.decode, params))

    def close(self) -> None:
        """Free target and drafter; the session cannot be used any more."""
        if self._is_open:
            self._is_open = False
            del self.target, self.drafter

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _with_end(self, params: GenerationParams) -> GenerationParams:
        if not self._is_open:
            raise RequestError("Expected an open session, found a closed one. Open the bundle again.")
        return params.ended_by(self.bundle.target.eos_token_ids)

    def _chooser(self, prompt_ids: Sequence[int], params: GenerationParams) -> Chooser:
        return Chooser(params, prompt_ids, None if params.constraint is None else self._compiler.matcher(params.constraint))

    @cached_property
    def _compiler(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.tokenizer.source, self.target.vocab_size, self.bundle.target.eos_token_ids)

    def _steps(self, prompt_ids: Sequence[int], params: GenerationParams, chooser: Chooser) -> Iterator[Step]:
        count = self.default_num_speculative_tokens if params.num_speculative_tokens is None else params.num_speculative_tokens
        steps = generate(self.target, self.drafter, prompt_ids, params, num_speculative_tokens=count, chooser=chooser)
        self._requests += 1
        return self._guarded(steps, self._requests)

    def _guarded(self, steps: Iterator[Step], request: int) -> Iterator[Step]:
        """The steps of one request, as long as it is the latest: all requests share the target's cache."""
        finished = False
        while not finished:
            # Before every step, the prefill's too: an overtaken request must not touch the cache of the one that overtook it.
            if request != self._requests or not self._is_open:
                raise RequestError(
                    "Expected one request at a time, found another one started (or the session closed) before this one's end. "
                    "Finish or close a generation first, or open a second session."
                )
            step = next(steps)
            finished = step.finish_reason is not None
            yield step

    def _chunks(self, steps: Iterator[Step], chooser: Chooser, stream: OutputStream) -> Iterator[Chunk]:
        count, prompt_logprobs = 0, None
        for step in steps:
            if count == 0 and chooser.reads_prompt:
                prompt_logprobs = tuple(chooser.prompt_logprobs)
            released = stream.push(step, chooser.logprobs[count : count + len(step.token_ids)])
            count += len(step.token_ids)
            yield Chunk(tokens=released.tokens, step=released.step, prompt_logprobs=prompt_logprobs)
            prompt_logprobs = None
            if released.step.finish_reason is not None:
                return
