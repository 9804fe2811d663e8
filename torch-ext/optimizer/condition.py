"""Whether weights and state belong together, or something that changed them was left half done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Optional

_AHEAD = "Some parameters and their state may be a step ahead of others"
_LOAD = "load the last checkpoint into the model, and into the optimizer by load_state_dict()"
_OR_DISCARD = ", or call discard_state() before torch.distributed.checkpoint loads in place"


class Condition:
    """What an optimizer knows of its weights and state.

    They are whole; or broken, which nothing but loading mends; or void, which is broken too, but
    with zeros for all state, for a checkpoint to be loaded into.
    """

    def __init__(self) -> None:
        self._broken: Optional[str] = None  # by what
        self._is_void = False
        self._is_loading = False
        self._has_begun_loading = False

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    @property
    def is_void(self) -> bool:
        return self._is_void

    def check(self, void_will_do: bool = False) -> None:
        """
        Raises:
            RuntimeError: they are broken.
        """
        if self._broken is not None and not (void_will_do and self._is_void):
            raise RuntimeError(f"An earlier {self._broken}: {self._remedy()}")

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
                self._break_off(what, error)
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A load, which changes nothing before `begin_loading` and is done by `finish_loading`."""
        self._is_loading, self._has_begun_loading = True, False
        try:
            yield
        except BaseException as error:
            if self._has_begun_loading:
                self._break_off("load_state_dict()", error)
            raise
        finally:
            self._is_loading = False

    def begin_loading(self) -> None:
        """To be called within `loading`; elsewhere it does nothing."""
        if self._is_loading:
            self._broken, self._is_void = f"load_state_dict() was interrupted. {_AHEAD}", False
            self._has_begun_loading = True

    def finish_loading(self) -> None:
        self._broken, self._is_void, self._has_begun_loading = None, False, False

    def discard(self) -> None:
        self._broken = self._broken or "discard_state() has set all state to zeros"
        self._is_void = True

    def _break_off(self, what: str, error: BaseException) -> None:
        self._broken = f"{what} was interrupted. {_AHEAD}"
        if isinstance(error, Exception):
            self._broken = f"{what} broke off: {type(error).__name__}: {error}. {_AHEAD}"
            raise RuntimeError(f"{self._broken}: {self._remedy()}") from error

    def _remedy(self) -> str:
        return _LOAD if self._is_void else _LOAD + _OR_DISCARD
