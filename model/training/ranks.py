"""Several processes that train one model, as torchrun starts them. Alone, all of this does nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from model.errors import RunFailed, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

SILENCE = timedelta(minutes=10)  # of one process, after which the others give up on a gradient
SECONDS_TO_SAVE = 30
WAIT = timedelta(days=7)  # for one that prepares data, or saves
# else torchrun lends all attempts one store, where a restarted process finds the addresses of the attempt before
FRESH_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

T = TypeVar("T")


class Ranks:
    """This process is `rank` of `world`, and `local` on its machine; rank 0 leads: it writes and speaks.

    torch is loaded only where there are several.
    """

    def __init__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        self.rank, self.world, self.local = (
            int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0), strict=True)
        )
        self.leads = self.rank == 0
        self._control: Any = None

    def check_divides(self, batch_size: int, micro_batch_size: int | None) -> None:
        """Raises UserError unless each rank gets as many rows, in micro-batches of one size."""
        micro = micro_batch_size or 1
        if self.world > 1 and (
            batch_size % self.world or batch_size // self.world % min(micro, batch_size // self.world)
        ):
            step = self.world * micro
            near = sorted({max(batch_size // step, 1) * step, -(-batch_size // step) * step})
            raise UserError(
                f"train.batch_size={batch_size} cannot be shared by {self.world} processes"
                + (f" in micro-batches of {micro}" if micro_batch_size else "")
                + f"; give train.batch_size={' or '.join(map(str, near))}"
            )

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Within, the processes can talk to each other. Raises RunFailed when they do not find each other."""
        if self.world == 1:
            yield
            return
        import torch
        import torch.distributed as dist

        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(self.local % torch.cuda.device_count())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=SILENCE
            )
            self._control = dist.new_group(backend="gloo", timeout=WAIT)
        except (RuntimeError, ValueError) as error:
            again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not os.environ.get(
                FRESH_STORE
            )
            advice = f"; restarts need {FRESH_STORE}=1 in front of torchrun" if again else ""
            raise RunFailed(f"{self.world} processes could not join ({_first_line(error)}){advice}") from None
        threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, RunFailed) and re.search(
                "gloo|nccl|connection", str(error), re.IGNORECASE
            ):
                raise RunFailed(f"lost another process of this training ({_first_line(error)})") from None
            raise  # after any error there is no farewell: the others may be waiting for something else
        dist.destroy_process_group()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What stands within is done by all or by none: an error of one is raised by all, and said once.

        Nothing within may wait for another process.
        """
        error: UserError | RunFailed | None = None
        try:
            yield
        except (UserError, RunFailed) as own:
            error = own
        except OSError as own:
            error = RunFailed(str(own))
        if self.world == 1:
            if error is not None:
                raise error
            return
        found = self.gather(None if error is None else (isinstance(error, UserError), str(error)))
        for rank, failure in enumerate(found):
            if failure is not None:
                kind = UserError if failure[0] else RunFailed
                shared = kind(failure[1] if failure == found[0] else f"[rank {rank}] {failure[1]}")
                shared.said = not self.leads
                raise shared

    def lead(self, task: Callable[[], T]) -> T:
        """What `task` returns to rank 0, which alone runs it, to all. An error of it is raised by all."""
        result: list[Any] = [None]
        with self.together():
            if self.leads:
                result = [task()]
        if self.world > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(result, src=0, group=self._control)
        return result[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._control)
        return found

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over the ranks; NaN where one of them is."""
        if self.world == 1:
            return list(values)
        import torch
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self._control)
        return (sums / self.world).tolist()

    def device(self, device: torch.device) -> torch.device:
        """That of this rank: of several GPUs its own."""
        import torch

        several = self.world > 1 and device.type == "cuda" and device.index is None
        return torch.device("cuda", torch.cuda.current_device()) if several else device

    def parallel(self, model: nn.Module) -> nn.Module:
        """`model` with the weights of rank 0, whose backward passes leave the mean gradient of all ranks."""
        if self.world == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        device = next(model.parameters()).device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _end_with(parent: int) -> None:
    """End this process when torchrun's agent has, which can be killed without a word to those that it started."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)  # a last chance to save
    time.sleep(SECONDS_TO_SAVE)
    os._exit(1)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]
