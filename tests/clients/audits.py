"""Audits all optimizers that tests with clients make: none is to have a finding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from kernel import optimizer

STEPS = 8  # the last ones of each training


@contextlib.contextmanager
def healthy(known: Sequence[str] = (), keep: int = STEPS) -> Iterator[None]:
    """Raises at the end where an audit of the last steps of an optimizer made meanwhile has a
    finding that none of the ``known`` words is in; on ranks, to be left by all of them."""
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
            new = [found for found in findings if not any(words in found for words in known)]
            assert not new, new
