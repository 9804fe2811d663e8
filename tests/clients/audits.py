"""Audits all optimizers that tests with clients make: none is to have a finding."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kernel import optimizer

STEPS = 8  # the last ones of each training


@contextlib.contextmanager
def healthy() -> Iterator[None]:
    """Raises at the end where an audit of an optimizer made meanwhile has a finding; on ranks, to
    be left by all of them."""
    audits: list[Any] = []
    make = optimizer.Muon.__init__

    @functools.wraps(make)
    def make_audited(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        audits.append(self.audit(keep=STEPS))

    with patch.object(optimizer.Muon, "__init__", make_audited):
        yield
    for audit in audits:
        if audit.steps:
            findings = audit.report().findings
            assert not findings, findings
