"""Muon: orthogonalized momentum for the matrices of a model, AdamW for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import adamw, newton_schulz, options, validation
from .core import Matrices
from .distributed import agreement
from .distributed import utils as dtensors
from .groups import default_is_muon, get_default_muon_param_groups
from .options import GROUP_OPTIONS
from .pipeline import takes_part, update_chunk
from .planning import GroupPlan, facts_of, meshes_of, notes_of, plan_group

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]

logger = logging.getLogger(__name__)


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
        self._wide = options.OptimizerWide(
            debug=debug,
            warmup_step=warmup_step,
            chunk_size=chunk_size,
            use_distributed_muon=use_distributed_muon,
            comm_dtype=comm_dtype,
            consistency_check=consistency_check,
        )
        if clip_config is not None:
            raise NotImplementedError("clip_config: this version has no QK-Clip")
        self._wide.validate()
        defaults = {key: arguments[key] for key in GROUP_OPTIONS}
        options.settle_steps(defaults, given=not isinstance(ns_steps, options.DefaultSteps))
        self._forget_plans()
        super().__init__(validation.as_groups(params), defaults)

    # -- parameter groups ----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking all of it.

        Raises:
            ValueError: no ``use_muon``, wrong names, hyperparameters or parameters.
        """
        where = f"param_groups[{len(self.param_groups)}]"
        group = validation.normalize_group(param_group, where)
        options.settle_steps(group, given="ns_steps" in group)
        for key, default in self.defaults.items():
            group.setdefault(key, default)
        options.validate(self._read(group), where)
        plan_group(group, self._read(group), where, self._wide.chunk_size)
        validation.warn_of_overshoot(group, where)
        super().add_param_group(group)
        self._agreed = False

    def _read(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyperparameters of a group under the names used here."""
        return group

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
            update_chunk(chunk, plan.entries, params, self.state, hyper, self._wide.comm_dtype)
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
            for number, (group, plan) in enumerate(zip(self.param_groups, plans)):
                validation.check_gradients(group, f"param_groups[{number}]")
                validation.check_second_moments(plan.entries, group["params"], self.state)
        except Exception as found:
            error = found
        meshes = meshes_of(self.param_groups)
        if meshes and agreement.is_due(self._wide.consistency_check, self._agreed):
            hypers = [self._read(group) for group in self.param_groups]
            notes = notes_of(self.param_groups, hypers, plans, self._wide, error)
            problem = self._agreement.check(meshes, notes)
            if problem is not None and error is None:
                raise ValueError(problem)
        if error is not None:
            raise error
        self._agreed = True
        return plans

    def _plan(self) -> list[GroupPlan]:
        """The checked plan of each group, made anew where the facts it rests on have changed."""
        return [self._plan_group(number, group) for number, group in enumerate(self.param_groups)]

    def _plan_group(self, number: int, group: Mapping[str, Any]) -> GroupPlan:
        hyper, where = self._read(group), f"param_groups[{number}]"
        options.validate(hyper, where)
        cached = self._plans.get(number)
        if cached is not None and cached.facts == facts_of(group, hyper):
            return cached
        plan = plan_group(group, hyper, where, self._wide.chunk_size)
        if self._wide.debug:
            logger.info("%s: %d chunks of %d", where, len(plan.chunks), len(plan.entries))
        self._plans[number] = plan
        return plan

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
        validation.check_checkpoint(groups, self.defaults, state_dict, self._read)
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

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wide": self._wide}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans: dict[int, GroupPlan] = {}
        self._agreement = agreement.Agreement()
        self._agreed = False


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
