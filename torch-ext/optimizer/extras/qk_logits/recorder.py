"""Records the largest attention logit of each query head by hooks on a model in training."""

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

# Names of projections in attention modules; nn.MultiheadAttention has parameters for them.
PROJECTIONS = frozenset({*SIDES, *FUSED, "in_proj_weight", "q_proj_weight"})

OBSERVE = "call the recorder's observe or observe_scores in its forward"


class QKLogitRecorder:
    """Largest attention logit of each query head, from a model's forwards, for QK-Clip.

    To be attached to an optimizer, ``optim.qk_recorder = QKLogitRecorder(model)``, which takes
    what was recorded at each step.

    Where a hooked module, or one below it, calls ``F.scaled_dot_product_attention`` or
    ``torch.nn.attention.flex_attention.flex_attention``, maxima are computed from the call's
    queries, keys, scale and mask. Calls are seen by these names in torch's modules, but not by a
    name that was imported from there, nor where ``flex_attention`` is compiled. Where
    ``flex_attention`` is asked for ``AuxRequest(max_scores=True)``, its maxima are taken: they come
    for free, and include what a ``score_mod`` does to a score. Otherwise a ``score_mod`` is not
    looked at.

    Other attention has to call `observe` or `observe_scores`, and so has all attention in compiled
    modules. Under context parallelism a call sees some of the keys only, and so does the
    recorder.

    What counts is a forward with gradients enabled that ends: where the model's forward raises, or
    that of a hooked module, all that it recorded is dropped. Python does not see a compiled model's
    forward raise: call `discard` there. Under activation checkpointing a forward counts once: as it
    first runs or, where that is without gradients (``use_reentrant=True``), as it runs again. Meta
    and fake tensors are not recorded, nor is what torch.jit traces. The model's outputs and
    gradients stay the same to the bit, no activation is kept, and the host waits for nothing. Hooks
    of a copied or unpickled model do nothing.

    The hooks do not keep the recorder alive, and go when it goes. A later recorder that hooks one
    of its modules replaces it.

    Args:
        model: before or after it is wrapped or sharded (FSDP2, DDP, tensor parallelism), and before
            its first compiled forward: Dynamo does not see hooks that come later.
        modules: patterns for names of modules, shell-style for the whole name, or whole components
            of it; of modules within each other, a pattern means the outermost. None for all that
            own a projection by its usual name (`config.SIDES`, `FUSED`), as a module or a
            parameter, and ``nn.MultiheadAttention`` (to be called with ``need_weights=False``).

    Raises:
        ValueError: no such module; a pattern that fits none.
    """

    def __init__(self, model: nn.Module, modules: Optional[Sequence[str]] = None):
        if not isinstance(model, nn.Module):
            raise ValueError(f"QKLogitRecorder takes an nn.Module, found a {type(model).__name__}")
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
        # Copies and pickles, which a model may hold, record nothing, and do without this package:
        # its name differs from build to build, and it may not be there.
        inert = "".format  # takes anything
        methods = dict.fromkeys(("discard", "observe", "observe_scores", "remove"), inert)
        return SimpleNamespace, (), {"names": [], "forwards": {}, "take": dict, **methods}

    @property
    def names(self) -> list[str]:
        """The names of the hooked modules, without what wrappers add."""
        return list(self._records)

    @property
    def forwards(self) -> dict[str, int]:
        """How many forwards of each module were recorded since the last `take`; none compiled."""
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
        """Records the logits of queries and keys, called in the module's own forward.

        Does nothing where that does not count, and once the recorder is removed.

        Args:
            module: a hooked module, or its name.
            q, k: (B, Hq, Tq, D) and (B, Hk, Tk, D), this rank's, or DTensors sharded by heads or
                batch.
            scale, causal, masks: as `max_qk_logits` takes them.

        Raises:
            ValueError: not a hooked module; shapes that do not fit; DTensors of other placements.
        """
        self._observe(module, lambda: read(q, k, scale, causal, masks))

    def observe_scores(self, module: Union[nn.Module, str], max_scores: Tensor) -> None:
        """Records logits whose maxima the attention itself has taken, as `observe` does.

        Args:
            max_scores: (B, Hq, Tq), any floating dtype, −inf where a query sees nothing; as q it
                may be a DTensor.
        """
        self._observe(module, lambda: read_scores(max_scores))

    def take(self) -> dict[str, Optional[Tensor]]:
        """What was recorded since the last call; starts afresh.

        Returns:
            For each hooked module by name the largest logit of each of its query heads on this
            rank, fp32, (heads,), −inf for heads that saw nothing; a DTensor, Shard(0), where tensor
            parallelism shards heads. None of a module that has never been recorded, and of all
            modules once the recorder is removed and what it had was taken.

        Raises:
            ValueError: attention of a module was not seen, or not understood, or recording it
                raised. All that was recorded is gone.
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
            more = f"; and of {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError("; ".join(problems[:3]) + more)
        return taken

    def discard(self) -> None:
        """Drops what was recorded since the last `take`, for a batch that no step will use."""
        self._leave_all()
        for record in self._records.values():
            record.clear()

    def remove(self) -> None:
        """Takes all hooks off."""
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
        # First of all: attention in other hooks is not the module's.
        hook(module.register_forward_hook(after, prepend=True, always_call=True))
        if record.attends and isinstance(record.query, nn.Module):
            before_query = _ForwardHook(self._before_query, record, is_of_query=True)
            hook(record.query.register_forward_pre_hook(before_query))

    @property
    def _running(self) -> list[_RunningForward]:
        """The forwards that are running, in this thread: autograd's threads recompute others."""
        return vars(self._threads).setdefault("running", [])

    def _running_forward(self, record: _Record) -> Optional[_RunningForward]:
        """The innermost forward of the record's module."""
        return next((f for f in reversed(self._running) if f.record is record), None)

    def _before(self, record: _Record, *_: Any) -> None:
        forward, earlier = _RunningForward(record, _counts()), self._running_forward(record)
        if earlier is not None:
            within = sum(other.record is record for other in self._running)
            if _calls_of(record.module) <= within:  # not one in the other: an interrupt has left it
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
        # The projection's weight is whole, but for tensor parallelism, in its own forward only.
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
        """Forgets the innermost forwards of this thread up to ``last``, and what they recorded, as
        those within ``last`` never ended; but keeps what ``last`` recorded if it has ``ended``."""
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
        """Forgets the forwards of this thread that were interrupted, and what they recorded."""
        if self._running:
            self._leave(self._running[0], ended=False)

    def record_call(self, call: Callable[[], Call]) -> None:
        """Records an attention call of the innermost forward in this thread, if there is any."""
        forward = self._running[-1] if self._running else None
        if forward is not None and forward.is_recorded and forward.record.attends:
            forward.saw_attention = True
            # An error is not raised now: ranks had better fail together, in take().
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
            raise ValueError(f"{name} is not hooked; there are {quote(self.names)}")
        return record


@dataclass(eq=False)
class _Record:
    """What was recorded of a hooked module.

    Args:
        within: the records of this module and of those below it.
        attends: whether its attention calls are recorded; not those of a model that is hooked to
            see whether its forward ends.
        maxima: (heads,), fp32; the same tensor at all steps, as compiled forwards guard on it.
        heads: of DTensor queries the mesh, its dimension that shards heads, how many there are.
        rows: of a query projection that is a DTensor the mesh, its dimension that shards rows, how
            many rows there are, how many of them this rank has.
        head_dim: numbers of a query head; 0 if unknown.
        is_blind: a recorded forward saw no attention.
        is_compiled: Dynamo has traced a forward that counts.
        is_observed: Dynamo has traced a call of observe in one.
        key: in `_RECORDS`.
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
        """The projection to queries, a module or a parameter."""
        children: dict[str, Any] = {**self.module._parameters, **self.module._modules}
        return next((children[name] for name in QUERIES if children.get(name) is not None), None)

    def note_rows(self, weight: Any) -> None:
        """Notes how the rows of the query projection are sharded."""
        if is_dtensor(weight):
            sharded = [i for i, p in enumerate(weight.placements) if p.is_shard(0)]
            if len(sharded) == 1:
                local = raw_local(weight).shape[0]
                self.rows = (weight.device_mesh, sharded[0], weight.shape[0], local)

    def add_eagerly(self, read_call: Callable[[], Call], raises: bool) -> None:
        """Raises the maxima to the logits of a call; an error is a `problem`, or is raised."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.problem = "runs within a transform of torch.func, where nothing can be recorded"
            return
        try:
            call = read_call()
            if not call.has_numbers:  # of a run that is to tell shapes
                return
            # Selective checkpointing would take our operations for some of those it runs again.
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
            self.problem = f"was not recorded, for its attention calls raise {kind}: {error}"

    def add_compiled(self, call: Call) -> None:
        # Nothing is assigned here: a graph under activation checkpointing must not, and one that
        # makes the maxima would be compiled anew when there are some.
        device, heads = call.queries.device, call.queries.shape[1]
        _note_observed(self.key, heads, call.head_dim, device.type, device.index)
        assert self.maxima is not None
        call.raise_maxima(self.maxima)

    def prepare(self, count: int, device: torch.device) -> None:
        """Makes the maxima of ``count`` heads where there are none, or those of other heads."""
        maxima = self.maxima
        if maxima is not None and maxima.device == device and len(maxima) != count:
            self.problem = f"attends with {count} heads, and with {len(maxima)} before"
        if maxima is None or maxima.device != device or len(maxima) != count:
            self.maxima = torch.full((count,), -math.inf, dtype=torch.float32, device=device)

    def take(self) -> Optional[Tensor]:
        """Returns the maxima, if there ever were any, and starts afresh.

        Raises:
            ValueError: they were not recorded as they should; starts afresh, too.
        """
        maxima = None if self.maxima is None else self.maxima.clone()
        problem = self.problem
        if self.is_blind and isinstance(self.module, nn.MultiheadAttention):
            problem = "ran, but called no attention function: give it need_weights=False"
        elif self.is_blind:
            problem = (
                "ran, but no attention call was seen: give models of transformers "
                f'attn_implementation="sdpa"; in other models {OBSERVE}, or name the modules that '
                "attend by modules="
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
        """What was recorded until now, for `restore`."""
        values = None if self.maxima is None else self.maxima.clone()
        return self.maxima, values, self.forwards, self.is_blind, self.problem

    def restore(self, snapshot: tuple) -> None:
        maxima, values, self.forwards, self.is_blind, self.problem = snapshot
        if maxima is not None:
            self.maxima = maxima
        if self.maxima is not None:  # the same tensor, as compiled forwards may guard on it
            self.maxima.copy_(values) if values is not None else self.maxima.fill_(-math.inf)

    def _as_sharded(self, maxima: Tensor) -> Tensor:
        """The maxima as a DTensor, where ranks have heads of their own."""
        sharding = self.heads
        if sharding is None and self.rows is not None:
            mesh, dim, rows, local = self.rows
            heads = len(maxima) * rows // local if local else rows // self.head_dim
            if rows == local or rows != len(maxima) * self.head_dim:  # else gathered before
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


# Records by their keys. Keys are constants, so Dynamo can call the two functions below with them
# while it traces. They are called only then, not when what was traced runs.
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
    """A forward that is running; ``is_recorded`` is False of one that does not count."""

    record: _Record
    is_recorded: bool
    saw_attention: bool = False
    snapshots: list[tuple[_Record, tuple]] = field(default_factory=list)


def _calls_of(module: nn.Module) -> int:
    """How many calls of the module this thread is in, one within the other."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        calls += is_call and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls


class _ForwardHook:
    """Calls a method of the recorder, while there is one, with a record; a copy, or a pickle, does
    nothing."""

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
        # Takes anything, returns None, and needs no package (see the recorder's).
        return getattr, (contextlib.nullcontext(), "__exit__")


def _remove_recorders(module: nn.Module) -> None:
    """Removes the recorder that records the module, if there is one."""
    for hook in list(module._forward_hooks.values()):
        method = hook.method() if isinstance(hook, _ForwardHook) and hook.record.attends else None
        if method is not None:
            method.__self__.remove()


def _counts() -> bool:
    """Whether a forward that begins now is to be recorded."""
    return torch.is_grad_enabled() and not (torch.jit.is_tracing() or _is_computed_again())


def _is_computed_again() -> bool:
    """Whether checkpointing repeats a forward that has run with gradients before.

    What is not known to do so counts: recording twice costs time only.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward is running
        return False
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            if frame.f_code.co_name == "recompute_fn":
                return True
            if frame.f_code.co_name == "backward":  # of a reentrant one
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
    # The same normalized name again is what a wrapper wraps.
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
                f"no module has any of {sorted(PROJECTIONS)}: name the attention modules in "
                f"modules=, there are {quote(list(modules))}"
            )
        return chosen
    if not patterns:
        raise ValueError("modules must be None or patterns, found none")
    chosen = {}
    for pattern in patterns:
        fitting = [name for name in modules if matches(full_names[name], pattern)]
        if not fitting:
            raise ValueError(f"no module fits {pattern!r}; there are {quote(list(modules))}")
        for name in fitting:
            if not any(name != other and _is_within(name, other) for other in fitting):
                chosen[name] = modules[name]
    return chosen


def _is_within(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")
