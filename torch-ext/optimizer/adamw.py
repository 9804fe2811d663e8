"""AdamW for the parameters that Muon does not train, by torch's fused or foreach implementation.

A step updates AdamW's parameters in parts. A part has lists, with an item for each tensor or piece
of one, that are bound to parameters and state once, like Muon's chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .core import clip_weights
from .cpu_offload import CPUOffload, Fetch, Load
from .cpu_offload.ring import ALIGNMENT, memory_order
from .distributed.dtensors import addresses, is_dense, is_dtensor, local, raw_locals
from .distributed.regions import shard_interval
from .distributed.replicas import Replicas, is_divided
from .parameters.options import Group
from .weight_rounding import RoundedBy, round_into, widen

if TYPE_CHECKING:
    from .distributed.zero2 import MeanGradients, RowAllGather
    from .state.rounding import Rounding

# Bytes of weights in bf16 that are updated in fp32 at once.
FP32_BYTES = 16 << 20

# Bytes of state that come from host memory for one part: larger copies are no faster, and the step
# waits for the first of them; and some parts arrive while others are used or copied back.
STREAMED_BYTES = 64 << 20
STREAMED_SHARE = 8  # of the memory for them

# A piece has a multiple of the first of these, in elements, that it can have: torch's fused AdamW
# on CPUs rounds elements that do not fill a vector register differently.
ALIGNED_NUMEL = (64, 32, 16)

# Devices with a fused kernel, which reads `step` on the parameter's device.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")

Index = tuple[slice, ...]


def is_fused(param: Tensor) -> bool:
    """Whether torch's fused kernel may update a parameter."""
    return param.device.type in FUSED_DEVICES and torch.is_floating_point(param)


def init_step(param: Tensor, state: MutableMapping[str, Tensor], options: Group) -> None:
    """Creates ``step``, () in fp32, if it is missing; moves it to where torch's AdamW reads it."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    on_device = options.capturable or is_fused(param)
    device = local(param).device if on_device else torch.device("cpu")
    if state["step"].device != device:
        state["step"] = state["step"].to(device)


class Kind(NamedTuple):
    """What the tensors of one part have in common.

    Args:
        group: number of their group.
        in_fp32: whether they are updated in fp32, and rounded afterwards.
        fused: whether torch's fused kernel updates them.
        capturable: whether a graph may capture that.
        streamed_to: the device to which their state comes from host memory; else None.
    """

    group: int
    in_fp32: bool
    fused: bool
    capturable: bool
    streamed_to: Optional[torch.device]


@dataclass
class Part:
    """What one event updates; the lists have an item for each tensor, or piece of one.

    Args:
        params: the whole parameters.
        weights: of this rank, as far as it updates them.
        index: of the piece in these; None for all of them.
        is_last: whether it is the last piece of its tensor.
        rounding: residuals or places of random bits; empty unless ``kind.in_fp32``.
        load: what comes from host memory; None if nothing does.
        size: bytes that count against the size of a part.
    """

    kind: Kind
    params: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    index: list[Optional[Index]] = field(default_factory=list)
    is_last: list[bool] = field(default_factory=list)
    rounding: list[Tensor] = field(default_factory=list)
    load: Optional[Load] = None
    size: int = 0

    @property
    def group(self) -> int:
        return self.kind.group

    @property
    def nbytes(self) -> int:
        """Of state that comes from host memory."""
        return 0 if self.load is None else self.load.nbytes


class Parts:
    """AdamW's parts, bound to the parameters that take part and to their state.

    They come group by group, and are valid as long as storages are.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        taking_part: Sequence[Sequence[Tensor]],
        state: Mapping[Tensor, Mapping[str, Tensor]],
        replicas: Optional[Replicas],
        offload: CPUOffload,
        rounding: Rounding,
    ):
        self.taking_part = taking_part
        self._groups = groups
        self._state = state
        self._replicas = replicas
        self._offload = offload
        self._rounding = rounding
        bound = [(p, *state[p].values()) for params in taking_part for p in params]
        self._tensors = [t for tensors in bound for t in tensors if isinstance(t, Tensor)]
        self._addresses = addresses(self._tensors)
        self._slot_bytes: dict[torch.device, int] = {}
        self.parts: list[Part] = []
        for number, params in enumerate(taking_part):
            of_group: dict[Kind, list[Part]] = {}
            for param in params:
                self._add(param, number, of_group)
            for parts in of_group.values():
                self.parts += parts
        for part in self.parts:
            if part.kind.streamed_to is not None:
                self._stream(part)

    def fit(self) -> bool:
        """Whether all storages are still those that were bound."""
        return addresses(self._tensors) == self._addresses

    def _add(self, param: Tensor, number: int, of_group: dict[Kind, list[Part]]) -> None:
        """Adds a parameter to the last part of its kind; what is too large, piece by piece."""
        own, options, weights = self._state[param], self._groups[number], local(param)
        in_fp32 = options.updates_in_fp32(param.dtype)
        rounding = self._rounding.tensor(param, options) if in_fp32 else None
        if self._replicas is not None and is_row_divided(param, self._replicas):
            weights = weights[rows_of(param, self._replicas)]
            if options.weight_rounding == "stochastic" and rounding is not None:
                rounding = rounding[rows_of(param, self._replicas)]  # a residual has these rows
        moments = [local(own["exp_avg"]), local(own["exp_avg_sq"])]
        fetch = self._offload.fetch(own["exp_avg"], moments[0])
        streamed_to = None if fetch is None else fetch.device
        kind = Kind(
            number,
            in_fp32,
            is_fused(param) and _lie_alike([weights, *moments]),
            # No graph captures what CPUs do, and torch's loop over tensors refuses it there.
            options.capturable and param.device.type != "cpu",
            streamed_to,
        )
        # Bytes of each element that count, and how many a part may have.
        each, limit = weights.itemsize if in_fp32 else 0, FP32_BYTES
        if streamed_to is not None:
            each = sum(moment.itemsize for moment in moments) + (2 if in_fp32 else 0)
            if streamed_to not in self._slot_bytes:  # which looks at all state
                self._slot_bytes[streamed_to] = self._offload.slot_bytes(streamed_to)
            slots = self._slot_bytes[streamed_to] // STREAMED_SHARE
            limit = min(slots, STREAMED_BYTES) - 3 * ALIGNMENT
        parts = of_group.setdefault(kind, [])
        for index in _pieces(weights, max(1, limit // each) if each else None):
            size = each * narrow(weights, index).numel()
            if not parts or parts[-1].size + size > limit:
                parts.append(Part(kind))
            part = parts[-1]
            part.size += size
            part.params.append(param)
            part.weights.append(narrow(weights, index))
            part.exp_avgs.append(narrow(moments[0], index))
            part.exp_avg_sqs.append(narrow(moments[1], index))
            part.steps.append(own["step"])
            part.index.append(index)
            part.is_last.append(False)
            if rounding is not None:
                part.rounding.append(narrow(rounding, index))
        parts[-1].is_last[-1] = True

    def _stream(self, part: Part) -> None:
        """Says what a part brings from host memory."""

        def fetches(key: str, tensors: Sequence[Tensor]) -> list[Optional[Fetch]]:
            states = (self._state[param].get(key) for param in part.params)
            return list(map(self._offload.fetch, states, tensors))

        columns = [fetches("exp_avg", part.exp_avgs), fetches("exp_avg_sq", part.exp_avg_sqs)]
        if part.rounding:
            columns.append(fetches("weight_residual", part.rounding))
        part.load = Load(columns)


def narrow(tensor: Tensor, index: Optional[Index]) -> Tensor:
    """The piece of a tensor, which may be one that broadcasts to the tensor that was divided."""
    if index is None:
        return tensor
    sizes = zip(tensor.shape, index)
    return tensor[tuple(slice(None) if size == 1 else interval for size, interval in sizes)]


def _pieces(tensor: Tensor, most: Optional[int]) -> Iterator[Optional[Index]]:
    """Yields the pieces of a tensor, of at most so many elements; None for all of it."""
    if most is None or tensor.numel() <= most:
        yield None
    else:
        yield from _divide(tuple(map(slice, tensor.shape)), memory_order(tensor), most)


def _divide(box: Index, dims: Sequence[int], most: int) -> Iterator[Index]:
    """Boxes of at most so many elements (at least 1), each an interval of memory if ``box`` is.

    ``dims`` are those of more than one index, the outermost in memory first.
    """
    sizes = [s.stop - (s.start or 0) for s in box]
    numel = math.prod(sizes)
    if numel <= most:
        yield box
        return
    dim = next(dim for dim in dims if sizes[dim] > 1)
    step = max(1, most * sizes[dim] // numel)
    for aligned in (n // math.gcd(n, numel // sizes[dim]) for n in ALIGNED_NUMEL):
        if step >= aligned:
            step -= step % aligned
            break
    first, stop = box[dim].start or 0, box[dim].stop
    for start in range(first, stop, step):
        interval = slice(start, min(start + step, stop))
        yield from _divide((*box[:dim], interval, *box[dim + 1 :]), dims, most)


def is_row_divided(param: Tensor, replicas: Replicas) -> bool:
    """Whether replicas divide the work on a parameter of AdamW's by rows."""
    return not is_dtensor(param) and is_divided(param.shape, len(replicas.ranks))


def rows_of(param: Tensor, replicas: Replicas) -> slice:
    """The rows of a parameter that this rank updates."""
    return slice(*shard_interval(param.shape[0], len(replicas.ranks), replicas.group.rank()))


def _lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors fill their memory densely, in the same order of dimensions.

    torch's fused kernel treats tensors as flat arrays; where one lies otherwise, it would write the
    wrong elements.
    """
    shape, stride = tensors[0].shape, tensors[0].stride()
    return all(t.shape == shape and t.stride() == stride for t in tensors) and is_dense(tensors[0])


class AdamWStep:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) in one step, part by part.

    It works on the local shards of DTensors, as AdamW is element-wise. Gradients are only read; an
    absent one counts as zeros. In ZeRO-2 plain parameters take mean gradients; each rank updates
    its rows of those that are divided, and gets the other rows from the other ranks.

    Args:
        bound: what takes part.
        groups: all groups of the optimizer, as they are in this step.
        replicas: the replicas that average gradients and divide the work, in ZeRO-2; else None.
        rounding: has what weights that are updated in fp32 are rounded by.
        clip: has QK-Clip's factors on a parameter's rows, applied after the update; or None.
        counts: whether the step counts, or only creates state.

    Attributes:
        means: averages gradients; in ZeRO-2 only.
    """

    means: MeanGradients

    def __init__(
        self,
        bound: Parts,
        groups: Sequence[Group],
        replicas: Optional[Replicas],
        rounding: Rounding,
        clip: Optional[Callable[[Tensor], Optional[Tensor]]],
        counts: bool = True,
    ):
        self._bound = bound
        self._groups = groups
        self._replicas = replicas
        self._rounding = rounding
        self._clip = clip
        self._counts = counts
        self._averaged: dict[Tensor, int] = {}
        self._means: dict[Tensor, Tensor] = {}  # of parameters of which further pieces come
        self._gathering: list[RowAllGather] = []
        if replicas is not None:
            from .distributed.zero2 import MeanGradients  # loaded where it is used

            plain = [p for params in bound.taking_part for p in params if not is_dtensor(p)]
            self._averaged = {param: number for number, param in enumerate(plain)}
            divided = [is_row_divided(param, replicas) for param in plain]
            self.means = MeanGradients(plain, divided, replicas.group)

    def buckets_needed(self) -> list[int]:
        """For each part, how many buckets of gradients have to be averaged before it."""
        needed, count = [], 0
        for params in self._bound.taking_part:
            count += sum(param in self._averaged for param in params)
            needed.append(self.means.bucket_plan.prefix_counts[count])
        return [needed[part.group] for part in self._bound.parts]

    def update(self, part: Part, bring: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        """Updates one part; ``bring`` brings a list of its tensors to the device."""
        options, kind = self._groups[part.group], part.kind
        grads = self._grads(part)
        exp_avgs, exp_avg_sqs = bring(part.exp_avgs), bring(part.exp_avg_sqs)
        rounded_by: Optional[list[RoundedBy]] = None
        weights = part.weights
        if kind.in_fp32:
            rounded_by = self._rounding.by(part.params, bring(part.rounding), options)
            weights = widen(part.weights, rounded_by)
            grads = [grad.to(torch.float32) for grad in grads]
        # The step of a tensor in several pieces is counted with the last one.
        steps = [
            step if is_last and self._counts else step.clone()
            for step, is_last in zip(part.steps, part.is_last)
        ]
        columns = weights, grads, exp_avgs, exp_avg_sqs, steps
        alike = [grad.stride() == weight.stride() for grad, weight in zip(grads, weights)]
        if not kind.fused or all(alike):
            _call_adamw(columns, kind.fused, kind.capturable, options)
        else:
            for fused in (True, False):
                chosen = [is_alike is fused for is_alike in alike]
                some = tuple(list(compress(column, chosen)) for column in columns)
                _call_adamw(some, fused, kind.capturable, options)
        if rounded_by is not None:
            round_into(weights, part.weights, rounded_by)
        if self._clip is not None:
            factors = map(self._factors, part.params, part.weights, part.index)
            clip_weights(part.weights, list(factors), rounded_by)
        # A DTensor and its shard have a version counter each; the fused kernel changes neither.
        torch.autograd.graph.increment_version(list(compress(part.params, part.is_last)))

    def share_rows(self, group: int) -> None:
        """Starts the all-gather that brings every replica the updated rows of a group."""
        from .distributed.zero2 import RowAllGather

        replicas = self._replicas
        assert replicas is not None
        params = self._bound.taking_part[group]
        divided = [param for param in params if is_row_divided(param, replicas)]
        self._gathering.append(RowAllGather(divided, replicas.group))
        self._gathering[-1].launch()

    def wait(self) -> None:
        """Waits until the rows of all replicas have come."""
        for rows in self._gathering:
            rows.wait()

    def _grads(self, part: Part) -> list[Tensor]:
        """The gradients of a part's tensors, local ones or means."""
        grads = []
        held = raw_locals([param.grad for param in part.params])
        for param, grad, index, is_last in zip(part.params, held, part.index, part.is_last):
            if param in self._averaged:
                grad = self._means.pop(param, None)
                grad = self.means.result(self._averaged[param]) if grad is None else grad
                if not is_last:
                    self._means[param] = grad
            elif grad is None:
                grad = torch.zeros_like(local(param))
            grad = grad if index is None else narrow(grad, index)
            grads.append(grad if part.kind.in_fp32 else grad.to(param.dtype))
        return grads

    def _factors(self, param: Tensor, weight: Tensor, index: Optional[Index]) -> Optional[Tensor]:
        """QK-Clip's factors on a piece of a parameter, or None."""
        assert self._clip is not None
        factors = self._clip(param)
        if factors is None:
            return None
        if self._replicas is not None and is_row_divided(param, self._replicas):
            factors = factors[rows_of(param, self._replicas)]
        # The two devices differ only for parameters in host memory.
        return narrow(factors, index).to(weight.device)


def _call_adamw(
    columns: Sequence[list[Tensor]], fused: bool, capturable: bool, options: Group
) -> None:
    """Updates tensors by torch's functional AdamW.

    Args:
        columns: weights, gradients, both moments, steps.
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
        fused=fused or None,  # with None, torch takes foreach on devices that have it
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
