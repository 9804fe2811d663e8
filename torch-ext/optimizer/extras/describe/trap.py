"""What a description warns of or notes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trap:
    """Something that goes wrong, or only is good to know.

    Args:
        kind: one word for programs.
        what: was found.
        parameters: names of those it is about.
        why: it matters.
        write: the code that mends it; empty where nothing is to be done.
    """

    kind: str
    what: str
    parameters: tuple[str, ...]
    why: str
    write: str = ""
