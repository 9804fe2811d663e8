"""Knows whether weights and state are of the same step, or whether an interruption parted them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Optional

# How weights and state are, by what mends that.
WHOLE = ""  # of the same step
VOID = "load the last checkpoint into the model, and into the optimizer by load_state_dict()"
_BROKEN = f"{VOID}, or call discard_state() before torch.distributed.checkpoint loads in place"
PARTIAL = f"call accept_partial_step() to go on from there or to save; or {_BROKEN}"


class Integrity:
    """Whether weights and state of an optimizer belong together; copies start afresh."""

    def __init__(self) -> None:
        # VOID after `discard`, PARTIAL after a step that broke off, _BROKEN after such a load.
        self._status = WHOLE
        self._cause = ""  # why the status is not WHOLE, in words
        self._has_parted = False  # whether a step that broke off has left ranks apart

    def __reduce__(self) -> tuple:
        return Integrity, ()

    def is_broken(self, accept: str = WHOLE) -> bool:
        """Whether weights and state do not belong together, nor are as ``accept`` says."""
        return self._status not in (WHOLE, accept)

    def check(self, accept: str = WHOLE) -> None:
        """Raises RuntimeError where weights and state are broken, and not as ``accept`` says."""
        if self.is_broken(accept):
            raise RuntimeError(f"An earlier {self._cause}: {self._status}")

    def accept(self) -> None:
        """Accepts a step that broke off; `check_together` knows whether it has left ranks apart."""
        self._status = WHOLE

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

    def mend(self) -> None:
        """Marks that a load has brought weights and state of one step."""
        self._status, self._has_parted = WHOLE, False

    def discard(self) -> None:
        """Marks that all state was set to zeros, for a load in place."""
        if not self.is_broken():
            self._cause = "discard_state() has set all state to zeros"
        self._status = VOID
