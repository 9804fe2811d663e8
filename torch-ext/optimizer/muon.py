"""Muon: orthogonalized momentum for the matrices of a model, AdamW for the rest."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from . import adamw, newton_schulz, options
from .core import Matrices, read_as_matrices, row_counts_for
from .distributed import agreement
from .distributed import utils as dtensors
from .distributed.plan import Chunk, Entry, plan_chunks
from .groups import default_is_muon, get_default_muon_param_groups, has_component
from .options import GROUP_OPTIONS
from .pipeline import takes_part, update_chunk

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]

logger = logging.getLogger(__name__)

_WRITE_THIS = (
    "Muon takes a list of parameter groups that say use_muon, for example "
    'Muon(get_default_muon_param_groups(model)), or Muon([{"params": matrices, "use_muon": True}, '
    '{"params": others, "use_muon": False}])'
)


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one parameter group; AdamW's has no entries and no chunks.

    Args:
        facts: what it was made from, to tell when it no longer holds.
        lines: its sharded parameters, one line each, for ranks to compare.
    """

    facts: tuple
    lines: list[str]
    entries: list[Entry]
    chunks: list[Chunk]


class Muon(torch.optim.Optimizer):
    r"""Muon for matrices (Jordan et al. 2024), AdamW for everything else.

    For each matrix W with gradient G, momentum buffer B and learning rate lr::

        B ← μB + G                         momentum_style="classical"; "ema": μB + (1 − μ)G
        U ← newton_schulz(G + μB)          Nesterov; without it, of B
        U ← U / sqrt(running mean of U²)   only with beta2, per row or column, norm preserved
        W ← W·(1 − lr·weight_decay) − lr·scale·U

    where scale is 0.2·sqrt(max(rows, cols)) by default, which makes learning rate and weight decay
    tuned for AdamW fit (Liu et al. 2025, arXiv:2502.16982).

    Args:
        params: parameter groups, dicts with ``params`` and ``use_muon``. A group with
            ``use_muon=True`` holds matrices and may hold their ``names``, in the same order; (name,
            parameter) pairs do too. Any hyperparameter below can be a key of a group.
        lr: learning rate, a number or a tensor of one element.
        momentum: μ.
        nesterov: whether to look ahead along the momentum.
        ns_steps: iterations of the orthogonalization.
        weight_decay: decoupled weight decay.
        adamw_betas, adamw_eps: AdamW's, in groups with ``use_muon=False``.
        none_grad: set ``p.grad`` of Muon's matrices to None once it was read, to save memory.
        debug: log plans as they are made.
        clip_config: QK-Clip; must be None in this version.
        warmup_step: chunks in flight ahead; without effect in this version, which gathers whole.
        chunk_size: matrices orthogonalized as one batch; −1 chooses by bytes.
        use_distributed_muon: the plain all-gather path for DTensors, which this version always
            takes.
        expert_keys: whole components of names of stacked experts ``(experts…, rows, cols)``; groups
            made with `get_default_muon_param_groups` bring their own.
        adjust_lr: update scale, ``"match_rms_adamw"`` 0.2·sqrt(max(rows, cols)), ``"original"``
            sqrt(max(1, rows/cols)), or ``"none"``.
        momentum_style: ``"classical"`` or ``"ema"``, see above.
        ns_coefficients: a name in `newton_schulz.FAMILIES` or the (a, b, c) of every iteration.
        ns_algorithm: ``"auto"`` or ``"standard"``.
        ns_norm: ``"frobenius"`` or ``"schatten4"``, how the input is normalized.
        ns_dtype: arithmetic of the iteration; None picks by device.
        ns_eps: added to the norm of the matrix scaled to a largest magnitude of 1.
        beta2: decay of the factored second moment; None turns it off.
        cautious: decay a weight only where the update moves it towards zero or not at all.
        decay_lr: decay by lr (``"base"``) or by lr·scale (``"adjusted"``).
        momentum_dtype: dtype of the momentum buffer; None is the gradient's.
        missing_grad: ``"raise"`` skips a matrix without gradient (and raises where other ranks have
            one), ``"zero"`` counts it as zeros.
        nonfinite: ``"skip"`` leaves a matrix whose gradient has Inf or NaN as it is.
        split: read one tensor as several matrices: rows of each block, or one number of rows for
            all, or a mapping from name patterns to either.
        flatten: read tensors of more than two dimensions as (dim 0, all the rest).
        maximize, capturable, foreach: as in torch.optim.
        comm_dtype: wire format of gathers; None is bf16. For all groups.
        consistency_check: how often ranks compare notes before a collective: every ``"step"``, once
            per ``"plan"``, or never (``"off"``). For all groups.

    Raises:
        ValueError: wrong input, with the parameter's name; nothing was changed.

    Example:
        >>> groups = get_default_muon_param_groups(model)
        >>> optimizer = Muon(groups, lr=1e-3, weight_decay=0.1)
        >>> loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: Any = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = GROUP_OPTIONS["ns_steps"].default,
        weight_decay: float = 0.1,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,
        clip_config: Optional[Mapping[str, Any]] = None,
        warmup_step: int = 5,
        chunk_size: int = -1,
        use_distributed_muon: bool = False,
        expert_keys: Optional[Sequence[str]] = None,
        *,
        adjust_lr: str = "match_rms_adamw",
        momentum_style: str = "classical",
        ns_coefficients: newton_schulz.Coefficients = "polar_express",
        ns_algorithm: str = "auto",
        ns_norm: str = "frobenius",
        ns_dtype: Optional[torch.dtype] = None,
        ns_eps: float = 1e-7,
        beta2: Optional[float] = None,
        cautious: bool = False,
        decay_lr: str = "base",
        momentum_dtype: Optional[torch.dtype] = None,
        missing_grad: str = "raise",
        nonfinite: str = "propagate",
        split: Any = None,
        flatten: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: Optional[bool] = None,
        comm_dtype: Optional[torch.dtype] = None,
        consistency_check: str = "step",
    ):
        arguments = dict(locals())
        self._optimizer_wide = OptimizerWide(
            debug=debug,
            warmup_step=warmup_step,
            chunk_size=chunk_size,
            use_distributed_muon=use_distributed_muon,
            comm_dtype=comm_dtype,
            consistency_check=consistency_check,
        )
        if clip_config is not None:
            raise NotImplementedError("clip_config: this version has no QK-Clip")
        self._optimizer_wide.validate()
        defaults = {key: arguments[key] for key in GROUP_OPTIONS}
        self._forget_plans()
        super().__init__(_as_groups(params), defaults)
        options.settle_steps(self.defaults)

    # -- parameter groups ----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking all of it.

        Raises:
            ValueError: no ``use_muon``, wrong names, hyperparameters or parameters.
        """
        where = f"param_groups[{len(self.param_groups)}]"
        group = _split_names(param_group, where)
        for key, default in self.defaults.items():
            group.setdefault(key, default)
        options.settle_steps(group)
        self._check_group(group, where)
        _warn_of_overshoot(group, where)
        super().add_param_group(group)
        self._agreed = False

    def _read(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyperparameters of a group under the names used here."""
        return group

    def _check_group(self, group: Mapping[str, Any], where: str) -> None:
        hyper = self._read(group)
        options.validate(hyper, where)
        params, names = group["params"], group.get("names")
        if names is not None and len(names) != len(params):
            raise ValueError(
                f"{where}: {len(names)} names for {len(params)} parameters; give one for each, "
                "in the same order"
            )
        if len({id(p) for p in params}) != len(params):
            raise ValueError(f"{where}: a parameter appears twice; tied weights belong in once")
        for index, param in enumerate(params):
            name = _name(group, index, where)
            _check_tensor(param, name, muon=group["use_muon"])
            if group["use_muon"]:
                self._matrices(group, index, where)

    def _matrices(self, group: Mapping[str, Any], index: int, where: str) -> Matrices:
        """How a parameter of a Muon group is read as matrices."""
        hyper = self._read(group)
        shape, names = group["params"][index].shape, group.get("names")
        keys, split, flatten = (hyper[key] for key in options.STRUCTURE)
        if names is None and (isinstance(split, Mapping) or (keys and len(shape) > 2)):
            needed_for = "a split by name patterns" if isinstance(split, Mapping) else "expert_keys"
            raise ValueError(
                f'{where}: {needed_for} needs names: give the group "names", one for each parameter'
            )
        name = names[index] if names is not None else None
        is_expert = len(shape) > 2 and name is not None and has_component(name, keys)
        try:
            return read_as_matrices(shape, is_expert, flatten, row_counts_for(name, split))
        except ValueError as error:
            raise ValueError(f"{_name(group, index, where)} {error}") from None

    # -- the step ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        closure: Optional[Callable[[], Any]] = None,
        qk_logits: Optional[Mapping[Any, Tensor]] = None,
    ) -> Any:
        """Updates all parameters once.

        Args:
            closure: re-evaluates the model and returns the loss.
            qk_logits: QK-Clip; must be None in this version.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: wrong gradients or hyperparameters; no parameter and no state was changed.
        """
        if qk_logits is not None:
            raise NotImplementedError("qk_logits: this version has no QK-Clip")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        plans = self._agree_on_plan()
        self._init_state(plans)
        for group, plan in zip(self.param_groups, plans):
            if group["use_muon"]:
                self._update_matrices(group, plan)
            else:
                adamw.update(group["params"], self.state, self._read(group))
        return loss

    def _update_matrices(self, group: Mapping[str, Any], plan: GroupPlan) -> None:
        hyper, params = self._read(group), group["params"]
        for chunk in plan.chunks:
            update_chunk(
                chunk, plan.entries, params, self.state, hyper, self._optimizer_wide.comm_dtype
            )
            for piece in chunk.pieces:
                param = params[piece.entry]
                if dtensors.is_dtensor(param) and takes_part(param, hyper):
                    torch.autograd.graph.increment_version(param)
                if hyper["none_grad"] and piece.last == param.shape[0]:
                    param.grad = None

    def _agree_on_plan(self) -> list[GroupPlan]:
        """The plan of each group; raises on all ranks alike, before anything was written."""
        error, plans = None, []
        try:
            plans = self._plan()
            self._check_gradients()
        except Exception as found:
            error = found
        wide = self._optimizer_wide
        check = "off" if not agreement.available() else wide.consistency_check
        if check == "step" or (check == "plan" and not self._agreed):
            problem = self._agreement.check(self._meshes(), self._notes(plans, error))
            if problem is not None and error is None:
                raise ValueError(problem)
        if error is not None:
            raise error
        self._agreed = True
        return plans

    def _meshes(self) -> set[agreement.Ranks]:
        ranks = (dtensors.ranks_of(p) for group in self.param_groups for p in group["params"])
        return {r for r in ranks if r is not None}

    def _notes(self, plans: list[GroupPlan], error: Optional[Exception]) -> agreement.Notes:
        """What all ranks have to share; a rank whose checks failed only says so."""
        if error is not None:
            return agreement.Notes([], [], str(error))
        lines, gradients = [repr(self._optimizer_wide)], []
        for number, (group, plan) in enumerate(zip(self.param_groups, plans)):
            hyper = self._read(group)
            values = {k: v for k, v in hyper.items() if k in GROUP_OPTIONS}
            values["lr"] = None if isinstance(hyper["lr"], Tensor) else hyper["lr"]
            lines += [f"param_groups[{number}]: {values}", *plan.lines]
            gradients += [
                entry.name
                for entry, param in zip(plan.entries, group["params"])
                if entry.sharded and takes_part(param, hyper)
            ]
        return agreement.Notes(lines, gradients, None)

    def _plan(self) -> list[GroupPlan]:
        """The checked plan of each group, made anew where the facts it rests on have changed."""
        return [self._plan_group(number, group) for number, group in enumerate(self.param_groups)]

    def _plan_group(self, number: int, group: Mapping[str, Any]) -> GroupPlan:
        hyper, params, where = self._read(group), group["params"], f"param_groups[{number}]"
        options.validate(hyper, where)
        facts = (
            [(p.shape, p.dtype, p.device, dtensors.layout_of(p)) for p in params],
            list(group.get("names") or ()),
            copy.deepcopy([hyper[key] for key in options.STRUCTURE]),
        )
        cached = self._plans.get(number)
        if cached is not None and cached.facts == facts:
            return cached
        self._check_group(group, where)
        entries = [
            Entry(
                name=_name(group, index, where),
                matrices=self._matrices(group, index, where),
                region=dtensors.region_of(param),
                sharded=dtensors.is_sharded(param),
                dtype=param.dtype,
                device=dtensors.local(param).device,
            )
            for index, param in enumerate(params if group["use_muon"] else ())
        ]
        lines = [
            f"{_name(group, i, where)}: {tuple(p.shape)} {p.dtype} {dtensors.describe(p)}"
            for i, p in enumerate(params)
            if dtensors.is_dtensor(p)
        ]
        chunks = plan_chunks(entries, self._optimizer_wide.chunk_size)
        plan = GroupPlan(facts, lines, entries, chunks)
        if self._optimizer_wide.debug:
            logger.info("%s: %d matrices in %d chunks", where, len(entries), len(plan.chunks))
        self._plans[number] = plan
        return plan

    def _check_gradients(self) -> None:
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    _check_gradient(param, group, index, f"param_groups[{number}]")

    # -- state ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _init_state(self, plans: Sequence[GroupPlan]) -> None:
        """Creates whatever state is missing, for all trainable parameters, on all ranks alike."""
        for group, plan in zip(self.param_groups, plans):
            hyper = self._read(group)
            for index, param in enumerate(group["params"]):
                if not param.requires_grad:
                    continue
                if group["use_muon"]:
                    _init_muon_state(param, self.state[param], plan.entries[index].matrices, hyper)
                else:
                    adamw.init_state(param, self.state[param], hyper)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, created if need be; ``names`` of groups are left out."""
        self._init_state(self._plan())
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            group.pop("names", None)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but momentum keeps its dtype, and missing group keys get defaults.

        Raises:
            ValueError: the checkpoint does not fit; nothing was loaded.
        """
        state_dict = {**state_dict, "state": _rename_moments(state_dict["state"])}
        groups = self.param_groups
        self._check_checkpoint(state_dict)
        super().load_state_dict(state_dict)
        for group, before, saved in zip(self.param_groups, groups, state_dict["param_groups"]):
            for key in ("names", "use_muon", *options.STRUCTURE):
                if key in before:
                    group[key] = before[key]
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            for param, saved_id in zip(group["params"], saved["params"]):
                for key in ("momentum_buffer", "second_momentum_buffer"):
                    value = state_dict["state"].get(saved_id, {}).get(key)
                    if value is not None:  # torch cast it to the parameter's dtype
                        self.state[param][key] = value.to(device=self.state[param][key].device)
        self._init_state(self._plan())

    def _check_checkpoint(self, state_dict: Mapping[str, Any]) -> None:
        for number, (group, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"])):
            where = f"param_groups[{number}]"
            if saved.get("use_muon", group["use_muon"]) != group["use_muon"]:
                raise ValueError(
                    f"{where} has use_muon={group['use_muon']} but the checkpoint's has "
                    f"{saved['use_muon']}: give the groups in the order they were saved in"
                )
            merged = {**self.defaults, **{k: v for k, v in saved.items() if k != "params"}}
            options.validate(self._read(merged), f"{where} of the checkpoint")
            for index, (param, saved_id) in enumerate(zip(group["params"], saved["params"])):
                for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                    value = state_dict["state"].get(saved_id, {}).get(key)
                    if value is not None and value.shape != param.shape:
                        raise ValueError(
                            f"{_name(group, index, where)} has shape {tuple(param.shape)} but its "
                            f"{key} in the checkpoint has {tuple(value.shape)}"
                        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_optimizer_wide": self._optimizer_wide}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans: dict[int, GroupPlan] = {}
        self._agreement = agreement.Agreement()
        self._agreed = False


@dataclass(frozen=True)
class OptimizerWide:
    """Options that hold for all groups; the constructor's arguments of these names."""

    debug: bool
    warmup_step: int
    chunk_size: int
    use_distributed_muon: bool
    comm_dtype: Optional[torch.dtype]
    consistency_check: str

    def validate(self) -> None:
        if self.comm_dtype not in (None, *options.FLOATING_DTYPES):
            raise ValueError(
                f"comm_dtype must be None or a floating dtype, found {self.comm_dtype}"
            )
        if self.consistency_check not in agreement.CHECKS:
            raise ValueError(
                f"consistency_check must be one of {agreement.CHECKS}, "
                f"found {self.consistency_check!r}"
            )
        if self.chunk_size != -1 and self.chunk_size < 1:
            raise ValueError(f"chunk_size must be −1 or at least 1, found {self.chunk_size}")
        if self.warmup_step < 0:
            raise ValueError(f"warmup_step must be at least 0, found {self.warmup_step}")


def _as_groups(params: Any) -> list[dict[str, Any]]:
    groups = [] if isinstance(params, (Tensor, dict)) else list(params)
    if isinstance(params, (Tensor, dict)) or not all(isinstance(g, dict) for g in groups):
        raise ValueError(_WRITE_THIS)
    return groups


def _split_names(param_group: Any, where: str) -> dict[str, Any]:
    """A copy of the group with a list of parameters, and ``names`` where they came as pairs."""
    if not isinstance(param_group, dict) or not isinstance(param_group.get("use_muon"), bool):
        raise ValueError(f"{where} does not say use_muon=True or False: {_WRITE_THIS}")
    group = dict(param_group)
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else params
    if isinstance(params, (set, frozenset)):
        raise ValueError(
            f"{where}: params is a set, whose order changes from run to run; use a list"
        )
    params = list(params)
    pairs = [p for p in params if isinstance(p, tuple)]
    if pairs and (len(pairs) != len(params) or "names" in group):
        raise ValueError(f"{where}: give all parameters as (name, parameter), or none, or names")
    if pairs:
        group["names"], params = [name for name, _ in pairs], [param for _, param in pairs]
    group["params"] = params
    return group


def _name(group: Mapping[str, Any], index: int, where: str) -> str:
    names = group.get("names")
    return names[index] if names is not None else f"{where}['params'][{index}]"


def _check_tensor(param: Any, name: str, muon: bool) -> None:
    if not isinstance(param, Tensor):
        raise ValueError(f"{name} is a {type(param).__name__}; an optimizer takes tensors")
    if param.layout != torch.strided:
        raise ValueError(f"{name} is sparse ({param.layout}); make it dense: .to_dense()")
    if muon and not param.is_floating_point():
        raise ValueError(
            f"{name} has dtype {param.dtype}; Muon takes real floating-point matrices, "
            "put it into a group with use_muon=False"
        )
    try:
        dtensors.check_placements(param)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _check_gradient(param: Tensor, group: Mapping[str, Any], index: int, where: str) -> None:
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        name = _name(group, index, where)
        raise ValueError(f"{name} has a sparse gradient ({grad.layout}); make the layer's dense")
    if dtensors.layout_of(param) != dtensors.layout_of(grad):
        name = _name(group, index, where)
        raise ValueError(
            f"{name} is {dtensors.describe(param)} but its gradient {dtensors.describe(grad)}; "
            "redistribute the gradient to the parameter's mesh and placements"
        )


def _init_muon_state(
    param: Tensor, state: dict[str, Tensor], matrices: Matrices, hyper: Mapping[str, Any]
) -> None:
    buffer = state.get("momentum_buffer")
    if buffer is None:
        dtype = hyper["momentum_dtype"] or (param.grad if param.grad is not None else param).dtype
        state["momentum_buffer"] = torch.zeros_like(
            param, dtype=dtype, memory_format=torch.preserve_format
        )
    elif hyper["momentum_dtype"] not in (None, buffer.dtype):
        state["momentum_buffer"] = buffer.to(hyper["momentum_dtype"])
    if hyper["beta2"] is not None and "second_momentum_buffer" not in state:
        state["second_momentum_buffer"] = torch.zeros(
            matrices.experts * matrices.long_sides,
            dtype=torch.float32,
            device=dtensors.local(param).device,
        )


def _rename_moments(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """AdamW's state under the names of torch.optim, whatever the checkpoint calls it."""
    names = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
    return {
        key: {names.get(k, k): v for k, v in state.items()} if isinstance(state, dict) else state
        for key, state in states.items()
    }


def _warn_of_overshoot(group: Mapping[str, Any], where: str) -> None:
    family, steps = group["ns_coefficients"], group["ns_steps"]
    largest = newton_schulz.overshoot(family, steps) if isinstance(family, str) else None
    if group["use_muon"] and largest is not None:
        warnings.warn(
            f"{where}: the first {steps} steps of {family!r} leave singular values up to "
            f"{largest:.2f}; use all {len(newton_schulz.FAMILIES[family].triples)} or 'quintic'",
            stacklevel=4,
        )
