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
from .weight_rounding import Noise, as_int16, round_into, widen

if TYPE_CHECKING:
    from .distributed.zero2 import MeanGradients, RowAllGather
    from .qk_clip.clip import Clipping
    from .state.rounding import Rounding

# Weights in bf16 that are updated in fp32 at once, in bytes.
FP32_WINDOW_BYTES = 16 << 20

# Devices whose fused kernel keeps `step` beside the parameter.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def is_fused(param: Tensor, options: Group) -> bool:
    """Whether this parameter takes torch's fused kernel; ``foreach`` given either way means no."""
    return (
        options.foreach is None
        and param.device.type in FUSED_DEVICES
        and torch.is_floating_point(param)
    )


def init_step(param: Tensor, state: MutableMapping[str, Tensor], options: Group) -> None:
    """Adds ``step``, () in fp32, where it is missing, and moves it to where its kernel reads it."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    on_device = options.capturable or is_fused(param, options)
    device = local(param).device if on_device else torch.device("cpu")
    if state["step"].device != device:
        state["step"] = state["step"].to(device)


class AdamWPart(NamedTuple):
    """Parameters that are updated at once: all of a group, or those of one window of its moments.

    Args:
        group: number of the group among AdamW's.
        window: number of the window among the group's.
        nbytes: of the moments that the window brings.
    """

    group: int
    window: int
    nbytes: int


class AdamWStep:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) in one step, part by part.

    It works on the local shards of DTensors, as AdamW is element-wise. Gradients are only read;
    with ``missing_grad="zero"`` an absent one counts as zeros. In ZeRO-2 each rank updates its rows
    of plain parameters, with mean gradients, and gets the others' rows.

    Args:
        groups: all of them; Muon's are passed over.
        state: of each parameter.
        replicas: those that average gradients and divide the work, in ZeRO-2.
        offload: where the state lives.
        rounding: tells what weights are rounded by that are updated in fp32.
        clipping: scales biases and weights of projections, after their update.
        prefetcher: what brings the state.

    Attributes:
        parts: in the order of their updates.
        means: of the averaged gradients, in ZeRO-2 only.
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
    ):
        self._groups = [group for group in groups if not group.use_muon]
        self._present = [[p for p in g.params if g.takes_part(p)] for g in self._groups]
        self._state = state
        self._offload = offload
        self._rounding = rounding
        self._clipping = clipping
        self._prefetcher = prefetcher
        self._replicas = replicas
        self._rows: dict[int, AdamWRows] = {}
        self._gathering: list[RowAllGather] = []
        if not prefetcher.is_enqueued:
            for group, params in enumerate(self._present):
                keys = [keys_of(self._groups[group], param.dtype) for param in params]
                fetches = [
                    [fetch for key in keys for fetch in self._fetches(state[param][key], key)]
                    for param, keys in zip(params, keys)
                ]
                prefetcher.add_windows(self._key(group), fetches)
        self.parts = [
            AdamWPart(group, window, nbytes)
            for group, params in enumerate(self._present)
            if params
            for window, nbytes in enumerate(prefetcher.window_bytes(self._key(group)))
        ]
        self._averaged: dict[Tensor, int] = {}
        self._divided: set[Tensor] = set()
        if replicas is not None:
            from .distributed.zero2 import MeanGradients  # loaded where it is used

            plain = [p for params in self._present for p in params if not is_dtensor(p)]
            self._averaged = {param: number for number, param in enumerate(plain)}
            divided = [is_divided(param.shape, len(replicas.ranks)) for param in plain]
            self._divided = {param for param, is_cut in zip(plain, divided) if is_cut}
            self.means = MeanGradients(plain, divided, replicas.group)

    def buckets_needed(self) -> list[int]:
        """How many buckets of gradients have to be averaged before each part."""
        needed, count = [], 0
        for params in self._present:
            count += sum(param in self._averaged for param in params)
            needed.append(self.means.bucket_plan.prefix_counts[count])
        return [needed[part.group] for part in self.parts]

    def enqueue(self, number: int) -> None:
        """Announces what a part is going to need of the host's memory."""
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
            # A DTensor's counter is not its shard's, and torch's fused kernel leaves both alone.
            for param in self._present[part.group]:
                torch.autograd.graph.increment_version(param)

    def share_rows(self, group: int) -> None:
        """Starts to send the replicas the rows of a group that this rank has updated."""
        from .distributed.zero2 import RowAllGather

        assert self._replicas is not None
        divided = [param for param in self._present[group] if param in self._divided]
        self._gathering.append(RowAllGather(divided, self._replicas.group))
        self._gathering[-1].launch()

    def wait(self) -> None:
        """Waits for what replicas send each other."""
        for rows in self._gathering:
            rows.wait()

    def _fetches(self, tensor: Tensor, key: str) -> list[Fetch]:
        """The fetch of a tensor of state, if it takes one."""
        is_residual = key == "weight_residual"
        part = as_int16(self._offload.current(tensor)) if is_residual else None
        return self._offload.fetches(tensor, part)

    def _key(self, group: int) -> tuple[str, int]:
        return "adamw", group

    def _rows_of(self, group: int) -> AdamWRows:
        options = self._groups[group]
        rows = AdamWRows([], [], [], [], [], [], [])
        for param in self._present[group]:
            weights, state, rounded_by = local(param), self._state[param], None
            if options.updates_in_fp32(param.dtype):
                rounded_by = self._rounding.of(param, options)
            clip = None if self._clipping is None else self._clipping.scale(param)
            if clip is not None:  # the devices differ for parameters in host memory only
                clip = clip.to(weights.device)
            if param in self._averaged:
                grad = self.means.result(self._averaged[param])
                if param in self._divided:
                    assert self._replicas is not None
                    ranks, rank = len(self._replicas.ranks), self._replicas.group.rank()
                    own = slice(*shard_interval(weights.shape[0], ranks, rank))
                    weights, clip = weights[own], None if clip is None else clip[own]
                    if isinstance(rounded_by, Noise):  # a residual is of these rows alone
                        rounded_by = rounded_by[own]
            elif param.grad is None:
                grad = torch.zeros_like(weights)
            else:
                grad = local(param.grad)
            rows.rounded_by.append(rounded_by)
            rows.params.append(weights)
            rows.grads.append(grad.to(weights.dtype) if rounded_by is None else grad)
            rows.exp_avgs.append(self._offload.current(state["exp_avg"]))
            rows.exp_avg_sqs.append(self._offload.current(state["exp_avg_sq"]))
            rows.steps.append(state["step"])
            rows.clip.append(clip)
        return rows


def _update(rows: AdamWRows, options: Group) -> None:
    """Updates rows, in fp32 those that are rounded by something, and clips them."""
    in_fp32 = [by is not None for by in rows.rounded_by]
    others = rows.only([not wide for wide in in_fp32]) if any(in_fp32) else rows
    if others.params:
        _update_as_they_are(others, options)
    rows_in_fp32: Any = rows.only(in_fp32)
    devices = {param.device for param in rows_in_fp32.params}
    fetches = [[Fetch(param, param.device, True)] for param in rows_in_fp32.params]
    for _, pieces in fill_windows(fetches, dict.fromkeys(devices, FP32_WINDOW_BYTES)):
        part = rows_in_fp32.in_window([(piece, ()) for piece in pieces])
        exact = widen(part.params, part.rounded_by)
        grads = [grad.to(torch.float32) for grad in part.grads]
        _update_as_they_are(replace(part, params=exact, grads=grads), options)
        round_into(exact, part.params, part.rounded_by)
    clip_weights(rows.params, rows.clip, rounded_by=rows.rounded_by)


def _update_as_they_are(rows: AdamWRows, options: Group) -> None:
    """Updates rows by torch's functional, those that its fused kernel takes and the others."""
    kinds: dict[tuple[bool, bool], list[bool]] = {}
    for number, param in enumerate(rows.params):
        # No graph captures what CPUs do, and torch's loop refuses to be capturable there.
        capturable = options.capturable and param.device.type != "cpu"
        fused = is_fused(param, options) and _are_dense(
            param, rows.grads[number], rows.exp_avgs[number], rows.exp_avg_sqs[number]
        )
        chosen = kinds.setdefault((fused, capturable), [False] * len(rows.params))
        chosen[number] = True
    beta1, beta2 = options.adamw_betas
    for (fused, capturable), chosen in kinds.items():
        some = rows.only(chosen) if len(kinds) > 1 else rows
        adamw(
            some.params,
            some.grads,
            some.exp_avgs,
            some.exp_avg_sqs,
            [],
            some.steps,
            foreach=False if fused else options.foreach,
            fused=fused,
            capturable=capturable,
            has_complex=any(param.is_complex() for param in some.params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=options.lr,
            weight_decay=options.weight_decay,
            eps=options.adamw_eps,
            maximize=options.maximize,
        )


def _are_dense(param: Tensor, *others: Tensor) -> bool:
    """Whether all tensors fill their memory in one order.

    torch's fused kernel takes their storages for flat arrays, and would write the wrong elements of
    any others.
    """
    shape, stride = param.shape, param.stride()
    return all(t.shape == shape and t.stride() == stride for t in others) and is_dense(param)
