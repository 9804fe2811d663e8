"""What one step carries: windows are announced in the order of their use, then lent one by one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor

from .conveyor import Conveyor
from .device import Device
from .windows import Loan, Share, Window, fill_windows

# Larger copies are no faster, and the first of them is waited for.
MOST_WINDOW_BYTES = 64 << 20

Lent = Sequence[tuple[Share, tuple[Tensor, ...]]]  # shares, each with its tensors on the device


class Carrier:
    """Brings what a step needs of the host's memory to the devices, and back.

    Args:
        devices: to which something is carried.
        slot_bytes: device memory that what is carried takes, on each of them.

    Attributes:
        is_idle: whether there is nothing to carry, for lack of state on the host.
        is_prepared: whether nothing is left to cut and announce.
    """

    def __init__(
        self, devices: Mapping[torch.device, Device], slot_bytes: Mapping[torch.device, int]
    ):
        self._devices = devices
        self._slot_bytes = slot_bytes
        # Some are on their way in, some on their way out, and room is freed by as much at a time.
        self._window_bytes = {
            device: min(nbytes // 8, MOST_WINDOW_BYTES) for device, nbytes in slot_bytes.items()
        }
        self._windows: dict[Hashable, list[Window]] = {}
        self._order: dict[torch.device, list[Window]] = defaultdict(list)
        self._conveyors: dict[torch.device, Conveyor] = {}
        self.is_idle = self.is_prepared = not devices

    def cut(self, key: Hashable, rows: Sequence[Sequence[Loan]], at_once: bool = False) -> None:
        """Prepares windows with all of these rows, if there is anything to lend.

        Args:
            key: by which to ask for them.
            rows: loans, of each row of the windows' user.
            at_once: in one window, whatever their size; on one device.
        """
        if not any(rows):
            return
        limits = dict.fromkeys(self._devices, sys.maxsize) if at_once else self._window_bytes
        self._windows[key] = [
            Window(shares, device, self._devices[device].arena.span)
            for device, shares in fill_windows(rows, limits)
        ]

    def announce(self, key: Hashable, number: Optional[int] = None) -> None:
        """Appends a window to the order of use, or all of a key."""
        windows = self._windows.get(key, ())
        for window in windows if number is None else windows[number : number + 1]:
            self._order[window.device].append(window)

    def window_bytes(self, key: Hashable) -> list[int]:
        """Bytes that each of the windows prepared under a key brings; of what was not, one."""
        windows = self._windows.get(key)
        return [0] if windows is None else [window.nbytes for window in windows]

    def __enter__(self) -> Carrier:
        """Starts to carry what was announced."""
        self.is_prepared = True
        try:
            for device, windows in self._order.items():
                backend = self._devices[device].backend
                self._conveyors[device] = Conveyor(backend, windows, self._slot_bytes[device])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of the devices' memory, also where an error has kept some from being used."""
        for conveyor in self._conveyors.values():
            conveyor.end()
        self._conveyors = {}

    @contextmanager
    def window(self, key: Hashable, number: int) -> Iterator[Optional[Lent]]:
        """Lends what a window has brought, while the context lasts; None where nothing was."""
        windows = self._windows.get(key)
        if windows is None:
            yield None
            return
        window = windows[number]
        conveyor = self._conveyors[window.device]
        yield list(zip(window.shares, conveyor.lend(window)))
        conveyor.give_back()

    def windows(self, key: Hashable) -> Iterator[Optional[Lent]]:
        """Lends all windows of a key, one after the other."""
        for number in range(len(self._windows.get(key, (None,)))):
            with self.window(key, number) as lent:
                yield lent
