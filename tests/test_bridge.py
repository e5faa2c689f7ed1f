"""Generations by themselves, without HTTP: who may begin, when one has ended, and that none leaves a request behind in the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from domino_deploy.errors import DrainingError, VerificationError
from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.runtime.requests import GenerationParams, Output
from domino_deploy.server.bridge import Generation, Generations
from tests.support.fake_engine import ScriptedEngine

PROMPT, DAMAGED = [5, 6, 7], [6, 6, 6]
WATCHDOG_SECONDS = 60.0


class DamagedEngine(ScriptedEngine):
    """Has no numbers for one of the prompts."""

    def _logits(self, prefix: tuple[int, ...], vocab_size: int) -> FloatArray:
        logits = super()._logits(prefix, vocab_size)
        return np.full_like(logits, np.nan) if list(prefix[:3]) == DAMAGED and self.prompts else logits


class Going:
    """A server's generations, of which it notes the ends."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.under_way = engine, Generations()
        self.ends: list[str | None] = []

    def generation(self, *prompts: list[int], max_new_tokens: int = 2000) -> Generation:
        return Generation(
            self.engine,
            prompts,
            GenerationParams(max_new_tokens=max_new_tokens),
            under_way=self.under_way,
            name="test",
            arrived=0.0,
            time_limit=None,
            note_end=self._note_end,
        )

    def _note_end(self, output: Output) -> None:
        self.ends.append(output.finish_reason)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), WATCHDOG_SECONDS))


async def read(generation: Generation) -> list[Output]:
    return [found[1] async for found in generation.outputs(WATCHDOG_SECONDS) if found is not None]


def test_none_begins_while_the_server_drains(tiny_bundle: Path) -> None:
    async def work() -> None:
        going = Going(engine)
        before = going.generation(PROMPT)
        await before.start()
        assert not going.under_way.is_draining
        assert going.under_way.drain() == (before,)
        assert going.under_way.is_draining
        with pytest.raises(DrainingError, match="shutting down"):
            going.under_way.begin(before)
        late = going.generation(PROMPT)
        with pytest.raises(DrainingError, match="shutting down"):
            await late.start()
        assert late.has_ended
        assert going.under_way.drain() == (before,)
        await before.close()

    with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine:
        run(work)
        assert len(engine.requests) == 1


def test_a_prompt_that_failed_does_not_end_the_others_of_its_generation(tiny_bundle: Path) -> None:
    async def work() -> None:
        going = Going(engine)
        generation = going.generation(DAMAGED, PROMPT)
        await generation.start()
        with pytest.raises(VerificationError):
            await read(generation)
        assert not generation.has_ended
        assert going.under_way.drain() == (generation,)
        await generation.close()
        assert generation.has_ended
        assert going.under_way.drain() == ()
        assert going.ends == ["error", "abort"]

    with DamagedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, max_sequences=2, seconds_per_row=0.002) as engine:
        run(work)


def test_a_generation_whose_last_prompt_failed_has_ended(tiny_bundle: Path) -> None:
    async def work() -> None:
        going = Going(engine)
        generation = going.generation(PROMPT, DAMAGED)
        await generation.start()
        with pytest.raises(VerificationError):
            await read(generation)
        assert generation.has_ended
        assert going.under_way.drain() == ()
        await generation.close()
        assert going.ends == ["stop", "error"]

    with DamagedEngine(tiny_bundle, "Hi", max_sequences=1) as engine:
        run(work)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_client_that_leaves_between_submission_and_its_answer_leaves_no_request_behind(tiny_bundle: Path, is_first: bool) -> None:
    """The thread that submitted has found the generation open, and its task does not get to know that it did."""

    async def work() -> None:
        going = Going(engine)
        generation, loop = going.generation(*[[5, 6, 8]] * (not is_first), PROMPT), asyncio.get_running_loop()
        submit = generation._submit

        def submit_and_leave(index: int) -> None:
            submit(index)
            if engine.prompts[-1] == tuple(PROMPT):
                loop.call_soon_threadsafe(task.cancel)

        async def whole() -> None:
            try:
                await generation.start()
                await read(generation)
            finally:
                await generation.close()

        generation._submit = submit_and_leave  # type: ignore[method-assign]
        task = asyncio.create_task(whole())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert going.ends == ["abort"] if is_first else ["stop", "abort"]
        assert engine.snapshot().running == engine.snapshot().waiting == 0
        after = going.generation([5, 5], max_new_tokens=3)
        await after.start()
        assert len([token for output in await read(after) for token in output.tokens]) == 3
        await after.close()

    def answer(prompt: object) -> list[int]:
        return [50] * 2000 if tuple(prompt) != (5, 6, 8) else [50]  # type: ignore[arg-type]

    with ScriptedEngine(tiny_bundle, answer, max_model_len=4096, max_sequences=1, seconds_per_row=0.002) as engine:
        run(work)
        assert [reason for _, reason, _ in engine.witness.ends] == ["stop"] * (not is_first) + ["abort", "length"]


def test_nor_does_one_that_leaves_before_its_request_is_submitted(tiny_bundle: Path) -> None:
    """The thread goes on when its task is cancelled, and submits behind the close."""

    async def work() -> None:
        going = Going(engine)
        generation, loop = going.generation(PROMPT), asyncio.get_running_loop()
        submit = generation._submit

        def leave_and_submit(index: int) -> None:
            loop.call_soon_threadsafe(task.cancel)
            while not generation.has_ended:
                time.sleep(0.001)
            submit(index)

        generation._submit = leave_and_submit  # type: ignore[method-assign]
        task = asyncio.create_task(generation.start())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(engine.witness.ended.wait, WATCHDOG_SECONDS)
        async with asyncio.timeout(WATCHDOG_SECONDS):
            while engine.snapshot().running + engine.snapshot().waiting:  # told a moment after the end
                await asyncio.sleep(0.01)

    with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, max_sequences=1, seconds_per_row=0.002) as engine:
        run(work)
        assert [reason for _, reason, _ in engine.witness.ends] == ["abort"]
