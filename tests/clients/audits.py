"""Audits all optimizers that tests with clients make: none is to have a finding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from kernel import optimizer

STEPS = 8  # the last ones of each training
# What an audit finds rightly in small models, fresh, with two or three examples in each batch.
KNOWN = {
    "unused": "had no gradient",
    "zeros": "had gradients of zeros",  # what chooses among one key or one class has no gradient
    "large": "updates over 20 times the median",  # of matrices that are almost zero at first
    "no Muon": "no matrix was orthogonalized",  # vectors and prompts only
    # Which matrices have such updates depends on the machine: bf16 arithmetic adds noise of full
    # rank to them, and fp32 arithmetic, with which they were found, hardly any.
    "low rank": "updates with a rank under 0.1",
}


@contextlib.contextmanager
def healthy(known: Sequence[str] = (), keep: int = STEPS) -> Iterator[None]:
    """Raises at the end where an audit of the last steps of an optimizer made meanwhile has a
    finding that is none of the ``known`` ones; on ranks, to be left by all of them."""
    audits: list[Any] = []
    make = optimizer.Muon.__init__

    @functools.wraps(make)
    def make_audited(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        audits.append(self.audit(keep))

    with patch.object(optimizer.Muon, "__init__", make_audited):
        yield
    for audit in audits:
        if audit.steps:
            findings = audit.report().findings
            new = [found for found in findings if not any(KNOWN[kind] in found for kind in known)]
            assert not new, new
