"""Takes the logits of a step: those passed to it, else those set before it, else recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

Logits = Mapping[Any, Any]  # by layer, (heads,) each


class LogitSource:
    """Where the logits of the next step come from. Copies and pickles of an optimizer have none.

    Attributes:
        recorder: records logits in the forward, for steps that get no other logits.
        next_logits: logits for the next step.
    """

    def __init__(self) -> None:
        self.recorder: Any = None
        self.next_logits: Optional[Logits] = None

    def take(self, qk_logits: Optional[Logits]) -> tuple[Optional[Logits], bool]:
        """The logits of a step, and whether they are those of the recorder."""
        next_logits, self.next_logits = self.next_logits, None
        recorded = None if self.recorder is None else self.recorder.take()
        logits = next_logits if qk_logits is None else qk_logits
        return (recorded, True) if logits is None else (logits, False)
