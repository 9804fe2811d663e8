"""What mends a trap, as data: the code beside the trap and the script are both made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Remedy:
    """Changes of what the caller wrote, for one trap, or for several in order: the advice.

    Args:
        options: arguments of ``Muon`` and ``expert_keys``, in place of the caller's; None takes
            the default.
        leave: names of parameters that are AdamW's after all.
        take: names of convolutions that are Muon's.
        only_matrices: leaves vectors to AdamW, which ``is_muon_func`` takes.
        split: row counts by name, beside the ``split`` of the options.
        matrices: names of all that is Muon's, which patterns of ``split`` have to tell apart.
        header: comments above the script.
        comments: comments above the optimizer.
        wording: the text beside the trap, where it is more than the options: ``{}`` stands for
            these.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    leave: tuple[str, ...] = ()
    take: tuple[str, ...] = ()
    only_matrices: bool = False
    split: Mapping[str, Any] = field(default_factory=dict)
    matrices: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    wording: str = ""

    def then(self, other: Remedy) -> Remedy:
        """Both: of an option that both set the other's value counts."""
        return Remedy(
            options={**self.options, **other.options},
            leave=self.leave + other.leave,
            take=self.take + other.take,
            only_matrices=self.only_matrices or other.only_matrices,
            split={**self.split, **other.split},
            matrices=other.matrices or self.matrices,
            header=self.header + other.header,
            comments=self.comments + other.comments,
        )
