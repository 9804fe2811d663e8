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
_ACCEPT_OR_LOAD = (
    f"call accept_partial_step() to go on from there or to save; or {_LOAD_OR_DISCARD}"
)


class _Status(enum.Enum):
    WHOLE = enum.auto()  # weights and state are of the same step
    LOADING = enum.auto()  # a load has begun to write
    PARTIAL = enum.auto()  # a step broke off, which can be accepted
    BROKEN = enum.auto()  # a load broke off; only a load mends that
    VOID = enum.auto()  # broken, and all state was set to zeros for a load in place


class Integrity:
    """Whether weights and state of an optimizer belong together; copies start afresh."""

    def __init__(self) -> None:
        self._status = _Status.WHOLE
        self._cause = ""  # why the status is not WHOLE, in words
        self._may_load = False  # whether `loading` is active
        self._has_parted = False  # whether a step that broke off has left ranks apart

    def __reduce__(self) -> tuple:
        return Integrity, ()

    @property
    def is_broken(self) -> bool:
        return self._status is not _Status.WHOLE

    @property
    def is_void(self) -> bool:
        return self._status is _Status.VOID

    def check(self, accept_void: bool = False) -> None:
        """Raises RuntimeError where weights and state are broken."""
        if self.is_broken and not (accept_void and self.is_void):
            raise RuntimeError(f"An earlier {self._cause}: {self._remedy}")

    @property
    def _remedy(self) -> str:
        remedies = {_Status.PARTIAL: _ACCEPT_OR_LOAD, _Status.VOID: _LOAD}
        return remedies.get(self._status, _LOAD_OR_DISCARD)

    def check_acceptable(self) -> None:
        """Raises RuntimeError where more is wrong than that a step broke off."""
        if self._status is not _Status.PARTIAL:
            self.check()

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
                    raise RuntimeError(f"{self._cause}: {self._remedy}") from error
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context for a load, which writes from `begin_loading` to `finish_loading`."""
        self._may_load = True
        try:
            with self.changing("load_state_dict()", lambda _: self._status is _Status.LOADING):
                yield
        finally:
            self._may_load = False

    def begin_loading(self) -> None:
        """Marks that a load begins to write; outside of `loading` it does nothing."""
        if self._may_load:
            self._cause = f"load_state_dict() was interrupted. {_AHEAD}"
            self._status = _Status.LOADING

    def finish_loading(self) -> None:
        self._status, self._has_parted = _Status.WHOLE, False

    def discard(self) -> None:
        if not self.is_broken:
            self._cause = "discard_state() has set all state to zeros"
        self._status = _Status.VOID
