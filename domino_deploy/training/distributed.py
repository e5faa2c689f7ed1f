"""One process or many: who a process is, and the few things that processes do together.

Many processes are started by `torchrun`, one per GPU; each holds the frozen target whole and a shard of the drafter's
gradients, masters and optimiser state (FSDP2).  On a CPU they talk through gloo, on GPUs through NCCL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from domino_deploy.errors import TrainingError

if TYPE_CHECKING:
    from domino_deploy.training.objective import DraftLoss

_CPU = torch.device("cpu")
_COUNT = re.compile(r"\d{1,6}", re.ASCII)
# Other processes may wait long for the first one, which makes the features, or for the one whose share of the prompts takes longest;
# PyTorch's own 10 or 30 minutes would end such a run.
_PATIENCE = timedelta(days=30)
_MEETING = timedelta(minutes=10)  # until all processes have found each other


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among `size`; `device` is its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()


def process_of_torchrun() -> tuple[int, int]:
    """Rank and number of processes as torchrun states them; (0, 1) without it.

    Raises:
        TrainingError: values that torchrun does not give.
    """
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (_COUNT.fullmatch(rank) and _COUNT.fullmatch(size) and int(rank) < int(size)):
        raise TrainingError(
            f"Expected RANK and WORLD_SIZE as torchrun sets them, found {rank!r} and {size!r}. Unset them, or use torchrun."
        )
    return int(rank), int(size)


def device_of(name: str) -> torch.device:
    """`auto` is the process's own GPU if there is one.

    Raises:
        TrainingError: a GPU is asked for and none is there.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise TrainingError("Expected a CUDA device, found none. Install a CUDA build of PyTorch, or use --device cpu.")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(device_name: str) -> Iterator[World]:
    """This process's place in the world, for as long as the block lasts.

    Raises:
        TrainingError: no such device, or an environment that torchrun does not make.
    """
    rank, size = process_of_torchrun()
    device = device_of(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    try:
        store, rank, size = next(rendezvous("env://", timeout=_MEETING))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    except (ValueError, RuntimeError) as error:  # variables that are missing or wrong; nobody there
        raise TrainingError(
            f"Expected {size} processes that find each other as torchrun lets them (MASTER_ADDR, MASTER_PORT), found: {error}. Start them "
            "with torchrun, or unset RANK and WORLD_SIZE."
        ) from error
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        dist.destroy_process_group()


def shard(loss: DraftLoss, world: World) -> None:
    """Shard gradients, masters and optimiser state of the drafter over all processes (FSDP2, parameters whole during a step)."""
    if world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    # One group: backbone and loss use the parameters of layers and head directly, not through the modules' own calls, and they stay
    # whole during a step anyway.
    fully_shard(loss, mesh=mesh, reshard_after_forward=False)


def whole(tensor: Tensor) -> Tensor:
    """A parameter, or a moment of one, unsharded and detached; every process must ask for it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(destination: Tensor, values: Tensor) -> None:
    """Write whole `values` into a parameter or moment, which may be sharded."""
    values = values.to(device=destination.device, dtype=destination.dtype)
    if isinstance(destination, DTensor):
        values = distribute_tensor(values, destination.device_mesh, destination.placements)
    destination.copy_(values)


def set_gradient_exchange(loss: nn.Module, world: World, *, is_on: bool) -> None:
    """Whether the next backward pass exchanges gradients: only the last of a step has to."""
    if world.size > 1:
        loss.set_requires_gradient_sync(is_on)  # type: ignore[operator]  # a method of FSDP2's modules
