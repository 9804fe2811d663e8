"""A fake device that knows what orders its streams and collectives: missing waits are found.

Operations are done at once, so results are those of a step that waits enough. A `DeviceRecorder`
keeps a clock for the host and for each stream, and one for the collectives of each process group,
as NCCL has streams of its own for them: a collective is behind what the current stream was given
before, and the current stream is behind a collective only after ``wait()``. Each access of an
operation, copy or collective is told to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import fake_device
import race_detector
from race_detector import HOST, Recorder

race_detector.INSIDE |= {__file__, fake_device.__file__}

# Collectives of single tensors, by all names that releases of torch have for them. The output, then
# the input; one tensor is both.
COLLECTIVES = ("all_to_all_single", "all_reduce")
COLLECTIVES += ("all_gather_into_tensor", "all_gather_single")
COLLECTIVES += ("reduce_scatter_tensor", "reduce_scatter_single")


class DeviceRecorder(Recorder):
    """Takes operations on the device for the current stream's, all others for the host's.

    Memory that was seen stays alive, so that no address is used twice.

    Attributes:
        collectives: how many were launched.
    """

    device: fake_device.Device  # set by `ordered_device`; a backend's is a torch.device

    def __init__(self, dropped: Callable[[int, str], bool] | Sequence[int] = ()):
        super().__init__(dropped)
        self.collectives = 0
        self._kept: dict[int, torch.UntypedStorage] = {}

    def queue_of(self, tensors: Sequence[Tensor]) -> str:
        is_here = any(self.device.memory.has(t.untyped_storage()) for t in tensors)
        return self.device.streams[-1].name if is_here else HOST

    def met(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage
        return True

    def collective(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """A collective that tells of its accesses, and whose work of being waited for."""

        def told(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            queue = f"collectives of {dist.get_process_group_ranks(group or dist.group.WORLD)}"
            self.collectives += 1
            # The backend does this itself, so it is none of the waits that may be dropped.
            race_detector._join(self._clock(queue), self.record(self._current()).clock)
            for tensor, write in ((tensors[-1], False), (tensors[0], True)):
                self.met(tensor)
                self.touched(tensor, write, queue, name)
            mark = self.record(queue)
            with self._quietly():
                work = launch(*args, group=group, async_op=True, **kwargs)
            told_work = _Work(self, work, mark)
            return told_work if async_op else told_work.wait()

        return told

    def _current(self) -> str:
        return self.device.streams[-1].name


class _Work:
    """What a collective returns: waiting for it makes the current stream wait."""

    def __init__(self, recorder: DeviceRecorder, work: Any, mark: Any):
        self._recorder = recorder
        self._work = work
        self._mark = mark

    def wait(self, *_: Any) -> None:
        with self._recorder._quietly():  # backends may copy what has come only now
            self._work.wait()
        self._recorder.wait(self._recorder._current(), self._mark)


@contextmanager
def ordered_device(dropped: Any = ()) -> Iterator[DeviceRecorder]:
    """Puts the device there, and a recorder that watches it.

    Args:
        dropped: waits to ignore; see `Recorder`.
    """
    recorder = DeviceRecorder(dropped)
    with fake_device.fake_device(recorder=recorder) as recorder.device, ExitStack() as stack:
        for name in COLLECTIVES:
            launch = getattr(dist, name, None)
            if launch is not None:
                stack.enter_context(patch.object(dist, name, recorder.collective(name, launch)))
        stack.enter_context(recorder.watching())
        yield recorder
