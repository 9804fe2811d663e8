"""What a description warns of or notes."""

from __future__ import annotations

from dataclasses import dataclass, field

from .code import beside
from .remedy import Remedy


@dataclass(frozen=True)
class Trap:
    """Something that goes wrong, or only is good to know.

    Args:
        kind: one word for programs.
        what: what there is.
        parameters: names of those it is about.
        why: why that matters.
        remedy: what mends it, as data; empty where nothing is to be done.
    """

    kind: str
    what: str
    parameters: tuple[str, ...]
    why: str
    remedy: Remedy = field(default=Remedy(), repr=False, hash=False)

    @property
    def write(self) -> str:
        """The code that mends it; empty where nothing is to be done."""
        return beside(self.remedy)
