"""Tracks whether weights and state belong to the same step; failed steps and loads break this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Optional

# Each status is the advice in error messages; none if weights and state belong to the same step.
WHOLE = ""
VOID = "load the last checkpoint into the model, and into the optimizer by load_state_dict()"
_BROKEN = f"{VOID}, or call discard_state() before torch.distributed.checkpoint loads in place"
PARTIAL = f"call accept_partial_step() to continue from there or to save; or {_BROKEN}"


class Integrity:
    """Whether an optimizer's weights and state belong to the same step; copies start as whole."""

    def __init__(self) -> None:
        # VOID after `discard`, PARTIAL after a failed step, _BROKEN after a failed load.
        self._status = WHOLE
        self._cause = ""  # for messages: why the status isn't WHOLE
        self._has_parted = False  # True if a failed step may have left ranks in different states

    def __reduce__(self) -> tuple:
        return Integrity, ()

    def is_broken(self, accept: str = WHOLE) -> bool:
        """True if the status is neither WHOLE nor ``accept``."""
        return self._status not in (WHOLE, accept)

    def check(self, accept: str = WHOLE) -> None:
        """Raises RuntimeError if the status is neither WHOLE nor ``accept``."""
        if self.is_broken(accept):
            raise RuntimeError(f"An earlier {self._cause}: {self._status}")

    def accept(self) -> None:
        """Accepts a failed step; `check_together` still raises if ranks may differ."""
        self._status = WHOLE

    def check_together(self) -> None:
        """Raises RuntimeError if an accepted step may have left ranks in different states."""
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
        """A context for changes of weights or state, which an error may leave broken.

        Args:
            what: name of the change, for messages.
            has_begun: given an exception, returns True if anything may have been written.
            has_parted: for a step, returns True if the ranks can no longer step together.

        Raises:
            RuntimeError: if an error occurs after the change has begun. Errors before that, and
                interrupts at any time, propagate unchanged.
        """
        try:
            yield
        except BaseException as error:
            if not has_begun(error):
                raise
            self._status = _BROKEN
            if has_parted is not None:
                self._status, self._has_parted = PARTIAL, has_parted()
            is_error = isinstance(error, Exception)
            how = f"broke off: {type(error).__name__}: {error}" if is_error else "was interrupted"
            self._cause = (
                f"{what} {how}. Some parameters and their state may be a step ahead of others"
            )
            if not is_error:
                raise
            raise RuntimeError(f"{self._cause}: {self._status}") from error

    def restore(self) -> None:
        """Records that a load has restored weights and state of the same step."""
        self._status, self._has_parted = WHOLE, False

    def discard(self) -> None:
        """Records that all state was set to zeros, for a load in place."""
        if not self.is_broken():
            self._cause = "discard_state() has set all state to zeros"
        self._status = VOID
