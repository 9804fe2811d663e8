"""Records the largest attention logit of each query head, with hooks on a model in training."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...distributed.dtensors import is_dtensor, raw_local
from ...parameters.names import matches, normalize_name
from ...qk_clip.config import QUERIES, SIDES
from ...qk_clip.layers import quote
from .attention_calls import Call, read, read_scores, report_calls

if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard

# Usual names of fused projections.
FUSED = ("wqkv", "Wqkv", "qkv", "qkv_proj", "to_qkv", "c_attn", "query_key_value")

# Names of projections in attention modules; in nn.MultiheadAttention they are parameters.
PROJECTIONS = frozenset({*SIDES, *FUSED, "in_proj_weight", "q_proj_weight"})

OBSERVE = "call the recorder's observe or observe_scores in its forward"


class QKLogitRecorder:
    """Records the largest attention logit of each query head in forward passes, for QK-Clip.

    Assign it to an optimizer, ``optim.qk_recorder = QKLogitRecorder(model)``. Each step then takes
    what was recorded.

    If a hooked module, or a module below it, calls ``F.scaled_dot_product_attention`` or
    ``torch.nn.attention.flex_attention.flex_attention``, the recorder computes maxima from the
    call's queries, keys, scale, and mask. It sees only calls through torch's modules, not through
    names imported from them, and no compiled ``flex_attention``. If ``flex_attention`` is called
    with ``AuxRequest(max_scores=True)``, the recorder uses its maxima, which cost nothing and
    include any ``score_mod``. Otherwise it ignores a ``score_mod``.

    Other attention, and all attention in compiled modules, must call `observe` or `observe_scores`.
    With context parallelism, a call has only some of the keys, so the recorder sees only these.

    A forward pass counts if gradients are enabled and it completes. If the forward pass of the
    model or of a hooked module raises, what it recorded is dropped; if a compiled model raises,
    call `discard`, because Python hooks don't notice. With activation checkpointing it counts once:
    the first run, or the second if the first has no gradients (``use_reentrant=True``). Meta and
    fake tensors, and torch.jit traces, aren't recorded. Outputs and gradients of the model stay
    bit-identical, no activation is kept, and the host doesn't wait. Hooks of copied or unpickled
    models do nothing.

    The hooks don't keep the recorder alive, and are removed with it. A new recorder replaces an
    earlier one that has hooked one of the same modules.

    Args:
        model: the model, before or after it is wrapped or sharded (FSDP2, DDP, tensor parallelism),
            and before its first compiled forward pass: Dynamo ignores later hooks.
        modules: patterns for module names: shell-style for whole names, or whole components of
            names. Of nested matches, a pattern means the outermost module. None hooks all modules
            that own a projection with a usual name (such as wq, q_proj, or c_attn), as a module or
            a parameter, and ``nn.MultiheadAttention``, which needs ``need_weights=False``.

    Raises:
        ValueError: ``model`` isn't a module, no module has such a projection, or a pattern matches
            no module.
    """

    def __init__(self, model: nn.Module, modules: Optional[Sequence[str]] = None):
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be an nn.Module, found a {type(model).__name__}")
        patterns = [modules] if isinstance(modules, str) else modules
        records = [_Record(*chosen) for chosen in _attention_modules(model, patterns).items()]
        for record in records:
            _remove_recorders(record.module)
            record.within = [r for r in records if r is record or _is_within(r.name, record.name)]
        self._records = {record.name: record for record in records}
        self._of_module = {record.module: record for record in records}
        self._threads = threading.local()
        self._hooks = contextlib.ExitStack()
        self._unhook = weakref.finalize(self, self._hooks.close)
        self._is_on = True
        torch.compiler.assume_constant_result(_note_compiled)
        torch.compiler.assume_constant_result(_note_observed)
        if model not in self._of_module:
            self._hook(_Record("", model, within=records, attends=False))
        for record in records:
            self._hook(record)

    def __reduce__(self) -> tuple:
        # Models may contain the recorder. Its copies and pickles record nothing and do without this
        # package, which may be missing or have another name in another build.
        inert = "".format  # accepts any arguments
        methods = dict.fromkeys(("discard", "observe", "observe_scores", "remove"), inert)
        return SimpleNamespace, (), {"names": [], "forwards": {}, "take": dict, **methods}

    @property
    def names(self) -> list[str]:
        """The names of the hooked modules, without components that wrappers add."""
        return list(self._records)

    @property
    def forwards(self) -> dict[str, int]:
        """Forward passes recorded since the last `take`, by module, without compiled ones."""
        return {name: record.forwards for name, record in self._records.items()}

    def observe(
        self,
        module: Union[nn.Module, str],
        q: Tensor,
        k: Tensor,
        scale: Optional[float] = None,
        causal: bool = True,
        **masks: Any,
    ) -> None:
        """Records the logits of queries and keys. Call it in the module's forward pass.

        It does nothing if the forward pass doesn't count, or if the recorder has been removed.

        Args:
            module: a hooked module, or its name.
            q, k: (B, Hq, Tq, D) and (B, Hk, Tk, D), local, or DTensors sharded by head or batch.
            scale, causal, masks: as in `max_qk_logits`.

        Raises:
            ValueError: the module isn't hooked, or shapes or placements don't fit.
        """
        self._observe(module, lambda: read(q, k, scale, causal, masks))

    def observe_scores(self, module: Union[nn.Module, str], max_scores: Tensor) -> None:
        """Like `observe`, for attention that returns the maxima of its logits.

        Args:
            module: a hooked module, or its name.
            max_scores: (B, Hq, Tq), in any floating dtype, −inf for queries without keys; may be a
                DTensor sharded by head or batch.
        """
        self._observe(module, lambda: read_scores(max_scores))

    def take(self) -> dict[str, Optional[Tensor]]:
        """Returns what was recorded since the last call, and starts over.

        Returns:
            By name of each hooked module, the largest logit of each of its query heads on this
            rank: (heads,), in fp32, −inf for heads that saw no pair; with tensor parallelism over
            heads, a DTensor with Shard(0). None for a module that was never recorded, and for all
            modules after the call that follows `remove`.

        Raises:
            ValueError: attention of a module was missed or not understood, or raised while
                recording. Everything recorded is dropped.
        """
        self._leave_all()
        problems: list[str] = []
        taken: dict[str, Optional[Tensor]] = {}
        for name, record in self._records.items():
            try:
                taken[name] = record.take()
            except ValueError as error:
                problems.append(str(error))
            if not self._is_on:
                record.maxima = None
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError("; ".join(problems[:3]) + more)
        return taken

    def discard(self) -> None:
        """Drops what was recorded since the last `take`, for a batch that no step uses."""
        self._leave_all()
        for record in self._records.values():
            record.clear()

    def remove(self) -> None:
        """Removes all hooks."""
        self._unhook()
        self._leave_all()
        report_calls(self, -sys.maxsize)
        self._is_on = False

    def __enter__(self) -> QKLogitRecorder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    def _hook(self, record: _Record) -> None:
        module, hook = record.module, self._hooks.enter_context
        before, after = _ForwardHook(self._before, record), _ForwardHook(self._after, record)
        hook(module.register_forward_pre_hook(before))
        # Before other hooks: attention in them isn't the module's.
        hook(module.register_forward_hook(after, prepend=True, always_call=True))
        if record.attends and isinstance(record.query, nn.Module):
            before_query = _ForwardHook(self._before_query, record, is_of_query=True)
            hook(record.query.register_forward_pre_hook(before_query))

    @property
    def _running(self) -> list[_RunningForward]:
        """Forward passes running in this thread; autograd's threads recompute others."""
        return vars(self._threads).setdefault("running", [])

    def _running_forward(self, record: _Record) -> Optional[_RunningForward]:
        """The innermost forward pass of the record's module."""
        return next((f for f in reversed(self._running) if f.record is record), None)

    def _before(self, record: _Record, *_: Any) -> None:
        forward, earlier = _RunningForward(record, _counts()), self._running_forward(record)
        if earlier is not None:
            within = sum(other.record is record for other in self._running)
            if _calls_of(record.module) <= within:  # not nested: it was interrupted
                self._leave(earlier, ended=False)
        self._running.append(forward)
        if forward.is_recorded:
            if torch._C._functorch.peek_interpreter_stack() is None:  # else nothing is recorded
                with _disable_current_modes():  # for selective checkpointing, see add_eagerly
                    forward.snapshots = [(r, r.snapshot()) for r in record.within]
            if record.attends:
                if isinstance(record.query, Tensor):
                    record.note_rows(record.query)
                report_calls(self, 1)

    def _before_query(self, record: _Record, projection: nn.Module, *_: Any) -> None:
        # The projection's weight is whole only in its own forward pass (except in tensor
        # parallelism).
        record.note_rows(getattr(projection, "weight", None))

    def _after(self, record: _Record, module: nn.Module, args: Any, output: Any) -> None:
        forward = self._running_forward(record)
        if forward is None:  # another hook raised before ours was called
            return
        ended = output is not None or sys.exc_info()[0] is None
        self._leave(forward, ended)
        if forward.is_recorded and ended:
            record.forwards += 1
            record.is_blind |= not forward.saw_attention

    def _leave(self, last: _RunningForward, ended: bool) -> None:
        """Forgets this thread's innermost forward passes, up to ``last``, and what they recorded,
        because they didn't complete. Keeps what ``last`` recorded if it has ``ended``."""
        forward = None
        while forward is not last:
            forward = self._running.pop()
            if forward.is_recorded and forward.record.attends:
                report_calls(self, -1)
            if forward is not last or not ended:
                with _disable_current_modes():
                    for record, snapshot in forward.snapshots:
                        record.restore(snapshot)

    def _leave_all(self) -> None:
        """Forgets this thread's interrupted forward passes, and what they recorded."""
        if self._running:
            self._leave(self._running[0], ended=False)

    def record_call(self, call: Callable[[], Call]) -> None:
        """Records an attention call of this thread's innermost forward pass, if any."""
        forward = self._running[-1] if self._running else None
        if forward is not None and forward.is_recorded and forward.record.attends:
            forward.saw_attention = True
            # An error is raised later, in take(), where ranks fail together.
            forward.record.add_eagerly(call, raises=False)

    def _observe(self, module: Union[nn.Module, str], call: Callable[[], Call]) -> None:
        if not self._is_on:
            return
        record = self._find(module)
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                record.add_compiled(call())
            return
        forward = self._running_forward(record)
        if forward is not None:
            forward.saw_attention = True
        if _counts() if forward is None else forward.is_recorded:
            record.add_eagerly(call, raises=True)

    def _find(self, module: Union[nn.Module, str]) -> _Record:
        if isinstance(module, str):
            record = self._records.get(normalize_name(module))
        else:
            record = self._of_module.get(module)
        if record is None:
            name = repr(module) if isinstance(module, str) else f"a {type(module).__name__}"
            raise ValueError(f"{name} is not hooked; hooked modules: {quote(self.names)}")
        return record


@dataclass(eq=False)
class _Record:
    """The record of a hooked module.

    Args:
        within: the records of this module and of modules below it.
        attends: True if its attention calls are recorded; False for a model that is hooked only to
            notice whether its forward pass completes.
        maxima: (heads,), fp32; always the same tensor: compiled graphs guard on it.
        heads: for DTensor queries, the mesh, its dimension that shards heads, and the number of
            heads.
        rows: for a DTensor query projection, the mesh, its dimension that shards rows, the number
            of rows, and the number of rows on this rank.
        head_dim: width of a query head; 0 if unknown.
        is_blind: True if a recorded forward pass saw no attention.
        is_compiled: True if Dynamo has traced a forward pass that counts.
        is_observed: True if Dynamo has traced a call of observe in it.
        key: its key in `_RECORDS`.
    """

    name: str
    module: nn.Module
    within: list[_Record] = field(default_factory=list)
    attends: bool = True
    maxima: Optional[Tensor] = None
    heads: Optional[tuple[Any, int, int]] = None
    rows: Optional[tuple[Any, int, int, int]] = None
    head_dim: int = 0
    forwards: int = 0
    is_blind: bool = False
    problem: Optional[str] = None
    is_compiled: bool = False
    is_observed: bool = False
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        _RECORDS[self.key] = self

    @property
    def query(self) -> Union[nn.Module, Tensor, None]:
        """The query projection, a module or a parameter."""
        children: dict[str, Any] = {**self.module._parameters, **self.module._modules}
        return next((children[name] for name in QUERIES if children.get(name) is not None), None)

    def note_rows(self, weight: Any) -> None:
        """Notes how rows of the query projection are sharded."""
        if is_dtensor(weight):
            sharded = [i for i, p in enumerate(weight.placements) if p.is_shard(0)]
            if len(sharded) == 1:
                local = raw_local(weight).shape[0]
                self.rows = (weight.device_mesh, sharded[0], weight.shape[0], local)

    def add_eagerly(self, read_call: Callable[[], Call], raises: bool) -> None:
        """Raises the maxima to a call's logits; an error becomes a `problem`, or is raised."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.problem = "runs within a transform of torch.func, where nothing can be recorded"
            return
        try:
            call = read_call()
            if not call.has_numbers:  # only shapes are traced
                return
            # Otherwise selective checkpointing counts our operations among those it repeats.
            with _disable_current_modes():
                self.prepare(call.queries.shape[1], call.queries.device)
                assert self.maxima is not None
                call.raise_maxima(self.maxima)
                self.heads, self.head_dim = call.heads, call.head_dim
        except ValueError as error:
            if raises:
                raise
            self.problem = str(error)
        except Exception as error:
            kind = type(error).__name__
            self.problem = f"was not recorded, because its attention calls raise {kind}: {error}"

    def add_compiled(self, call: Call) -> None:
        # This assigns nothing: a graph under activation checkpointing must not, and a graph that
        # makes the maxima would be compiled again once they exist.
        device, heads = call.queries.device, call.queries.shape[1]
        _note_observed(self.key, heads, call.head_dim, device.type, device.index)
        assert self.maxima is not None
        call.raise_maxima(self.maxima)

    def prepare(self, count: int, device: torch.device) -> None:
        """Makes the maxima of ``count`` heads, unless they exist."""
        maxima = self.maxima
        if maxima is not None and maxima.device == device and len(maxima) != count:
            self.problem = f"attends with {count} heads, and before with {len(maxima)}"
        if maxima is None or maxima.device != device or len(maxima) != count:
            self.maxima = torch.full((count,), -math.inf, dtype=torch.float32, device=device)

    def take(self) -> Optional[Tensor]:
        """Returns the maxima, if any, and starts over.

        Raises:
            ValueError: something wasn't recorded as it should be. Starts over, too.
        """
        maxima = None if self.maxima is None else self.maxima.clone()
        problem = self.problem
        if self.is_blind and isinstance(self.module, nn.MultiheadAttention):
            problem = "ran, but called no attention function: call it with need_weights=False"
        elif self.is_blind:
            problem = (
                "ran, but no attention call was seen: in transformers, use "
                f'attn_implementation="sdpa"; in other models, {OBSERVE}, or pass the names of the '
                "modules that attend as modules="
            )
        elif self.is_compiled and not self.is_observed and not self.forwards:
            problem = f"is compiled, so no attention call can be seen: {OBSERVE}"
        self.clear()
        if problem is not None:
            raise ValueError(f"{self.name} {problem}")
        return maxima if maxima is None else self._as_sharded(maxima)

    def clear(self) -> None:
        self.restore((self.maxima, None, 0, False, None))

    def snapshot(self) -> tuple:
        """What was recorded so far, for `restore`."""
        values = None if self.maxima is None else self.maxima.clone()
        return self.maxima, values, self.forwards, self.is_blind, self.problem

    def restore(self, snapshot: tuple) -> None:
        maxima, values, self.forwards, self.is_blind, self.problem = snapshot
        if maxima is not None:
            self.maxima = maxima
        if self.maxima is not None:  # in place: compiled graphs may guard on it
            self.maxima.copy_(values) if values is not None else self.maxima.fill_(-math.inf)

    def _as_sharded(self, maxima: Tensor) -> Tensor:
        """The maxima as a DTensor, if ranks have different heads."""
        sharding = self.heads
        if sharding is None and self.rows is not None:
            mesh, dim, rows, local = self.rows
            heads = len(maxima) * rows // local if local else rows // self.head_dim
            if rows == local or rows != len(maxima) * self.head_dim:  # otherwise gathered before
                sharding = mesh, dim, heads
        if sharding is None:
            return maxima
        mesh, dim, count = sharding
        if mesh.ndim > 1 and mesh.mesh_dim_names:
            mesh, dim = mesh[mesh.mesh_dim_names[dim]], 0
        placements: list[Any] = [Replicate()] * mesh.ndim
        placements[dim] = Shard(0)
        return DTensor.from_local(
            maxima, mesh, placements, run_check=False, shape=torch.Size((count,)), stride=(1,)
        )


# Records by key. Keys are constants, so Dynamo can call the two functions below with them. It does
# so only while it traces, not when the traced code runs.
_RECORDS: weakref.WeakValueDictionary[str, _Record] = weakref.WeakValueDictionary()


def _note_compiled(key: str, calls_query: bool) -> int:
    record = _RECORDS.get(key)
    if record is not None:
        record.is_compiled = True
        if calls_query or isinstance(record.query, Tensor):
            record.note_rows(getattr(record.query, "weight", record.query))
    return 0


def _note_observed(key: str, count: int, head_dim: int, device: str, index: Optional[int]) -> int:
    record = _RECORDS.get(key)
    if record is not None:
        record.prepare(
            count, torch.device(device) if index is None else torch.device(device, index)
        )
        record.is_observed, record.head_dim = True, head_dim
    return 0


@dataclass(eq=False)
class _RunningForward:
    """A running forward pass; ``is_recorded`` is False if it doesn't count."""

    record: _Record
    is_recorded: bool
    saw_attention: bool = False
    snapshots: list[tuple[_Record, tuple]] = field(default_factory=list)


def _calls_of(module: nn.Module) -> int:
    """Number of nested calls of the module in this thread."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        calls += is_call and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls


class _ForwardHook:
    """Calls a recorder's method with a record while the recorder exists; copies do nothing."""

    def __init__(self, method: Any, record: _Record, is_of_query: bool = False):
        self.method = weakref.WeakMethod(method)
        self.record = record
        self.is_of_query = is_of_query

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                _note_compiled(self.record.key, self.is_of_query)
            return
        method = self.method()
        if method is not None:
            method(self.record, module, *arguments)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple:
        # Accepts any arguments, returns None, and needs no package (see the recorder's).
        return getattr, (contextlib.nullcontext(), "__exit__")


def _remove_recorders(module: nn.Module) -> None:
    """Removes the recorder of a module, if any."""
    for hook in list(module._forward_hooks.values()):
        method = hook.method() if isinstance(hook, _ForwardHook) and hook.record.attends else None
        if method is not None:
            method.__self__.remove()


def _counts() -> bool:
    """True if a forward pass that starts now is recorded."""
    return torch.is_grad_enabled() and not (torch.jit.is_tracing() or _is_computed_again())


def _is_computed_again() -> bool:
    """True if checkpointing repeats a forward pass that has run with gradients before.

    Unknown cases return False: recording twice only costs time.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward pass is running
        return False
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            if frame.f_code.co_name == "recompute_fn":
                return True
            if frame.f_code.co_name == "backward":  # of reentrant checkpointing
                return False
        frame = frame.f_back
    return False


def _attention_modules(model: nn.Module, patterns: Optional[Sequence[str]]) -> dict[str, nn.Module]:
    """The modules to hook, by name."""
    named = {
        name: module
        for name, module in model.named_modules()
        if type(module).forward is not nn.Module.forward
    }
    # If a normalized name repeats, the later module is the wrapped one.
    full_names = {normalize_name(name): name for name in named}
    modules = {name: named[full_name] for name, full_name in full_names.items()}
    if patterns is None:
        chosen = {
            name: module
            for name, module in modules.items()
            if not PROJECTIONS.isdisjoint({*module._modules, *module._parameters})
        }
        if not chosen:
            raise ValueError(
                f"no module has any of {sorted(PROJECTIONS)}: pass names of attention modules as "
                f"modules=; the model has {quote(list(modules))}"
            )
        return chosen
    if not patterns:
        raise ValueError("modules must be None or a list of patterns, found an empty list")
    chosen = {}
    for pattern in patterns:
        fitting = [name for name in modules if matches(full_names[name], pattern)]
        if not fitting:
            raise ValueError(f"no module matches {pattern!r}; the model has {quote(list(modules))}")
        for name in fitting:
            if not any(name != other and _is_within(name, other) for other in fitting):
                chosen[name] = modules[name]
    return chosen


def _is_within(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")
