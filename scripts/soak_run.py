"""The soak itself: clients for some minutes, then a calm end in which every figure can be exact."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
from serving_process import ServerProcess
from soak_balance import counters
from soak_cases import BadRequest, Case
from soak_clients import Ledger, Soak, ask, run_client

SAMPLE_SECONDS = 2.0
MOST_ROUNDS = 50
IDLE_SECONDS = 60.0  # for requests whose clients left at the very end


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Requests running and waiting once the clients had stopped, and how long it took until then."""

    running: int
    waiting: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FullBatch:
    """As many requests at once as there are slots, in one or more rounds: how many were served, and how many ran at the same time."""

    slots: int
    rounds: int
    served: int
    most_running_at_once: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of it.

    memory: (seconds since the start, bytes of the server's own, mapped files left out); rough, calm: books of the two parts, with what
    the server's counters grew by in each.
    """

    seconds: float
    memory: Sequence[tuple[float, int]]
    idle: Idle
    full_batch: FullBatch
    rough_growth: dict[str, float]
    calm_growth: dict[str, float]
    rough: Ledger = field(default_factory=Ledger)
    calm: Ledger = field(default_factory=Ledger)


async def soak(
    server: ServerProcess, cases: Sequence[Case], bad: Sequence[BadRequest], *, seconds: float, clients: int, slots: int, seed: int
) -> Run:
    """Let the clients loose on the server, then serve a full batch and every case once more."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as client:
        rough = Soak(client=client, cases=cases, bad=bad, ledger=Ledger())
        calm = Soak(client=client, cases=cases, bad=bad, ledger=Ledger(id_prefix="calm-"))
        before = await _counters(client)
        memory = await _rough_part(rough, server, seconds, [seed * 1000 + number for number in range(clients)])
        idle = await _until_idle(client)
        between = await _counters(client)
        full_batch = await _full_batch(calm, slots)
        await asyncio.gather(*(_every(calm, cases[number::slots]) for number in range(slots)))
        await _until_idle(client)
        after = await _counters(client)
    return Run(
        seconds=round(memory[-1][0], 1),
        memory=memory,
        idle=idle,
        full_batch=full_batch,
        rough_growth={name: value - before.get(name, 0) for name, value in between.items()},
        calm_growth={name: value - between.get(name, 0) for name, value in after.items()},
        rough=rough.ledger,
        calm=calm.ledger,
    )


async def _rough_part(rough: Soak, server: ServerProcess, seconds: float, seeds: Sequence[int]) -> list[tuple[float, int]]:
    """All clients for so long; the server's memory meanwhile."""
    ends = asyncio.Event()
    running = [asyncio.create_task(run_client(rough, seed, ends)) for seed in seeds]
    started = time.monotonic()
    samples = [(0.0, server.own_bytes())]
    while (passed := samples[-1][0]) < seconds:
        failed, _ = await asyncio.wait(running, timeout=min(SAMPLE_SECONDS, seconds - passed), return_when=asyncio.FIRST_EXCEPTION)
        if failed:  # nobody stops by itself
            break
        samples.append((time.monotonic() - started, server.own_bytes()))
    ends.set()
    await asyncio.gather(*running)
    return samples


async def _every(calm: Soak, cases: Sequence[Case]) -> None:
    for number, case in enumerate(cases):
        await ask(calm, case, "finish", random.Random(number))


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    return counters((await client.get("/metrics")).text)


async def _gauges(client: httpx.AsyncClient) -> tuple[int, int]:
    """Requests running and waiting."""
    found = await _counters(client)
    return int(found["vllm:num_requests_running"]), int(found["vllm:num_requests_waiting"])


async def _until_idle(client: httpx.AsyncClient) -> Idle:
    """Wait until nothing runs and nothing waits."""
    started = time.monotonic()
    while (gauges := await _gauges(client)) != (0, 0) and time.monotonic() - started < IDLE_SECONDS:
        await asyncio.sleep(0.1)
    return Idle(running=gauges[0], waiting=gauges[1], seconds=round(time.monotonic() - started, 2))


async def _full_batch(calm: Soak, slots: int) -> FullBatch:
    """A round may be over before it was looked at, if the answers are short and the model is tiny: then there is another one."""
    longest = sorted(calm.cases, key=lambda case: -case.completion_tokens)
    before = len(calm.ledger.finished)
    most = rounds = 0
    while most < slots and rounds < MOST_ROUNDS:
        rounds += 1
        chosen = [longest[number % len(longest)] for number in range(slots)]
        asked = [asyncio.create_task(ask(calm, case, "finish", random.Random(number))) for number, case in enumerate(chosen)]
        while not all(task.done() for task in asked):
            most = max(most, (await _gauges(calm.client))[0])
            await asyncio.sleep(0.01)
        await asyncio.gather(*asked)
    return FullBatch(slots=slots, rounds=rounds, served=len(calm.ledger.finished) - before, most_running_at_once=most)
