"""An accelerator that isn't there: tensors "on cuda" in builds of torch without CUDA.

A `Fake` says that it is on the device and holds its numbers in a tensor of the host, so that the
arithmetic is real, on a CPU's kernels. What mixes tensors of host and device raises, as CUDA would
have it, and bytes of the device are counted. Streams and the driver's calls for page-locked memory
are there too: the package runs as it does beside a GPU, without a stand-in backend.

What this can't show: anything about time. Streams do what they are told at once, so a missing wait
goes unseen, unless a recorder watches (tests/race_detector.py). There is one device. Triton kernels
compute nothing (tests/stub_driver.py), or are not there. Memory is what is asked for, without an
allocator's rounding. Autograd can't record what is done with such tensors, so gradients are set by
hand, and all is done under ``no_grad``. Numbers are a CPU's: compare them with others of this
device only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_map_only

from kernel import optimizer

CUDA = torch.device("cuda", 0)

# What takes tensors of several devices.
MOVES = ("copy_", "_foreach_copy_", "_to_copy", "to")
# What takes indices, and values to put, from host memory: only the tensor itself is checked.
INDEXES = ("index", "index_put_", "__getitem__", "__setitem__")

# What torch's C++ refuses for lack of the device; all else is tried first.
REFUSED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_)

# What reads from the device how large its result is, or what it is.
WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2")
WAITING += ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")

# By which torch says that there is no such device, from C++ and from Python.
ABSENT = ("not linked with support for cuda", "not compiled with CUDA enabled")
ABSENT += ("Found no NVIDIA driver", "driver version is insufficient")  # builds with CUDA
# And what it says of tensors whose device has no kernels, or that have no memory of their own.
ABSENT += ("Could not run 'aten::", "is not supported for tensor subclasses")


class MixedDevices(RuntimeError):
    """One operation has tensors of the host and of the device."""


class Fake(Tensor):
    """A tensor on the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Fake:
        fake = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
            requires_grad=requires_grad,
        )
        fake.held = held
        return fake

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fake:
        kind = (self.requires_grad, getattr(self, "_is_param", False))
        return memo.setdefault(id(self), _again(self.held.clone(), *kind))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _again, (self.held, self.requires_grad, getattr(self, "_is_param", False))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fake({self.held!r})"


def _again(held: Tensor, requires_grad: bool, is_param: bool) -> Fake:
    fake = _wrap(held).requires_grad_(requires_grad)
    fake._is_param = is_param  # type: ignore[attr-defined]
    return fake  # type: ignore[return-value]


class Memory:
    """Bytes of the device: of storages that are alive, and the most there were."""

    def __init__(self, recorder: Any) -> None:
        self.now = 0
        self.peak = 0
        self._recorder = recorder
        self._alive: dict[int, weakref.ref[Any]] = {}  # storages by identity

    def meet(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            start = storage.data_ptr() if self._recorder else 0
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, start, nbytes))
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            if self._recorder:
                self._recorder.allocated(start, start + nbytes)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def _forget(self, key: int, start: int, nbytes: int) -> None:
        del self._alive[key]
        self.now -= nbytes
        if self._recorder:
            self._recorder.freed(start, start + nbytes)

    def settled(self) -> int:
        """Bytes once no thread of gloo's holds what it moved.

        It lets go of that after `wait` returns, later the busier the machine is.
        """
        before = -1
        while before != self.now:
            before = self.now
            time.sleep(0.2 if dist.is_initialized() else 0)
        return before

    def peak_of(self, action: Callable[[], object]) -> int:
        """The most bytes while something is done."""
        self.peak = self.settled()
        action()
        return self.peak


class Device:
    """The device while it is there.

    Attributes:
        memory: its bytes.
        operations: how often each was done there, by name.
        host_operations: how often each operation was done between tensors of the host, by name.
        computes: whether operations there are done; else their results are made, undefined.
        waits: what made the host wait, by operation: values that it reads from the device, and
            copies that are blocking, or from or to memory that is not page-locked.
        recorder: is told what streams order; None where nobody asks.
    """

    def __init__(self, computes: bool = True, recorder: Any = None) -> None:
        self.recorder = recorder
        self.numbers = itertools.count()  # of streams
        self.streams = [_Stream(name="compute")]  # the current one is the last
        self.memory = Memory(recorder)
        self.operations: Counter[str] = Counter()
        self.host_operations: Counter[str] = Counter()
        self.computes = computes
        self.waits: Counter[str] = Counter()
        self.locked: dict[int, int] = {}  # page-locked bytes by address
        self.unlocked: list[int] = []  # after how many waits for streams, of each that was so

    def is_locked(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + nbytes for start, nbytes in self.locked.items())


_device: Device


def _wrap(held: Tensor) -> Fake:
    _device.memory.meet(held.untyped_storage())
    return Fake(held)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Does on tensors of the host what is to be done on the device."""
    name = getattr(func, "_opname", None) or func.__name__
    _check(name, args, kwargs)
    _note_waits(name, args, kwargs)
    tensors = _tensors((args, kwargs))
    fakes = [tensor for tensor in tensors if isinstance(tensor, Fake)]
    # What is written to is returned itself, wherever it is.
    known = {id(tensor): tensor for tensor in tensors if not isinstance(tensor, Fake)}
    known.update({id(fake.held): fake for fake in fakes})
    args, kwargs = _mapped(Fake, lambda fake: fake.held, (args, kwargs))
    is_here = bool(fakes)
    if kwargs.get("device") is not None:
        is_here = _is_cuda(kwargs["device"])
        if is_here:
            kwargs["device"] = "cpu"
    does = func if _device.computes or not is_here else partial(_uncomputed, func)
    result = does(*args, **kwargs)
    if not is_here:
        return result
    _device.operations[name] += 1
    return _mapped(
        Tensor, lambda held: known[id(held)] if id(held) in known else _wrap(held), result
    )


def _check(name: str, args: Any, kwargs: Any) -> None:
    """Refuses what mixes devices.

    Only a number in host memory may be beside tensors of the device, but not in a list of them:
    torch's fused and foreach kernels read it from the device.
    """
    leaves = _tensors((args, kwargs))
    if name in MOVES or not any(isinstance(leaf, Fake) for leaf in leaves):
        return
    checked = args[:1] if name in INDEXES else (*args, *kwargs.values())
    numbers = {id(arg) for arg in checked if isinstance(arg, Tensor) and not arg.dim()}
    for leaf in leaves if name not in INDEXES else _tensors(checked):
        if not isinstance(leaf, Fake) and id(leaf) not in numbers:
            raise MixedDevices(
                f"{name} has tensors on {CUDA}, and one of shape {tuple(leaf.shape)} on "
                f"{leaf.device}"
            )


def _note_waits(name: str, args: Any, kwargs: Any) -> None:
    if name in WAITING:
        _device.waits[name] += 1
    if name == "copy_":
        target, source, *rest = args
        if isinstance(target, Fake) == isinstance(source, Fake):
            return
        is_blocking = not (rest[0] if rest else kwargs.get("non_blocking", False))
        host = source if isinstance(target, Fake) else target
        if is_blocking or not _device.is_locked(host):
            _device.waits["blocking copy" if is_blocking else "pageable copy"] += 1
    elif name == "_to_copy" and isinstance(args[0], Fake) != _is_cuda(
        kwargs.get("device", args[0].device)
    ):
        _device.waits["pageable copy"] += 1  # one of its ends is memory of torch's own


def _uncomputed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What an operation on tensors of the host would return, in memory that nothing touches."""
    if getattr(func, "is_view", True) or func._opname.startswith(("detach", "empty", "new_empty")):
        return func(*args, **kwargs)
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args)) | kwargs
    written = [
        named[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    if written and func.namespace != "c10d":  # which returns work to wait for
        count = len(func._schema.returns)
        return None if not count else written[0] if count == 1 else tuple(written)

    def on_meta(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    def in_memory(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)

    with _disable_current_modes():
        args, kwargs = _mapped(Tensor, on_meta, (args, kwargs))
        kwargs = kwargs | ({"device": "meta"} if "device" in kwargs else {})
        return _mapped(Tensor, in_memory, func(*args, **kwargs))


def _mapped(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree_map_only`, at a fraction of the time for what operations take and return."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)([_mapped(kind, change, branch) for branch in tree])
    if type(tree) is dict:
        return {key: _mapped(kind, change, branch) for key, branch in tree.items()}
    return tree_map_only(kind, change, tree) if isinstance(tree, tuple) else tree


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for branch in tree for tensor in _tensors(branch)]


class _Dispatch(TorchDispatchMode):
    """Makes tensors on the device, and counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor: seen again as operations on the tensors within
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")) or any(issubclass(t, Fake) for t in types):
            return _run(func, args, kwargs)
        _device.host_operations[func._opname] += 1
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Does without the device what torch's C++ refuses before it asks any tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED and any(isinstance(arg, Fake) for arg in args):
            return _run(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (AssertionError, RuntimeError) as error:
            if not any(text in str(error) for text in ABSENT):
                raise
        if func is Tensor.to:
            tensor, (device, dtype, *_) = args[0], torch._C._nn._parse_to(*args[1:], **kwargs)
            if tensor.device.type == "cuda" and _is_cuda(device) and dtype in (None, tensor.dtype):
                return tensor
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device)
        return _run(func, args, kwargs)


class _Stream:
    """Does everything at once, and tells the device's recorder, where there is one, of its order.

    Args:
        name: of the queue; by default a new one.
    """

    def __init__(self, device: Any = None, name: str = ""):
        self.name = name or f"stream {next(_device.numbers)}"

    def record_event(self, *_: Any) -> Any:
        recorder = _device.recorder
        if recorder is None:
            return SimpleNamespace(synchronize=self.synchronize)
        mark = recorder.record(self.name)
        return SimpleNamespace(synchronize=lambda: recorder.synchronize(mark), mark=mark)

    def synchronize(self) -> None:
        _device.waits["synchronize"] += 1
        if _device.recorder is not None:
            _device.recorder.synchronize(_device.recorder.record(self.name))

    def wait_event(self, event: Any) -> None:
        if _device.recorder is not None:
            _device.recorder.wait(self.name, event.mark)

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        _device.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _device.streams.pop()


def _driver() -> SimpleNamespace:
    def register(address: int, nbytes: int, flags: int) -> int:
        _device.locked[address] = nbytes
        return 0

    def unregister(address: int) -> int:
        # The memory is still there: reading it would crash otherwise.
        ctypes.string_at(address, _device.locked.pop(address))
        _device.unlocked.append(_device.waits["synchronize"])
        return 0

    return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


def _properties(*_: Any) -> SimpleNamespace:
    return SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)


@contextmanager
def fake_device(
    kernels: bool = False, computes: bool = True, recorder: Any = None
) -> Iterator[Device]:
    """Puts the device there.

    Args:
        kernels: whether Triton's are launched; they take a driver (tests/stub_driver.py).
        computes, recorder: see `Device`.
    """
    global _device
    triton_kernels = importlib.import_module(f"{optimizer.__name__}.triton_kernels")
    _device = Device(computes, recorder)
    used = triton_kernels.is_used_on if kernels else lambda device_type: False
    replaced: list[tuple[Any, str, Any]] = [
        (triton_kernels, "is_used_on", used),
        (torch, "Stream", _Stream),
        (torch.accelerator, "current_stream", lambda *_: _device.streams[-1]),
        (torch.accelerator, "device_index", lambda index: nullcontext()),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "is_initialized", lambda: True),
        (torch.cuda, "cudart", _driver),
        (torch.cuda, "get_device_properties", _properties),
    ]
    gc.freeze()  # what there is already needs no collecting below
    with ExitStack() as stack:
        stack.callback(gc.unfreeze)
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Dispatch())
        stack.enter_context(_Functions())
        try:
            yield _device
        finally:
            gc.collect()  # memory that is page-locked needs the driver when it goes


def rows_at(value: Tensor, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """A DTensor, of which each rank's rows are on the host or on the device of its mesh, to which
    `DTensor.from_local` would move them."""
    rows = -(-len(value) // mesh.size())
    part = value.detach()[rows * mesh.get_local_rank() :][:rows].clone().to(device)
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]
