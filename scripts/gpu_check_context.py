"""What a stage of `scripts/gpu_check` is given: device, sizes, a deadline, a timer, and where its figures go."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
# Many times the L2 of any GPU there is; and at an H200's 4.8 TB/s 0.4 ms long, so that the host has put all kernels of a form (some 30 us
# a launch from Python) on the stream before the first of them may start.
FLUSH_BYTES = 2**31


class NotHereError(Exception):
    """What a stage needs is not on this machine; no fault of what it checks."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of a check; the names are those of `domino_deploy.config`.

    odd_vocab_sizes: for the kernels' numbers: no multiple of a tile, less than one, a single token.
    target, drafter: fields of config.json that differ from the public pair's.
    context: tokens before a speculative step.
    widths: verified rows.
    copy_bytes: of the buffer that bandwidth is measured with.
    """

    name: str
    vocab_size: int
    rank: int
    hidden_size: int
    gru_hidden_dim: int
    proposals: int
    batches: tuple[int, ...]
    odd_vocab_sizes: tuple[int, ...]
    top_k: int
    target: Mapping[str, Any]
    drafter: Mapping[str, Any]
    context: int
    widths: tuple[int, ...]
    cycles: int
    copy_bytes: int


# Qwen3-4B with its public drafter: 16 proposals (shift_label), the first of them not corrected.
QWEN3_4B = Sizes(
    name="qwen3-4b",
    vocab_size=151936,
    rank=256,
    hidden_size=2560,
    gru_hidden_dim=1024,
    proposals=16,
    batches=(1, 8, 32),
    odd_vocab_sizes=(151_935, 1000, 1),
    top_k=64,
    target={},
    drafter={},
    context=1024,
    widths=(1, 2, 4, 8, 16, 17),
    cycles=48,
    copy_bytes=2**31,
)
# Everything there is, where Triton interprets: two tiles of the vocabulary, one block of everything else.
TINY = Sizes(
    name="tiny",
    vocab_size=130,
    rank=4,
    hidden_size=32,
    gru_hidden_dim=4,
    proposals=2,
    batches=(1, 2),
    odd_vocab_sizes=(127, 1),
    top_k=3,
    target={
        "vocab_size": 130,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 127,
        "eos_token_id": 128,
    },
    drafter={
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 2,
        "mask_token_id": 129,
        "emb_dim": 4,
        "gru_hidden_dim": 4,
    },
    context=12,
    widths=(1, 3),
    cycles=4,
    copy_bytes=2**20,
)


def sizes_named(name: str) -> Sizes:
    return {sizes.name: sizes for sizes in (QWEN3_4B, TINY)}[name]


class Deadline:
    """When a stage should end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = clock() + seconds, clock

    @property
    def left(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - self._clock()


@dataclass(frozen=True, kw_only=True)
class Time:
    """Of `runs` runs: the median, and the tenths at both ends; microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int


class Timer(Protocol):
    """Two exist: events of the GPU, and the clock of the CPU; tests bring a third."""

    def times(self, actions: Mapping[str, Callable[[], object]]) -> dict[str, Time]:
        """Runs the actions in turn, round after round, so that a drift of the machine touches all of them alike."""
        ...


@dataclass(frozen=True, kw_only=True)
class EventTimer:
    """Events of the GPU around every run, the L2 cache emptied before it.

    Args:
        deadline: no round is begun behind it, or when `seconds` of measuring are over.
        rounds: most runs of an action.
        seconds: most seconds of one call.
    """

    deadline: Deadline
    rounds: int = 100
    seconds: float = 6.0

    def times(self, actions: Mapping[str, Callable[[], object]]) -> dict[str, Time]:
        import torch

        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        found: dict[str, list[float]] = {name: [] for name in actions}
        last = min(self.seconds, max(self.deadline.left, 0.0))
        begun = time.monotonic()
        for round_number in range(-3, self.rounds):  # the first three warm up
            for name, action in actions.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in ("start", "end"))
                flush.zero_()
                start.record()
                action()
                end.record()
                end.synchronize()
                if round_number >= 0:
                    found[name].append(start.elapsed_time(end) * 1e3)
            if round_number >= 0 and time.monotonic() - begun > last:
                break
        return {name: summary(values) for name, values in found.items()}


class WallTimer:
    """The CPU's clock, one run each: for trying the stages out."""

    def times(self, actions: Mapping[str, Callable[[], object]]) -> dict[str, Time]:
        found = {}
        for name, action in actions.items():
            begun = time.perf_counter()
            action()
            found[name] = summary([(time.perf_counter() - begun) * 1e6])
        return found


def summary(values: list[float]) -> Time:
    """Microseconds of the runs as a `Time`."""
    tenths = quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return Time(median_us=round(median(values), 2), p10_us=round(tenths[0], 2), p90_us=round(tenths[-1], 2), runs=len(values))


def timer_of(device: str, deadline: Deadline) -> Timer:
    return EventTimer(deadline=deadline) if device == "cuda" else WallTimer()


@dataclass(frozen=True, kw_only=True)
class Context:
    """One stage's.

    device: "cuda" or "cpu".
    carried: folder that what was packed lies under.
    note: puts values into the stage's result, which is kept whatever happens behind it.
    """

    device: str
    sizes: Sizes
    carried: Path
    deadline: Deadline
    timer: Timer
    note: Callable[..., None]

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def generator(self, seed: int = 0) -> torch.Generator:
        import torch

        return torch.Generator(self.device).manual_seed(seed)

    def times(self, actions: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """The timer's figures as they stand in the report."""
        return {name: dataclasses.asdict(found) for name, found in self.timer.times(actions).items()}


def make_importable() -> None:
    """Let `import domino_deploy` find this checkout, three of whose folders stand beside the package's own, installed or not."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    package = importlib.import_module("domino_deploy")
    if str(ROOT) not in package.__path__:
        package.__path__.append(str(ROOT))
