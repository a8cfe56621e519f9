"""Several processes that train one model: started by torchrun, each on its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interp.tasks.task import Batch


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, and its device."""

    rank: int
    world: int
    device: torch.device

    @staticmethod
    def current(device: torch.device | str) -> Ranks:
        """From what torchrun sets; joins the group (nccl on GPUs, gloo on CPUs) the first time. One process without it."""
        device = torch.device(device)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Ranks(0, 1, device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Ranks(dist.get_rank(), dist.get_world_size(), device)

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def share(self, batch: Batch) -> Batch:
        """This process's examples of a batch that every process has drawn whole."""
        return batch if self.world == 1 else batch.select(slice(self.rank, None, self.world))

    def total(self, value: Tensor) -> Tensor:
        """The sum of every process's number, each being its share."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def agreed(self, decide: Callable[[], Any]) -> Any:
        """What the first process decides, told to all; an exception there is raised everywhere."""
        if self.world == 1:
            return decide()
        said: list[Any] = [None, None]
        if self.first:
            try:
                said[0] = decide()
            except Exception as error:  # every process stops with it, none waits for ever
                said[1] = error
        dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def wrap(self, loss: torch.nn.Module) -> torch.nn.Module:
        """The loss whose gradients are averaged over the processes."""
        return loss if self.world == 1 else torch.nn.parallel.DistributedDataParallel(loss)
