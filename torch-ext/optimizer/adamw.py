"""AdamW of the parameters that are not Muon's, by torch's own fused or foreach functional."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from .core import is_dense, takes_part
from .cpu_offload import Carrier, CPUOffload, Lent, Share
from .distributed.layout import shard
from .distributed.replicas import Replicas
from .distributed.utils import is_dtensor, local
from .distributed.zero2 import MeanGradients, RowGathering, gather_rows, is_divided
from .options import Group

# Devices whose fused kernel keeps `step` beside the parameter.
FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def is_fused(param: Tensor, options: Group) -> bool:
    """Whether this parameter takes torch's fused kernel; ``foreach`` given either way means no."""
    return (
        options["foreach"] is None
        and param.device.type in FUSED_DEVICES
        and torch.is_floating_point(param)
    )


def init_step(param: Tensor, state: MutableMapping[str, Tensor], options: Group) -> None:
    """Adds ``step``, () in fp32, where it is missing, and moves it to where its kernel reads it."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    on_device = options["capturable"] or is_fused(param, options)
    device = local(param).device if on_device else torch.device("cpu")
    if state["step"].device != device:
        state["step"] = state["step"].to(device)


class Updates:
    """AdamW's share of a step, in parts: more than one where state is carried from the host.

    Args:
        groups: all of them; Muon's are passed over.
        state: of each parameter.
        replicas: those that average gradients and divide the work, in ZeRO-2.
        offload: where the state lives.
        carrier: what brings it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: Mapping[Tensor, MutableMapping[str, Tensor]],
        replicas: Optional[Replicas],
        offload: CPUOffload,
        carrier: Carrier,
    ):
        self._groups = [group for group in groups if not group["use_muon"]]
        self._present = [[p for p in g["params"] if takes_part(p, g)] for g in self._groups]
        self._state = state
        self._replicas = replicas
        self._here = offload.here
        self._carrier = carrier
        self._gathering: list[RowGathering] = []
        self._keys = [("adamw", number) for number in range(len(self._groups))]
        for key, params in zip(self._keys, self._present):
            if not carrier.is_prepared:
                moments = [(state[p]["exp_avg"], state[p]["exp_avg_sq"]) for p in params]
                carrier.cut(key, [[*offload.loan(m), *offload.loan(v)] for m, v in moments])

    def part_bytes(self) -> list[int]:
        """Of the moments that each part uses."""
        return [n for key in self._keys for n in self._carrier.portion_bytes(key)]

    def announce(self) -> Iterator[None]:
        """Announces, part by part, what `run` is going to need."""
        for key in self._keys:
            for part in range(len(self._carrier.portion_bytes(key))):
                self._carrier.announce(key, part)
                yield

    def run(self) -> Iterator[None]:
        """Updates the parameters, part by part; alike on all replicas."""
        mean = self._mean_gradients() if self._replicas is not None else None
        for key, params, group in zip(self._keys, self._present, self._groups):
            rows, divided = _rows(params, self._state, mean, self._replicas, self._here)
            yield from _update(rows, group, self._carrier.portions(key, len(rows)))
            _bump_versions(params)
            if self._replicas is not None:
                self._gathering.append(gather_rows(divided, self._replicas.group))

    def wait(self) -> None:
        """Waits for what replicas send each other."""
        for rows in self._gathering:
            rows.wait()

    def _mean_gradients(self) -> Callable[[Tensor], Tensor]:
        assert self._replicas is not None
        plain = [p for params in self._present for p in params if not is_dtensor(p)]
        number = {p: index for index, p in enumerate(plain)}
        divided = [is_divided(p.shape, len(self._replicas.ranks)) for p in plain]
        means = MeanGradients(plain, divided, self._replicas.group)

        def mean(param: Tensor) -> Tensor:
            means.launch_through(number[param])
            return means.result(number[param])

        return mean


def update(
    params: Sequence[Tensor],
    state: Mapping[Tensor, MutableMapping[str, Tensor]],
    options: Group,
) -> None:
    """One AdamW step (Loshchilov & Hutter 2019, algorithm 2) of parameters that have a gradient.

    Works on the local shards of DTensors: AdamW is element-wise. Gradients are only read; with
    ``missing_grad="zero"`` an absent one counts as zeros.
    """
    present = [p for p in params if takes_part(p, options)]
    rows, _ = _rows(present, state)
    _update_at_once(rows, options)
    _bump_versions(present)


def update_rows(
    params: Sequence[Tensor],
    state: Mapping[Tensor, MutableMapping[str, Tensor]],
    options: Group,
    mean: Callable[[Tensor], Tensor],
    replicas: Replicas,
) -> RowGathering:
    """The same step of replicas, each rank of which updates its rows and gets the others'.

    Call it alike on all ranks, and ``wait()`` for what it returns. DTensors among the parameters
    are updated as by `update`, without traffic.

    Args:
        params: that take part, on all ranks.
        state: with moments that the same replicas divide, as `state.specs_of` says.
        mean: the mean gradient of a plain parameter: all of it, or this rank's rows where
            `is_divided` says so.
    """
    rows, divided = _rows(params, state, mean, replicas)
    _update_at_once(rows, options)
    _bump_versions(params)
    return gather_rows(divided, replicas.group)


def _rows(
    params: Sequence[Tensor],
    state: Mapping[Tensor, MutableMapping[str, Tensor]],
    mean: Optional[Callable[[Tensor], Tensor]] = None,
    replicas: Optional[Replicas] = None,
    here: Callable[[Tensor], Tensor] = local,
) -> tuple[list[_Row], list[Tensor]]:
    """What to update of each parameter, and those of which replicas update the rest."""
    rows, divided = [], []
    for p in params:
        if mean is None or replicas is None or is_dtensor(p):
            rows.append(_Row.of(local(p), p.grad, state[p], here))
        elif is_divided(p.shape, len(replicas.ranks)):
            interval = shard(p.shape[0], len(replicas.ranks), replicas.group.rank())
            rows.append(_Row.of(p.detach()[slice(*interval)], mean(p), state[p], here))
            divided.append(p)
        else:
            rows.append(_Row.of(p.detach(), mean(p), state[p], here))
    return rows, divided


def _update(
    rows: Sequence[_Row],
    options: Group,
    portions: Iterable[AbstractContextManager[Lent]],
) -> Iterator[None]:
    """Updates one portion of the rows after the other."""
    for portion in portions:
        with portion as lent, record_function("Muon.adamw"):
            _update_at_once([rows[share.row].part(share, of) for share, of in lent], options)
        yield


def _update_at_once(rows: Sequence[_Row], options: Group) -> None:
    beta1, beta2 = options["adamw_betas"]
    kinds: dict[tuple[bool, bool], list[_Row]] = {}
    for row in rows:
        # No graph captures what CPUs do, and torch's loop refuses to be capturable there.
        capturable = options["capturable"] and row.param.device.type != "cpu"
        kinds.setdefault((row.is_fused(options), capturable), []).append(row)
    for (fused, capturable), chosen in kinds.items():
        adamw(
            [row.param for row in chosen],
            [row.grad for row in chosen],
            [row.exp_avg for row in chosen],
            [row.exp_avg_sq for row in chosen],
            [],
            [row.step for row in chosen],
            foreach=False if fused else options["foreach"],
            fused=fused,
            capturable=capturable,
            has_complex=any(row.param.is_complex() for row in chosen),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=options["lr"],
            weight_decay=options["weight_decay"],
            eps=options["adamw_eps"],
            maximize=options["maximize"],
        )


def _bump_versions(params: Iterable[Tensor]) -> None:
    """A DTensor's counter is not its shard's, and torch's fused kernel leaves both alone."""
    for p in params:
        torch.autograd.graph.increment_version(p)


@dataclass(frozen=True)
class _Row:
    """The local tensors of one parameter's update: all of it, a shard, or its rows here."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @classmethod
    def of(
        cls,
        param: Tensor,
        grad: Optional[Tensor],
        state: Mapping[str, Tensor],
        here: Callable[[Tensor], Tensor],
    ) -> _Row:
        if grad is None:
            grad = torch.zeros_like(param)
        else:
            grad = local(grad).to(param.dtype)
        return cls(param, grad, here(state["exp_avg"]), here(state["exp_avg_sq"]), state["step"])

    def part(self, share: Share, moments: Sequence[Tensor]) -> _Row:
        """What a portion has of it; its moments on the device where they had to be brought."""
        if share.piece is None and not moments:
            return self
        index = () if share.piece is None else share.piece
        exp_avg, exp_avg_sq = moments or (self.exp_avg[index], self.exp_avg_sq[index])
        # Counted once: the last piece counts, the others count a copy.
        step = self.step if share.is_last else self.step.clone()
        return _Row(self.param[index], self.grad[index], exp_avg, exp_avg_sq, step)

    def is_fused(self, options: Group) -> bool:
        return is_fused(self.param, options) and self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether all tensors fill their memory in one order: torch's fused kernel takes their
        storages for flat arrays, and would write the wrong elements of any others."""
        tensors = (self.param, self.grad, self.exp_avg, self.exp_avg_sq)
        like = self.param.shape, self.param.stride()
        if any((t.shape, t.stride()) != like for t in tensors):
            return False
        return is_dense(self.param)
