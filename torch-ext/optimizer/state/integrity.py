"""Whether weights and state belong together, or something that changed them was left half done."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

_AHEAD = "Some parameters and their state may be a step ahead of others"
_LOAD = "load the last checkpoint into the model, and into the optimizer by load_state_dict()"
_LOAD_OR_DISCARD = (
    f"{_LOAD}, or call discard_state() before torch.distributed.checkpoint loads in place"
)


class _Status(enum.Enum):
    WHOLE = enum.auto()
    LOADING = enum.auto()  # half loaded, which is broken, but for the load that goes on
    BROKEN = enum.auto()  # nothing but loading mends that
    VOID = enum.auto()  # broken, with zeros for all state, for a checkpoint to be loaded into


class Integrity:
    """What an optimizer knows of its weights and state."""

    def __init__(self) -> None:
        self._status = _Status.WHOLE
        self._cause = ""  # of another status
        self._may_load = False  # within `loading`

    @property
    def is_broken(self) -> bool:
        return self._status is not _Status.WHOLE

    @property
    def is_void(self) -> bool:
        return self._status is _Status.VOID

    def check(self, void_will_do: bool = False) -> None:
        """
        Raises:
            RuntimeError: they are broken.
        """
        if self.is_broken and not (void_will_do and self.is_void):
            remedy = _LOAD if self.is_void else _LOAD_OR_DISCARD
            raise RuntimeError(f"An earlier {self._cause}: {remedy}")

    @contextlib.contextmanager
    def changing(self, what: str, has_begun: Callable[[BaseException], bool]) -> Iterator[None]:
        """Something that changes weights or state, which must not be seen half done.

        Args:
            what: in words.
            has_begun: whether the exception that it is given breaks anything.

        Raises:
            RuntimeError: it broke off, instead of what broke it off. KeyboardInterrupt and its like
                stay what they are.
        """
        try:
            yield
        except BaseException as error:
            if has_begun(error):
                self._cause = f"{what} was interrupted. {_AHEAD}"
                self._status = _Status.BROKEN
                if isinstance(error, Exception):
                    self._cause = f"{what} broke off: {type(error).__name__}: {error}. {_AHEAD}"
                    raise RuntimeError(f"{self._cause}: {_LOAD_OR_DISCARD}") from error
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A load, which changes nothing before `begin_loading` and is done by `finish_loading`."""
        self._may_load = True
        try:
            with self.changing("load_state_dict()", lambda _: self._status is _Status.LOADING):
                yield
        finally:
            self._may_load = False

    def begin_loading(self) -> None:
        """To be called within `loading`; elsewhere it does nothing."""
        if self._may_load:
            self._cause = f"load_state_dict() was interrupted. {_AHEAD}"
            self._status = _Status.LOADING

    def finish_loading(self) -> None:
        self._status = _Status.WHOLE

    def discard(self) -> None:
        if not self.is_broken:
            self._cause = "discard_state() has set all state to zeros"
        self._status = _Status.VOID
