"""AdamW for the parameters that Muon does not train, by torch's fused or foreach implementation."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from .core import clip_weights
from .cpu_offload import CPUOffload, Prefetcher
from .cpu_offload.rows import AdamWRows
from .cpu_offload.windows import Fetch, fill_windows
from .distributed.regions import shard_interval
from .distributed.replicas import Replicas, is_divided
from .distributed.utils import is_dense, is_dtensor, local
from .parameters.options import Group
from .state.specs import keys_of
from .weight_rounding import RandomBits, as_int16, round_into, widen

if TYPE_CHECKING:
    from .distributed.zero2 import MeanGradients, RowAllGather
    from .qk_clip.clip import Clipping
    from .state.rounding import Rounding

# Bytes of weights in bf16 that are updated in fp32 at once.
FP32_WINDOW_BYTES = 16 << 20

# Devices with a fused kernel, which reads `step` on the parameter's device.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


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


class AdamWPart(NamedTuple):
    """What one event updates: a group of AdamW's parameters, or what one window has of it.

    Args:
        group: number of the group among AdamW's.
        window: number of the window among the group's.
        nbytes: bytes of state that the window brings; 0 if no state of the group is offloaded.
    """

    group: int
    window: int
    nbytes: int


class AdamWStep:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) in one step, part by part.

    It works on the local shards of DTensors, as AdamW is element-wise. Gradients are only read;
    with ``missing_grad="zero"`` an absent gradient counts as zeros. In ZeRO-2 plain parameters take
    mean gradients; each rank updates its rows of those that are divided, and gets the other rows
    from the other ranks.

    Args:
        groups: all groups of the optimizer; Muon's are passed over.
        state: of each parameter.
        replicas: the replicas that average gradients and divide the work, in ZeRO-2; else None.
        offload: knows where the state lives.
        rounding: has the residuals and random bits of weights that are updated in fp32.
        clipping: has QK-Clip's factors on query and key projections, applied after the update.
        prefetcher: brings offloaded state to the device.
        counts: whether the step counts, or only creates state.

    Attributes:
        parts: in the order of their updates.
        means: averages gradients; in ZeRO-2 only.
    """

    means: MeanGradients

    def __init__(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, MutableMapping[str, Tensor]],
        replicas: Optional[Replicas],
        offload: CPUOffload,
        rounding: Rounding,
        clipping: Optional[Clipping],
        prefetcher: Prefetcher,
        counts: bool = True,
    ):
        self._counts = counts
        self._groups = [group for group in groups if not group.use_muon]
        self._taking_part = [[p for p in g.params if g.takes_part(p)] for g in self._groups]
        self._state = state
        self._offload = offload
        self._rounding = rounding
        self._clipping = clipping
        self._prefetcher = prefetcher
        self._replicas = replicas
        self._rows: dict[int, AdamWRows] = {}
        self._gathering: list[RowAllGather] = []
        if not prefetcher.is_enqueued:
            for group, params in enumerate(self._taking_part):
                keys_by_param = [keys_of(self._groups[group], param.dtype) for param in params]
                fetches = [
                    [fetch for key in keys for fetch in self._fetches(state[param][key], key)]
                    for param, keys in zip(params, keys_by_param)
                ]
                prefetcher.add_windows(self._key(group), fetches)
        self.parts = [
            AdamWPart(group, window, nbytes)
            for group, params in enumerate(self._taking_part)
            if params
            for window, nbytes in enumerate(prefetcher.window_bytes(self._key(group)))
        ]
        self._averaged: dict[Tensor, int] = {}
        self._divided: set[Tensor] = set()
        if replicas is not None:
            from .distributed.zero2 import MeanGradients  # loaded where it is used

            plain = [p for params in self._taking_part for p in params if not is_dtensor(p)]
            self._averaged = {param: number for number, param in enumerate(plain)}
            divided = [is_divided(param.shape, len(replicas.ranks)) for param in plain]
            self._divided = {param for param, is_cut in zip(plain, divided) if is_cut}
            self.means = MeanGradients(plain, divided, replicas.group)

    def buckets_needed(self) -> list[int]:
        """For each part, how many buckets of gradients have to be averaged before it."""
        needed, count = [], 0
        for params in self._taking_part:
            count += sum(param in self._averaged for param in params)
            needed.append(self.means.bucket_plan.prefix_counts[count])
        return [needed[part.group] for part in self.parts]

    def enqueue(self, number: int) -> None:
        """Enqueues the window of offloaded state that a part is going to use."""
        part = self.parts[number]
        self._prefetcher.enqueue(self._key(part.group), part.window)

    def update(self, number: int) -> None:
        """Updates one part."""
        part = self.parts[number]
        if part.group not in self._rows:
            self._rows[part.group] = self._rows_of(part.group)
        rows, options = self._rows[part.group], self._groups[part.group]
        window = self._prefetcher.window(self._key(part.group), part.window)
        with window as fetched, record_function("Muon.adamw"):
            _update(rows.in_window(fetched), options)
        is_last = number + 1 == len(self.parts) or self.parts[number + 1].group != part.group
        if is_last:
            del self._rows[part.group]
            # A DTensor and its shard have a version counter each; the fused kernel changes neither.
            for param in self._taking_part[part.group]:
                torch.autograd.graph.increment_version(param)

    def share_rows(self, group: int) -> None:
        """Starts the all-gather that brings every replica the updated rows of a group."""
        from .distributed.zero2 import RowAllGather

        assert self._replicas is not None
        divided = [param for param in self._taking_part[group] if param in self._divided]
        self._gathering.append(RowAllGather(divided, self._replicas.group))
        self._gathering[-1].launch()

    def wait(self) -> None:
        """Waits until the rows of all replicas have come."""
        for rows in self._gathering:
            rows.wait()

    def _fetches(self, tensor: Tensor, key: str) -> list[Fetch]:
        """The fetch that brings a tensor of state to its device; an empty list if it needs none."""
        part = as_int16(local(tensor)) if key == "weight_residual" else None
        return self._offload.fetches(tensor, part)

    def _key(self, group: int) -> tuple[str, int]:
        return "adamw", group

    def _rows_of(self, group: int) -> AdamWRows:
        """The local tensors of a group's parameters, of divided ones only this rank's rows."""
        options = self._groups[group]
        rows = AdamWRows([], [], [], [], [], [], [])
        for param in self._taking_part[group]:
            weights, state, rounded_by = local(param), self._state[param], None
            if options.updates_in_fp32(param.dtype):
                rounded_by = self._rounding.of(param, options)
            clip = None if self._clipping is None else self._clipping.scale(param)
            if clip is not None:  # the two devices differ only for parameters in host memory
                clip = clip.to(weights.device)
            if param in self._averaged:
                grad = self.means.result(self._averaged[param])
                if param in self._divided:
                    assert self._replicas is not None
                    ranks, rank = len(self._replicas.ranks), self._replicas.group.rank()
                    interval = slice(*shard_interval(weights.shape[0], ranks, rank))
                    weights, clip = weights[interval], None if clip is None else clip[interval]
                    if isinstance(rounded_by, RandomBits):  # a residual has these rows only
                        rounded_by = rounded_by._replace(places=rounded_by.places[interval])
            elif param.grad is None:
                grad = torch.zeros_like(weights)
            else:
                grad = local(param.grad)
            rows.rounded_by.append(rounded_by)
            rows.params.append(weights)
            rows.grads.append(grad.to(weights.dtype) if rounded_by is None else grad)
            rows.exp_avgs.append(local(state["exp_avg"]))
            rows.exp_avg_sqs.append(local(state["exp_avg_sq"]))
            rows.steps.append(state["step"] if self._counts else state["step"].clone())
            rows.clip.append(clip)
        return rows


def _update(rows: AdamWRows, options: Group) -> None:
    """Updates rows, then clips them; rows with a residual or random bits are updated in fp32."""
    in_fp32 = [by is not None for by in rows.rounded_by]
    unwidened = rows.only([not widens for widens in in_fp32]) if any(in_fp32) else rows
    if unwidened.params:
        _call_adamw(unwidened, options)
    rows_in_fp32: Any = rows.only(in_fp32)
    devices = {param.device for param in rows_in_fp32.params}
    fetches = [[Fetch(param, param.device, True)] for param in rows_in_fp32.params]
    for _, pieces in fill_windows(fetches, dict.fromkeys(devices, FP32_WINDOW_BYTES)):
        part = rows_in_fp32.in_window([(piece, ()) for piece in pieces])
        exact = widen(part.params, part.rounded_by)
        grads = [grad.to(torch.float32) for grad in part.grads]
        _call_adamw(replace(part, params=exact, grads=grads), options)
        round_into(exact, part.params, part.rounded_by)
    clip_weights(rows.params, rows.clip, rounded_by=rows.rounded_by)


def _call_adamw(rows: AdamWRows, options: Group) -> None:
    """Updates rows by torch's functional AdamW; one call serves all that take the same kernel."""
    kinds: dict[tuple[bool, bool], list[bool]] = {}
    for number, param in enumerate(rows.params):
        # No graph captures what CPUs do, and torch's loop over tensors refuses capturable=True.
        capturable = options.capturable and param.device.type != "cpu"
        fused = is_fused(param) and _are_dense(
            param, rows.grads[number], rows.exp_avgs[number], rows.exp_avg_sqs[number]
        )
        chosen = kinds.setdefault((fused, capturable), [False] * len(rows.params))
        chosen[number] = True
    beta1, beta2 = options.adamw_betas
    for (fused, capturable), chosen in kinds.items():
        same_kind = rows.only(chosen) if len(kinds) > 1 else rows
        adamw(
            same_kind.params,
            same_kind.grads,
            same_kind.exp_avgs,
            same_kind.exp_avg_sqs,
            [],
            same_kind.steps,
            fused=fused or None,  # with None, torch takes foreach on devices that have it
            capturable=capturable,
            has_complex=any(param.is_complex() for param in same_kind.params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=options.lr,
            weight_decay=options.weight_decay,
            eps=options.adamw_eps,
            maximize=options.maximize,
        )


def _are_dense(param: Tensor, *others: Tensor) -> bool:
    """Whether all tensors fill their memory densely, in the same order of dimensions.

    torch's fused kernel treats tensors as flat arrays; where one lies otherwise, it would write the
    wrong elements.
    """
    shape, stride = param.shape, param.stride()
    return all(t.shape == shape and t.stride() == stride for t in others) and is_dense(param)
