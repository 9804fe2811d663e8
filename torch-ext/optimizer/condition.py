"""Whether weights and state belong together, or something that changed them was left half done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Optional

_AHEAD = "Some parameters and their state may be a step ahead of others"
_REMEDY = (
    "load the last checkpoint into the model, and into the optimizer by load_state_dict(), or call "
    "discard_state() before torch.distributed.checkpoint loads in place"
)


class Condition:
    """What an optimizer knows of its weights and state.

    They are whole; or broken, which nothing but loading mends; or void, which is broken too, but
    with zeros for all state, for a checkpoint to be loaded into.
    """

    def __init__(self) -> None:
        self._broken: Optional[str] = None  # by what
        self._is_loading = False
        self._is_void = False

    def check(self, void_will_do: bool = False) -> None:
        """
        Raises:
            RuntimeError: they are broken.
        """
        if self._broken is not None and not (void_will_do and self._is_void):
            raise RuntimeError(f"An earlier {self._broken}: {_REMEDY}")

    @contextlib.contextmanager
    def changing(self, what: str, has_begun: Callable[[], bool]) -> Iterator[None]:
        """Something that changes weights or state, which must not be seen half done.

        Args:
            what: in words.
            has_begun: whether an error breaks anything. KeyboardInterrupt and its like, which come
                anywhere, always do.

        Raises:
            RuntimeError: it broke off, instead of what broke it off.
        """
        self._broken = f"{what} was interrupted. {_AHEAD}"
        try:
            yield
        except Exception as error:
            if not has_begun():
                self._broken = None
                raise
            raise self._broken_off(what, error) from error
        self._broken = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A load, which changes nothing before `begin_loading` and is done by `finish_loading`."""
        try:
            yield
        except Exception as error:
            if not self._is_loading:
                raise
            raise self._broken_off("load_state_dict()", error) from error

    def begin_loading(self) -> None:
        self._broken = f"load_state_dict() was interrupted. {_AHEAD}"
        self._is_loading, self._is_void = True, False

    def finish_loading(self) -> None:
        self._broken, self._is_loading, self._is_void = None, False, False

    def discard(self) -> None:
        self._broken = self._broken or f"discard_state() has set all state to zeros. {_AHEAD}"
        self._is_void = True

    def _broken_off(self, what: str, error: Exception) -> RuntimeError:
        self._broken = f"{what} broke off: {type(error).__name__}: {error}. {_AHEAD}"
        return RuntimeError(f"{self._broken}: {_REMEDY}")
