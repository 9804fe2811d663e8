"""Makes a test of what each of several ranks does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ranks import run_ranks


def on_ranks(ranks: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of a test, whose body so many gloo ranks run, all with the test's arguments.

    Args:
        ranks: how many.
        options: ``timeout`` and ``pg_timeout``, see `run_ranks`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():  # on a rank, which was sent the test by its name
                body(*args, **kwargs)
            else:
                run_ranks(test, ranks, *args, **options, **kwargs)

        return test

    return decorate
