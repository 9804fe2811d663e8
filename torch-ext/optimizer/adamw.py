"""AdamW for the parameters that Muon doesn't train, with torch's fused or foreach implementation.

A step updates AdamW's parameters in parts: lists with one item per tensor, or per piece of a large
tensor. Like Muon's chunks, parts are bound to parameters and state once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .core import clip_weights
from .cpu_offload import CPUOffload, Fetch, Load
from .cpu_offload.ring import ALIGNMENT, memory_order
from .distributed.dtensors import is_dense, is_dtensor, local
from .distributed.replicas import Replicas, is_divided
from .parameters.options import Group
from .regions import shard_interval
from .weight_rounding import RoundedBy, round_into, widen

if TYPE_CHECKING:
    from .state.rounding import Rounding

# Bytes of bf16 weights that one part updates in fp32.
FP32_BYTES = 16 << 20

# Bytes of state that one part fetches from host memory. Larger copies aren't faster, and steps wait
# for the first.
STREAMED_BYTES = 64 << 20
# One part uses at most 1/8 of the memory for fetched state: other parts are in flight, too.
STREAMED_SHARE = 8

# Elements of a piece are a multiple of the first of these numbers that fits: torch's fused AdamW on
# CPUs rounds elements differently if they don't fill a vector register.
ALIGNED_NUMEL = (64, 32)

# Devices with a fused kernel, which reads `step` on the parameter's device.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")

Index = tuple[slice, ...]


def is_fused(param: Tensor) -> bool:
    """Returns True if torch's fused kernel can update a parameter."""
    return param.device.type in FUSED_DEVICES and torch.is_floating_point(param)


def init_step(param: Tensor, state: MutableMapping[str, Tensor], options: Group) -> None:
    """Creates ``step``, () in fp32, if it is missing; moves it to the device torch's AdamW uses."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    on_device = options.capturable or is_fused(param)
    device = local(param).device if on_device else torch.device("cpu")
    if state["step"].device != device:
        state["step"] = state["step"].to(device)


class Kind(NamedTuple):
    """Properties that all tensors of one part share.

    Args:
        group: number of their group.
        in_fp32: True if they are updated in fp32 and rounded afterwards.
        fused: True if torch's fused kernel updates them.
        capturable: True if a CUDA graph may capture the update.
        streamed_to: the device that fetches their state from host memory, if any.
    """

    group: int
    in_fp32: bool
    fused: bool
    capturable: bool
    streamed_to: Optional[torch.device]


@dataclass
class Part:
    """The tensors that one event updates. All lists have one item per tensor or piece of a tensor.

    Args:
        params: the whole parameters.
        weights: the local weights that this rank updates.
        index: each piece's position in the local weights; None for all of them.
        is_last: True for the last piece of a tensor.
        rounding: residuals or places of random bits; None unless ``kind.in_fp32``.
        load: the copies from host memory; None if there are none.
        size: bytes that count against the limit on a part.
    """

    kind: Kind
    params: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    index: list[Optional[Index]] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    rounding: Optional[list[Tensor]] = None
    load: Optional[Load] = None
    size: int = 0

    @property
    def group(self) -> int:
        return self.kind.group

    @property
    def nbytes(self) -> int:
        """Bytes of state fetched from host memory."""
        return 0 if self.load is None else self.load.nbytes


class Binder:
    """Divides AdamW's parameters into parts, bound to their storages.

    In ZeRO-2, ``replicas`` divide the work; otherwise it is None.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        replicas: Optional[Replicas],
        offload: CPUOffload,
        rounding: Rounding,
    ):
        self._groups = groups
        self._state = state
        self._replicas = replicas
        self._offload = offload
        self._rounding = rounding
        self._slot_bytes: dict[torch.device, int] = {}

    def parts(self, taking_part: Sequence[Sequence[Tensor]]) -> list[Part]:
        """Returns the parts of the given parameters, which are listed group by group."""
        parts: list[Part] = []
        for number, params in enumerate(taking_part):
            by_kind: dict[Kind, list[Part]] = {}
            for param in params:
                self._add(param, number, by_kind)
            parts += chain.from_iterable(by_kind.values())
        for part in parts:
            if part.kind.streamed_to is not None:
                self._stream(part)
        return parts

    def _add(self, param: Tensor, number: int, by_kind: dict[Kind, list[Part]]) -> None:
        """Adds a parameter to the last part of its kind; a large one piece by piece."""
        state, options, weights = self._state[param], self._groups[number], local(param)
        in_fp32 = options.updates_in_fp32(param.dtype)
        rounding = self._rounding.tensor(param, options) if in_fp32 else None
        rows = divided_rows(param, self._replicas)
        if rows is not None:
            weights = weights[rows]
            if options.weight_rounding == "stochastic" and rounding is not None:
                rounding = rounding[rows]  # a residual contains only these rows
        moments = [local(state["exp_avg"]), local(state["exp_avg_sq"])]
        fetch = self._offload.fetch(state["exp_avg"], moments[0])
        streamed_to = None if fetch is None else fetch.device
        kind = Kind(
            number,
            in_fp32,
            is_fused(param) and _lie_alike([weights, *moments]),
            # CUDA graphs don't capture CPU work, and torch's loop over tensors refuses it on CPUs.
            options.capturable and param.device.type != "cpu",
            streamed_to,
        )
        # Bytes per element that count against the limit, and the limit on a part.
        each, limit = weights.itemsize if in_fp32 else 0, FP32_BYTES
        if streamed_to is not None:
            each = sum(moment.itemsize for moment in moments) + (2 if in_fp32 else 0)
            if streamed_to not in self._slot_bytes:  # cached: `slot_bytes` looks at all state
                self._slot_bytes[streamed_to] = self._offload.slot_bytes(streamed_to)
            slots = self._slot_bytes[streamed_to] // STREAMED_SHARE
            limit = min(slots, STREAMED_BYTES) - 3 * ALIGNMENT
        parts = by_kind.setdefault(kind, [])
        for index in _pieces(weights, max(1, limit // each) if each else None):
            size = each * narrow(weights, index).numel()
            if not parts or parts[-1].size + size > limit:
                parts.append(Part(kind, rounding=[] if in_fp32 else None))
            part = parts[-1]
            part.size += size
            part.params.append(param)
            part.weights.append(narrow(weights, index))
            part.exp_avgs.append(narrow(moments[0], index))
            part.exp_avg_sqs.append(narrow(moments[1], index))
            part.steps.append(state["step"])
            part.index.append(index)
            part.is_last.append(False)
            if rounding is not None and part.rounding is not None:
                part.rounding.append(narrow(rounding, index))
        parts[-1].is_last[-1] = True

    def _stream(self, part: Part) -> None:
        """Sets which tensors a part fetches from host memory."""

        def fetches(key: str, tensors: Sequence[Tensor]) -> list[Optional[Fetch]]:
            states = (self._state[param].get(key) for param in part.params)
            return list(map(self._offload.fetch, states, tensors))

        columns = [fetches("exp_avg", part.exp_avgs), fetches("exp_avg_sq", part.exp_avg_sqs)]
        if part.rounding is not None:
            columns.append(fetches("weight_residual", part.rounding))
        part.load = Load(columns)


def narrow(tensor: Tensor, index: Optional[Index]) -> Tensor:
    """Returns a piece of the divided tensor, or of one that broadcasts to it; None means all."""
    if index is None:
        return tensor
    sizes = zip(tensor.shape, index)
    return tensor[tuple(slice(None) if size == 1 else interval for size, interval in sizes)]


def _pieces(tensor: Tensor, most: Optional[int]) -> Iterator[Optional[Index]]:
    """Yields pieces of at most ``most`` elements; None, for the whole tensor, if it is smaller."""
    if most is None or tensor.numel() <= most:
        yield None
    else:
        yield from _divide(tuple(map(slice, tensor.shape)), memory_order(tensor), most)


def _divide(box: Index, dims: Sequence[int], most: int) -> Iterator[Index]:
    """Divides a box into boxes of at most ``most`` elements, contiguous in memory if ``box`` is.

    Boxes begin at multiples of ``ALIGNED_NUMEL[-1]`` elements in memory; they exceed ``most`` where
    alignment requires it. ``dims`` lists dimensions from the outermost in memory to the innermost.
    """
    sizes = [s.stop - (s.start or 0) for s in box]
    dim = next((dim for dim in dims if sizes[dim] > 1), None)
    each = 0 if dim is None else math.prod(sizes) // sizes[dim]  # elements per index of dim
    aligned = [numel // math.gcd(numel, each) for numel in ALIGNED_NUMEL]  # in indices of dim
    if dim is None or math.prod(sizes) <= most or aligned[-1] >= sizes[dim]:
        yield box
        return
    step = max(aligned[-1], most // each)
    step -= step % next(indices for indices in aligned if indices <= step)
    first, stop = box[dim].start or 0, box[dim].stop
    for start in range(first, stop, step):
        interval = slice(start, min(start + step, stop))
        yield from _divide((*box[:dim], interval, *box[dim + 1 :]), dims, most)


def divided_rows(param: Tensor, replicas: Optional[Replicas]) -> Optional[slice]:
    """Returns the rows of a parameter that this rank updates; None if replicas don't divide it."""
    if replicas is None or is_dtensor(param) or not is_divided(param.shape, len(replicas.ranks)):
        return None
    return slice(*shard_interval(param.shape[0], len(replicas.ranks), replicas.group.rank()))


def _lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Returns True if all tensors are dense in memory, with the same order of dimensions.

    torch's fused kernel treats tensors as flat arrays; with another layout it would write the wrong
    elements.
    """
    shape, stride = tensors[0].shape, tensors[0].stride()
    return all(t.shape == shape and t.stride() == stride for t in tensors) and is_dense(tensors[0])


def update(
    part: Part,
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    options: Group,
    rounded_by: Optional[list[RoundedBy]],
    clip: Optional[list[Optional[Tensor]]],
    counts: bool,
) -> None:
    """Updates one part with AdamW (Loshchilov & Hutter 2019, algorithm 2), then applies QK-Clip.

    Args:
        grads: gradients of the part's tensors; only read.
        exp_avgs, exp_avg_sqs: the part's moments, on the device.
        options: the part's group.
        rounded_by: residuals or random bits that round weights updated in fp32; otherwise None.
        clip: as in `core.clip_weights`; None without QK-Clip.
        counts: False for a step that only creates state, which doesn't count.
    """
    weights, fused = part.weights, part.kind.fused
    if rounded_by is not None:
        weights = widen(weights, rounded_by)
        grads = [grad.to(torch.float32) for grad in grads]
    # If a tensor is in several pieces, its last piece increments its step.
    steps = [
        step if is_last and counts else step.clone()
        for step, is_last in zip(part.steps, part.is_last)
    ]
    columns = weights, grads, exp_avgs, exp_avg_sqs, steps
    alike = [grad.stride() == weight.stride() for grad, weight in zip(grads, weights)]
    if not fused or all(alike):
        _call_adamw(columns, fused, part.kind.capturable, options)
    else:
        for is_fused in (True, False):
            chosen = [is_alike is is_fused for is_alike in alike]
            some = tuple(list(compress(column, chosen)) for column in columns)
            _call_adamw(some, is_fused, part.kind.capturable, options)
    if rounded_by is not None:
        round_into(weights, part.weights, rounded_by)
    if clip is not None:
        clip_weights(part.weights, clip, rounded_by)
    # torch's fused kernel increments no version counter, and a DTensor has one besides its shard's.
    torch.autograd.graph.increment_version(list(compress(part.params, part.is_last)))


def _call_adamw(
    columns: Sequence[list[Tensor]], fused: bool, capturable: bool, options: Group
) -> None:
    """Updates tensors with torch's functional AdamW.

    Args:
        columns: lists of weights, gradients, first moments, second moments, and steps.
        fused, capturable: as in `Kind`.
    """
    weights, grads, exp_avgs, exp_avg_sqs, steps = columns
    beta1, beta2 = options.adamw_betas
    adamw(
        weights,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=fused or None,  # with None, torch uses foreach on devices that have it
        capturable=capturable,
        has_complex=any(map(torch.is_complex, weights)),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.adamw_eps,
        maximize=options.maximize,
    )
