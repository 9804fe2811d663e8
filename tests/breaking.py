"""What breaks a step off at a chosen operation or line, and what a refused step has to leave."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from comparisons import assert_equal
from kernel import optimizer
from layouts import local, params_of

PACKAGE = str(Path(optimizer.__file__).parent)


def fail() -> None:
    raise torch.OutOfMemoryError("no memory left")


class Fault(TorchDispatchMode):
    """Strikes ahead of the n-th event whose name has the given text in it.

    Regions of torch.profiler.record_function are seen as "begin Muon.weights" and "end
    Muon.weights". In between, operations of torch are seen as "in Muon.weights: aten.mul_.Tensor",
    and from there to the next begin or end as "behind Muon.weights: …"; views are not.
    """

    def __init__(self, point: str, number: int, strike: Callable[[], None] = fail):
        super().__init__()
        self.point, self.left, self.strike = point, number, strike
        self.place, self.regions = "ahead", list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # seen again as operations on the tensors within
        event = f"{self.place}: {func}"
        if func._opname == "_record_function_enter_new":
            self.regions.append(args[0])
            event, self.place = f"begin {args[0]}", f"in {args[0]}"
        elif func._opname == "_record_function_exit":
            region = self.regions.pop()
            event, self.place = f"end {region}", f"behind {region}"
        if self.point in event and not func.is_view:
            self.left -= 1
            if self.left == 0:
                self.strike()
        return func(*args, **(kwargs or {}))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the package that runs."""

    def __init__(self, number: int):
        self.left = number

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self.left -= event == "line"
        if self.left == 0 and event == "line":
            self.left = -1
            raise KeyboardInterrupt
        return self._trace


def contents(optim: Any, params: Sequence[torch.Tensor] | None = None) -> tuple[Any, ...]:
    """Copies of what an optimizer holds on this rank, to compare; creates no state.

    Weights; state; gradients, and which tensors these are; the options of groups.
    """
    params = params_of(optim) if params is None else params
    state = [{key: copied(v) for key, v in optim.state.get(p, {}).items()} for p in params]
    grads = [(id(p.grad), copied(p.grad)) if p.is_leaf else None for p in params]
    groups = [
        # Names that are set on a group go to `optim.names`.
        (list(map(id, g["params"])), fingerprint({**g, "params": None, "names": None}))
        for g in optim.param_groups
    ]
    return list(map(copied, params)), (len(optim.state), state), grads, groups


def copied(value: Any) -> Any:
    """Clones this rank's part of a tensor; returns anything else as it is."""
    return local(value).clone() if isinstance(value, torch.Tensor) else value


def fingerprint(value: Any) -> str:
    """All of a nested value, to compare whatever it is; NaN is itself."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.layout} {numbers_of(value)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {fingerprint(own)}' for key, own in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(fingerprint, value))})"
    return repr(value)


def numbers_of(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return []
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return tensor.float().tolist() if tensor.element_size() == 1 else tensor.tolist()


def refused(
    optim: Any, words: str = "", params: Sequence[torch.Tensor] | None = None, **arguments: Any
) -> str:
    """The ValueError of a step, which comes in seconds and has changed nothing.

    Args:
        words: a pattern that it matches.
        params: what is looked at, by default all in the groups.
        arguments: of the step.
    """
    params = params or params_of(optim)
    before, start = contents(optim, params), time.monotonic()
    with pytest.raises(ValueError, match=words) as raised:
        optim.step(**arguments)
    assert time.monotonic() - start < 10
    assert_equal(contents(optim, params), before)
    assert not optim.is_broken
    return str(raised.value)
