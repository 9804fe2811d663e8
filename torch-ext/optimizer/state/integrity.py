"""Knows whether weights and state are of the same step, or whether an interruption parted them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Optional

_AHEAD = "Some parameters and their state may be a step ahead of others"
_LOAD = "load the last checkpoint into the model, and into the optimizer by load_state_dict()"
_LOAD_OR_DISCARD = (
    f"{_LOAD}, or call discard_state() before torch.distributed.checkpoint loads in place"
)


class _Status(enum.Enum):
    """How weights and state are; the value says what mends that."""

    WHOLE = ""  # of the same step
    PARTIAL = f"call accept_partial_step() to go on from there or to save; or {_LOAD_OR_DISCARD}"
    BROKEN = _LOAD_OR_DISCARD  # a load broke off
    VOID = _LOAD  # broken, and all state was set to zeros for a load in place


class Integrity:
    """Whether weights and state of an optimizer belong together; copies start afresh."""

    def __init__(self) -> None:
        self._status = _Status.WHOLE
        self._cause = ""  # why the status is not WHOLE, in words
        self._has_parted = False  # whether a step that broke off has left ranks apart

    def __reduce__(self) -> tuple:
        return Integrity, ()

    @property
    def is_broken(self) -> bool:
        return self._status is not _Status.WHOLE

    @property
    def is_void(self) -> bool:
        return self._status is _Status.VOID

    def check(self, accept_void: bool = False, accept_partial: bool = False) -> None:
        """Raises RuntimeError where weights and state are broken.

        Args:
            accept_void: not where a load in place is to mend that.
            accept_partial: not where only a step broke off.
        """
        accepted = accept_void and self.is_void
        accepted |= accept_partial and self._status is _Status.PARTIAL
        if self.is_broken and not accepted:
            raise RuntimeError(f"An earlier {self._cause}: {self._status.value}")

    def accept(self) -> None:
        """Accepts a step that broke off; `check_together` knows whether it has left ranks apart."""
        self._status = _Status.WHOLE

    def check_together(self) -> None:
        """Raises RuntimeError where an accepted step has left ranks apart."""
        if self._has_parted:
            raise RuntimeError(
                "step() broke off on this rank, which other ranks exchange matrices or share "
                "parameters with, and they can't know how far it came: save state_dict() and start "
                "a fresh launch from it"
            )

    @contextlib.contextmanager
    def changing(
        self,
        what: str,
        has_begun: Callable[[BaseException], bool],
        has_parted: Optional[Callable[[], bool]] = None,
    ) -> Iterator[None]:
        """A context for what changes weights or state; an error in it may leave them broken.

        Args:
            what: what changes them, in words.
            has_begun: whether anything may have been written when an exception was raised.
            has_parted: for a step: whether this rank and others, after an exception, can no longer
                step together.

        Raises:
            RuntimeError: in place of an error that broke the change off after it had begun. Earlier
                errors, KeyboardInterrupt and its like are raised as they are.
        """
        try:
            yield
        except BaseException as error:
            if has_begun(error):
                self._cause = f"{what} was interrupted. {_AHEAD}"
                self._status = _Status.BROKEN
                if has_parted is not None:
                    self._status, self._has_parted = _Status.PARTIAL, has_parted()
                if isinstance(error, Exception):
                    self._cause = f"{what} broke off: {type(error).__name__}: {error}. {_AHEAD}"
                    raise RuntimeError(f"{self._cause}: {self._status.value}") from error
            raise

    def mend(self) -> None:
        """Marks that a load has brought weights and state of one step."""
        self._status, self._has_parted = _Status.WHOLE, False

    def discard(self) -> None:
        if not self.is_broken:
            self._cause = "discard_state() has set all state to zeros"
        self._status = _Status.VOID
