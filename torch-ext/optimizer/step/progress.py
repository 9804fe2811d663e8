"""Tracks how far a step has come on this rank, and so what an error may leave behind."""

from __future__ import annotations

from collections.abc import Callable

from ..distributed.agreement import Agreement


class Progress:
    """How far a step has come.

    Args:
        agreement: knows whether other ranks may step.
        has_replicas: returns True if other ranks hold the same part of some parameter.

    Attributes:
        is_running: True once the step's events have begun; an interrupt may come at any line.
        has_written: True if parameters, gradients, or state may have changed.
        has_exchanged: True once the last updates from other ranks have arrived.
    """

    def __init__(self, agreement: Agreement, has_replicas: Callable[[], bool]):
        self._agreement = agreement
        self._has_replicas = has_replicas
        self.is_running = self.has_written = self.has_exchanged = False

    def may_have_written(self, error: BaseException) -> bool:
        """True if, after an error, some parameters or other ranks may be a step ahead."""
        is_interrupt = self.is_running and not isinstance(error, Exception)
        return is_interrupt or self.has_written or self._agreement.others_may_step

    def may_have_parted(self) -> bool:
        """True if ranks can't continue: others may be ahead, or replicas may differ."""
        is_alone = self.has_exchanged and not self._has_replicas()
        return self._agreement.others_may_step and not is_alone
