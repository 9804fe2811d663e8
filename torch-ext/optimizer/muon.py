"""Muon: orthogonalized momentum for the matrices of a model, AdamW for the rest."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor, nn

from . import newton_schulz, pipeline, triton_kernels
from .async_utils import Event
from .cpu_offload import Backend, CPUOffload, Hooks
from .distributed import agreement
from .distributed import utils as dtensors
from .distributed.machine import Machine, memory_of
from .distributed.plan import EMPTY_PLAN, Plan
from .distributed.replicas import Replicas
from .parameters import options, validation
from .parameters.default_groups import default_is_muon, get_default_muon_param_groups
from .parameters.foreign_words import explains_unknown_arguments
from .parameters.options import GROUP_OPTIONS, SETTINGS, Group
from .parameters.survey import NO_SURVEY, Survey, entries_of, shared_with, survey_groups
from .qk_clip.logit_source import NO_STATS, Logits, LogitSource
from .state import checkpoints
from .state.integrity import Integrity
from .state.origin import in_words_of_this_package, names_source
from .state.rounding import Rounding
from .state.specs import check_state
from .state.store import StateStore
from .step.grad_scaler import Scaling, forget_where_it_raises, is_asked_by_lightning
from .step.kernel_trial import try_kernels
from .step.notes import take_notes
from .step.step import Prepared, Step

if TYPE_CHECKING:
    from .extras.audit import Audit
    from .extras.summary import Summary
    from .qk_clip.clip import Clipping, QKClip

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]

logger = logging.getLogger(__name__)


class Muon(torch.optim.Optimizer):
    r"""Muon for matrices (Jordan et al. 2024), AdamW for everything else.

    For each matrix W with gradient G, momentum buffer B and learning rate lr::

        B ← μB + G                         momentum_style="classical"; "ema": μB + (1 − μ)G
        U ← newton_schulz(G + μB)          with Nesterov; otherwise newton_schulz(B)
        U ← U / sqrt(running mean of U²)   only with beta2, per row or column, norm preserved
        W ← W·(1 − lr·weight_decay) − lr·scale·U

    where scale is 0.2·sqrt(max(rows, cols)) by default, which makes learning rate and weight decay
    tuned for AdamW fit (Liu et al. 2025, arXiv:2502.16982).

    U does not depend on the scale of gradients: where all of a run are multiplied by 2^k, matrices
    take the same steps to the bit, short of under- and overflow. A loss scale or
    ``clip_grad_norm_`` changes what one batch weighs in the momentum and roundings, no more.

    Args:
        params: parameter groups, dicts with ``params`` and ``use_muon``. A group with
            ``use_muon=True`` holds matrices and may hold their ``names``, in the same order; (name,
            parameter) pairs do too. Any hyperparameter below can be a key of a group.
        lr: learning rate, a number or a tensor of one element. Ranks compare numbers and tensors on
            the CPU; that of a tensor on a device is not compared, as reading it would wait.
        momentum: μ.
        nesterov: whether to look ahead along the momentum.
        ns_steps: iterations of the orthogonalization.
        weight_decay: decoupled weight decay.
        adamw_betas, adamw_eps: AdamW's, in groups with ``use_muon=False``.
        none_grad: set ``p.grad`` of Muon's matrices to None as soon as `step` has read it; not with
            ``capturable``. That frees memory within the step where gradients are tensors of their
            own; FSDP2's are views of one buffer for each module, of another stream's pool.
            AdamW's gradients stay. Behind a step, a gradient norm is therefore that of AdamW's
            parameters alone, ``zero_grad(set_to_none=False)`` finds None, and without any
            ``zero_grad`` only AdamW's gradients add up. False leaves all gradients where they are.
        debug: log a `summary` whenever there is something new to plan, at level INFO.
        clip_config: QK-Clip: ``{"head_dim": 128, "threshold": 100}`` rescales query and key
            projections of heads whose largest attention logit, as given to `step`, was above the
            threshold. Further keys: ``q_indices`` and ``k_indices``, the heads that each logit
            scales; of multi-head latent attention ``is_mla=True``, ``qk_nope_head_dim``,
            ``qk_rope_head_dim`` and ``v_head_dim``; ``row_map`` for fused projections and for other
            names than wq, q_proj, … Where layers differ, a mapping from layers (numbers, or the
            beginnings of names) to such dicts or None, or a function of a layer. docs/qk-clip.md
            has all of it.
        warmup_step: how many chunks of matrices may be on their way beside the one at work, where
            the bound on staging memory (docs/layouts.md) lets them.
        chunk_size: matrices that a rank orthogonalizes per chunk; −1 chooses by bytes.
        use_distributed_muon: every rank gathers and orthogonalizes every matrix of a DTensor, as a
            reference; otherwise one rank does.
        expert_keys: whole components of names of stacked experts ``(experts…, rows, cols)``; groups
            made with `get_default_muon_param_groups` bring their own.
        adjust_lr: update scale, ``"match_rms_adamw"`` 0.2·sqrt(max(rows, cols)), ``"original"``
            sqrt(max(1, rows/cols)), ``"spectral"`` sqrt(rows/cols), or ``"none"``.
        momentum_style: ``"classical"`` or ``"ema"``, see above.
        ns_coefficients: a name in `newton_schulz.FAMILIES`, one (a, b, c) for all iterations, or a
            list of those of each iteration, which sets ``ns_steps``.
        ns_algorithm: ``"standard"``; ``"gram"``, which iterates on matrices of the shorter side
            alone and touches the whole ones a few times; ``"auto"``, what is faster for the
            shape (`newton_schulz.forms`): `summary` tells what was taken, and why; or
            ``"auto_one_restart"``, for which the Gram form restarts only once, as its authors have
            it, in fp16: fewer FLOPs, and less exact (docs/accuracy.md).
        ns_norm: ``"frobenius"`` or ``"schatten4"``, how the input is normalized.
        ns_dtype: arithmetic of the iteration; None is fp16 on accelerators, bf16 on CPUs with
            instructions for it, else fp32, and fp64 for fp64 weights. Given as fp32 or fp64, with
            ``comm_dtype``, it makes steps exact: the same bits on every layout.
        ns_eps: added to the norm of the matrix scaled to a largest magnitude of 1.
        ns_eps_absolute: added to the norm itself, as the sources of `presets` have it, so that
            smaller gradients make smaller updates; None is 0.
        ns_norm_factor: what the norm is multiplied with; None is the family's: 1.02 of Polar
            Express, 1 of others.
        ns_equilibrate: first scale each row of a matrix, as it is stored, to the mean norm of its
            rows (MuonEq, arXiv:2603.28254). Not with ``owners_per_matrix``.
        ns_renormalize: scale U to the Frobenius norm sqrt(min(rows, cols)) (Muon+,
            arXiv:2602.21545). Not with ``owners_per_matrix``.
        beta2: decay of the factored second moment; None turns it off.
        second_moment_side: it has a number for each index of a matrix's ``"longer"`` side, or of
            its ``"rows"`` whatever its shape.
        cautious: decay a weight only where the update moves it towards zero or not at all.
        decay_lr: decay by lr (``"base"``) or by lr·scale (``"adjusted"``).
        momentum_dtype: dtype of the momentum buffer; None is the gradient's, and fp32 where
            ``weight_rounding`` has weights updated in fp32.
        weight_rounding: how updated weights in bf16 are rounded, Muon's and AdamW's:
            ``"nearest"``, which loses all of an update smaller than 2^-9 of a weight; ``"exact"``,
            with 16 more bits of each weight as state, so that steps are those of fp32 weights; or
            ``"stochastic"``, at random, so that updates count on average (docs/accuracy.md). Of
            other dtypes it changes nothing; fp16 is refused.
        rounding_seed: for ``"stochastic"``: a weight's random numbers depend on it, on the name of
            the parameter, on the weight's place in it and on how many steps there were.
        missing_grad: ``"raise"`` raises where only some ranks have a gradient, and skips a matrix
            that has none on any; ``"zero"`` counts absent gradients as zeros. Replicas with already
            averaged gradients must still all have one, or none.
        nonfinite: ``"skip"`` leaves a matrix as it is whose gradient has Inf or NaN, or whose fp16
            momentum would have it.
        split: read one tensor as several matrices: rows of each block, one number of rows for all,
            the notation of axes, as in ``"(group (q=512 + k=128 + v=128)) dim"`` (docs/options.md),
            or a mapping from name patterns to any of these.
        flatten: read tensors of more than two dimensions as (dim 0, all the rest).
        maximize, foreach: as in torch.optim.
        capturable: as in torch.optim, the step may be captured in a CUDA graph: gradients stay
            where they are, whatever ``none_grad`` says. Only without traffic between ranks and
            without CPU offload.
        comm_dtype: format in which momentum and updates travel between ranks; None is that of the
            arithmetic, but bf16 for fp32. fp16 travels with a scale per rank and matrix. For all
            groups.
        consistency_check: how often ranks compare notes before a collective: every ``"step"``;
            ``"plan"``, in the first step and after parameters or options that all of them share
            have changed, which missing gradients do not; or never (``"off"``). For all groups.
        hsdp: what replicas of DTensors do: ``"redundant"``, each orthogonalizes every matrix;
            ``"spread"``, they share the work and send each other the updates; ``"auto"``, what
            is faster by an estimate (`distributed.hsdp`). For all groups.
        clip_mode: of a key head that several query heads read: ``"shared"``, it and each query head
            take half of the strongest, and of its own, clip (as logarithms); ``"exact"``, the query
            heads make up for it, so that each logit is scaled by its own clip and no more.
        machine: the speeds by which each ``"auto"`` estimates, a `Machine`; None takes those of the
            device type in `distributed.machine.MACHINES`. For all groups.
        staging_bytes: the most memory that matrices on their way between ranks may take on a rank,
            where one chunk of them fits; None is 10 % of an accelerator's memory, and on CPUs a few
            times that of the local weights (docs/layouts.md). For all groups.
        owners_per_matrix: how many ranks orthogonalize a matrix together where it is sharded, each
            a slice of its longer side: for more ranks than matrices (docs/layouts.md). ``"auto"``
            is 1, 2, 4 or 8, what is fastest by an estimate. Not with ``beta2``, in exact mode or
            with ``use_distributed_muon``. For all groups.
        process_group: ranks that all hold the same plain parameters. They divide Muon's work and
            its momentum, which becomes a DTensor, ``Shard(0)``. Also a mesh of one dimension.
            Not pickled: set `process_group` again. ``torch.distributed.group.WORLD`` is None before
            ``init_process_group``, which is refused under torchrun. For all groups.
        grad_reduce: None where gradients are averaged already, as under DDP; ``"mean"`` averages
            them over ``process_group`` within the step, and divides AdamW's state too (ZeRO-2).

    Raises:
        ValueError: wrong input, with the parameter's name; nothing was changed.
        TypeError: an unknown argument, with what to write instead.

    Example:
        >>> groups = get_default_muon_param_groups(model)
        >>> optimizer = Muon(groups, lr=1e-3, weight_decay=0.1)
        >>> loss.backward()
        >>> optimizer.step()
    """

    _survey: Survey  # the latest
    _agreed: Survey  # the one that ranks last agreed on
    _compared: bool  # whether replicas have compared what they hold
    _warned: bool  # whether a step without gradients was warned of
    _prepared: Optional[Prepared]  # tensors that the last step has prepared
    _tried: Optional[Plan]  # whose kernels were tried last
    _last: tuple[Plan, tuple[Event, ...]]  # plan and schedule of the last step
    _untrained: int  # how many steps, up to the last one, had gradients for AdamW alone
    _checked_keys: dict[int, set[Any]]  # of each group, as `_check_keys` last found them

    @explains_unknown_arguments(options.ARGUMENTS)
    @dtensors.refuses_groups_before_init("process_group")
    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: Any = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = options.DefaultSteps(5),
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
        ns_eps_absolute: Optional[float] = None,
        ns_norm_factor: Optional[float] = None,
        ns_equilibrate: bool = False,
        ns_renormalize: bool = False,
        beta2: Optional[float] = None,
        second_moment_side: str = "longer",
        cautious: bool = False,
        decay_lr: str = "base",
        momentum_dtype: Optional[torch.dtype] = None,
        weight_rounding: str = "nearest",
        rounding_seed: int = 0,
        missing_grad: str = "raise",
        nonfinite: str = "propagate",
        split: Any = None,
        flatten: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: Optional[bool] = None,
        comm_dtype: Optional[torch.dtype] = None,
        consistency_check: str = "step",
        hsdp: str = "auto",
        machine: Optional[Machine] = None,
        staging_bytes: Optional[int] = None,
        owners_per_matrix: Union[int, str] = 1,
        process_group: Any = None,
        grad_reduce: Optional[str] = None,
        clip_mode: str = "shared",
    ):
        arguments = dict(locals())
        if process_group is not None:
            arguments["process_group"] = Replicas(process_group)
        self._settings = options.Settings(**{key: arguments[key] for key in SETTINGS})
        self._settings.validate()
        clip = _make_clip(clip_config, clip_mode)
        defaults = {key: arguments[key] for key in GROUP_OPTIONS}
        options.settle_steps(defaults, not isinstance(ns_steps, options.DefaultSteps))
        self._names: list[Optional[list[str]]] = []
        self._offload = CPUOffload()
        self._store = StateStore(self._offload)
        self._rounding = Rounding(self._offload)
        self._integrity = Integrity()
        self._logits = LogitSource()
        self._audit: Optional[Audit] = None
        self._clip: Optional[QKClip] = None  # while groups are added: a layer may be in several
        self._forget_plans()
        super().__init__(validation.as_groups(params), defaults)
        groups = self._read_groups()
        if clip is not None:
            clip.check_and_warn(groups)
        self._clip = clip
        self._registration = agreement.Registration(self._sets)
        validation.warn_about_unmatched_split(split, groups)
        validation.warn_about_unread_experts(groups)

    # -- parameter groups ----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after checking all of it.

        Raises:
            ValueError: no ``use_muon``, wrong names, hyperparameters or parameters.
        """
        where = f"param_groups[{len(self.param_groups)}]"
        group = validation.normalize_group(param_group, where)
        validation.check_keys(group, self._defaults_of(group), where)
        options.settle_steps(group, "ns_steps" in group)
        group = {"names": None, **self._defaults_of(group), **group}
        group_view = self._translate({**group, "where": where})
        group_view.validate()
        if group_view.weight_rounding == "stochastic":  # else no checkpoint's would be looked for
            group.setdefault("rounding_step", 0)
        entries_of(group_view, len(self.param_groups), self._settings)  # checks them
        validation.check_unshared(group_view, self.param_groups)
        if self._clip is not None:
            self._clip.find([*self._read_groups(), group_view])  # checks them
        validation.warn_about_overshoot(group_view)
        names = group.pop("names")
        # torch wants param_names in all groups or in none. Here they may be in some: hide them.
        hidden = [shown.pop("param_names", None) for shown in (*self.param_groups, group)]
        try:
            super().add_param_group(group)
            self._names.append(names)
        finally:
            for shown, param_names in zip((*self.param_groups, group), hidden):
                if param_names is not None:
                    shown["param_names"] = param_names

    @property
    def names(self) -> list[Optional[list[str]]]:
        """For each group the names of its parameters, in order, or None.

        They are no group keys: torch.distributed.checkpoint would look for them in checkpoints.
        ``param_names``, torch's own key, stays in the groups that were given it.
        """
        return [view.names for view in self._read_groups()]

    def _read_groups(self) -> list[Group]:
        """What the rest of the package reads of each group, made anew from the group as it is."""
        if len(self._names) != len(self.param_groups):
            raise ValueError(
                f"there are {len(self.param_groups)} param_groups where {len(self._names)} were "
                "added: use add_param_group, and a new optimizer to leave groups out"
            )
        for number, group in enumerate(self.param_groups):
            if "names" in group:  # set on the group after construction
                self._names[number] = group.pop("names")
                if "param_names" in group:
                    group["param_names"] = self._names[number]
            elif "param_names" in group:
                self._names[number] = group["param_names"]
        return [
            self._translate({**group, "names": names, "where": f"param_groups[{number}]"})
            for number, (group, names) in enumerate(zip(self.param_groups, self._names))
        ]

    def _translate(self, group: dict[str, Any]) -> Group:
        """The view of a group; subclasses whose groups have other keys rename these first."""
        group.setdefault("rounding_step", 0)
        return Group(**{key: group[key] for key in Group.__dataclass_fields__})

    def _defaults_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What keys missing from a group are set to."""
        return {key: self.defaults[key] for key in GROUP_OPTIONS}

    @property
    def process_group(self) -> Any:
        """The ranks of replicated parameters; set it again after unpickling."""
        replicas = self._settings.process_group
        return None if replicas is None else replicas.group

    @process_group.setter
    @dtensors.refuses_groups_before_init("process_group")
    def process_group(self, process_group: Any) -> None:
        replicas = None if process_group is None else Replicas(process_group)
        self._settings = dataclasses.replace(self._settings, process_group=replicas)
        self._forget_plans()

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
            qk_logits: for QK-Clip, of each layer the largest attention logit of each query head in
                this step's forward, (heads,), or of each entry of ``q_indices``; on the weights'
                device, or the CPU. Layers are told by number, or by the FQN of their attention.
                Of ranks that share the weights and pass different logits, the maximum counts. A
                rank that has seen nothing of a layer passes None. Heads with Inf or NaN are left
                alone, and counted. Without ``qk_logits`` the step takes what `set_qk_logits`
                was given, else what `qk_recorder` has recorded, else it clips nothing.

        Returns:
            What the closure returned, or None.

        Under a `torch.amp.GradScaler` it unscales gradients in place unless that was done before,
        and does nothing where any rank that shares parameters with this one found Inf or NaN.

        Raises:
            ValueError: wrong gradients, hyperparameters or logits; no parameter and no state was
                changed.
            RuntimeError: this step or an earlier one failed after it had begun to write, or when
                other ranks may have: nothing goes on before a checkpoint is loaded. An error before
                that is raised as it is.
        """
        loss, error = None, None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
        except BaseException as raised:  # again, once the other ranks know
            error = raised
        self._update(error, qk_logits)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler then calls every step, and says which to skip."""
        return not is_asked_by_lightning()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """The step with its hooks: where one raises, nothing of what a GradScaler said is kept."""
        return forget_where_it_raises(torch.optim.Optimizer.profile_hook_step(func))

    @torch._disable_dynamo  # a compiled step() is this one, called from compiled code
    @torch.inference_mode(False)  # what a step makes may outlive it, and be changed outside of it
    @torch.no_grad()
    def _update(self, error: Optional[BaseException], qk_logits: Optional[Logits]) -> None:
        scaling = Scaling(self)
        step: Optional[Step] = None

        def has_begun(raised: BaseException) -> bool:
            if step is not None and not isinstance(raised, Exception):
                return True  # an interrupt comes between any two lines
            if step is not None and (step.has_written or step.gradients.has_released):
                return True
            # Where other ranks may go they write, even if this one fails.
            return scaling.has_unscaled or self._agreement.may_go

        with self._integrity.changing("step()", has_begun):
            step = self._prepare(error, qk_logits, scaling)
            if step is None:
                return
            if not self._store.is_checked:
                self._store.create_missing(
                    self.state, step.groups, self._survey.entries, self._settings
                )
                self._store.mark_checked(
                    self.state, (p for group in step.groups for p in group.params)
                )
            self._rounding.begin(step.groups, self.state)
            with step, triton_kernels.off(self._agreement.lacks_kernels):
                scaling.unscale(step.groups)
                pipeline.run(step)
            self._rounding.end()
            for group in self.param_groups:
                if group["weight_rounding"] == "stochastic":
                    group["rounding_step"] = group.get("rounding_step", 0) + 1
            self._prepared = None if self._offload.has_state else step.prepared
            self._last = step.plan, step.prepared.schedule
            self._agreement.steps += 1

    def _prepare(
        self, error: Optional[BaseException], qk_logits: Optional[Logits], scaling: Scaling
    ) -> Optional[Step]:
        """A step, all of it checked; raises on all ranks alike, before anything was written.

        Args:
            error: what kept this rank from getting this far.
            qk_logits: as given to the step.
            scaling: what a GradScaler says.

        Returns:
            None where ranks skip the step.
        """
        self._agreement.begin()
        if self._settings.memory is None:
            memory: Optional[float] = None
            try:
                memory = self._least_memory()
            except (RuntimeError, ValueError):
                if error is None:
                    raise
            if memory is None and error is not None:  # which is the cause, or says more
                raise error
            self._settings = dataclasses.replace(self._settings, memory=memory)
        lacked_kernels, no_kernels = self._agreement.lacks_kernels, None
        try:
            if error is None:
                self._integrity.check()
                groups, plan, absent = self._plan()
                scaling.check(groups)
                # torch.distributed.checkpoint steps with lr=0 to have state, which changes nothing.
                is_dry = not self.state and all(_is_zero(group.lr) for group in groups)
                clipping = self._begin_clipping(qk_logits, groups, is_dry)
                if plan is not self._tried and not self._agreement.lacks_kernels:
                    no_kernels = try_kernels(plan, groups)
                    self._tried = plan if no_kernels is None else None
        except BaseException as raised:
            error = raised
        survey = self._survey
        sets = self._sets() if error is not None else self._with_replicas(set(survey.shared))

        def notes() -> Mapping[agreement.Ranks, agreement.StepNotes]:
            clip_lines = clipping.notes if clipping else {}
            return take_notes(
                groups, survey, plan, absent, self._settings, clip_lines, self._identify
            )

        skips = self._agreement.decide(
            self._settings.consistency_check,
            {ranks: (shared, self._settings.streams) for ranks, shared in survey.shared.items()},
            sets,
            notes,
            error,
            scaling.skips,
            no_kernels,
        )
        if self._agreement.lacks_kernels and not lacked_kernels:
            triton_kernels.warn_of_doing_without(no_kernels or "another rank can't launch them")
        if survey is not self._agreed:
            self._agreed = survey
            params = (param for group in groups for param in group.params)
            self._store.drop_unused(self.state, params)
        if skips:
            return None
        if self._agreement.has_compared and not self._compared:
            self._compare_replicas(groups)
            self._compared = True
        self._warned = self._warned or validation.warn_about_no_gradients(groups)
        self._untrained = validation.warn_about_untrained_matrices(groups, self._untrained)
        return Step(
            plan,
            groups,
            absent,
            self.state,
            self._settings,
            self._offload,
            self._rounding,
            clipping,
            self._prepared,
            None if is_dry or self._audit is None or not self._audit.is_on else self._audit,
        )

    def _begin_clipping(
        self, qk_logits: Optional[Logits], groups: list[Group], is_dry: bool
    ) -> Optional[Clipping]:
        logits, is_recorded = self._logits.take(qk_logits)
        if self._clip is not None:
            only_with_gradient = is_dry and qk_logits is None
            context = groups, self._survey, self._settings
            return self._clip.begin(logits, is_recorded, *context, is_dry, only_with_gradient)
        if logits is not None:
            raise ValueError(
                "step() got qk_logits, but the optimizer has no clip_config that says how to bound "
                'them: Muon(..., clip_config={"head_dim": 128, "threshold": 100})'
            )
        return None

    def _sets(self) -> set[agreement.Ranks]:
        """The sets of ranks that share parameters with this one."""
        params = (param for group in self.param_groups for param in group["params"])
        sets = {shared_with(param, self._settings) for param in params}
        return self._with_replicas({ranks for ranks in sets if ranks is not None})

    def _with_replicas(self, sets: set[agreement.Ranks]) -> set[agreement.Ranks]:
        """The sets, and the ranks of the process group: these may share parameters that this rank
        does not have."""
        replicas = self._settings.replicas
        return sets if replicas is None else {*sets, replicas}

    def _least_memory(self) -> float:
        """Bytes of memory that the plan may count on, the same on all ranks that step together."""
        machine = self._settings.machine
        params = (param for group in self.param_groups for param in group["params"])
        devices = {dtensors.compute_device(param) for param in params}
        memory = machine.memory if machine is not None else min(map(memory_of, devices), default=0)
        how_often = self._settings.consistency_check
        return self._agreement.least_memory(how_often, self._sets(), memory)

    def _identify(self, ranks: agreement.Ranks) -> str:
        """Tells this optimizer from others that these ranks share, and this step from others."""
        number = self._registration.number(ranks)
        return f"the one made behind {number} others, {self._agreement.steps} steps made"

    def _compare_replicas(self, groups: list[Group]) -> None:
        """Checks, before a first step, that ranks hold equal plain parameters and gradients, and
        each its own part of their state; raises ValueError."""
        replicas = self._settings.process_group
        if replicas is None:
            return
        plain = [
            (name, param, self._divided_state(param))
            for group, names in zip(groups, self._survey.names)
            for name, param in zip(names, group.params)
            if param.requires_grad and not dtensors.is_dtensor(param)
        ]
        problem = replicas.difference(plain, averaged=self._settings.divided is None)
        if problem is not None:  # the same on all of them
            self._agreement.revoke()
            raise ValueError(problem)

    def _divided_state(self, param: Tensor) -> Optional[Tensor]:
        """What this rank holds of a plain parameter's momentum, where replicas divide it."""
        for key in ("momentum_buffer", "exp_avg"):
            value = self.state.get(param, {}).get(key)
            if dtensors.is_dtensor(value) and value.placements[0].is_shard():
                return dtensors.local(value)
        return None

    def _plan(self) -> tuple[list[Group], Plan, set[int]]:
        """Groups, checked, the plan of the step, and which of its entries take no part in it."""
        self._settings.validate()
        groups = self._read_groups()
        survey = self._take_survey(groups)
        validation.check_not_replaced(groups)
        self._store.recheck_replaced(self.state)
        for group, entries in zip(groups, survey.entries):
            validation.check_gradients(group)
            if not self._store.is_checked:
                check_state(group, entries, self.state, self._settings)
        planner = survey.planner(groups, self._settings)
        absent = {
            number
            for number, entry in enumerate(planner.entries)
            if not groups[entry.group].takes_part(groups[entry.group].params[entry.index])
        }
        plan = planner.plan(frozenset(absent))
        validation.check_capturable(groups, plan, self._settings, self._offload.destination)
        return groups, plan, absent

    def _take_survey(self, groups: list[Group]) -> Survey:
        """Checks the groups, and keeps their survey."""
        survey = self._survey_of(groups)
        if survey is not self._survey:
            self._survey = survey
            self._forget_tensors()
            if self._settings.debug:
                logger.info("planned:\n%s", self._summarize(groups, survey))
        return survey

    def _survey_of(self, groups: list[Group]) -> Survey:
        for group in groups:
            group.validate()
        self._check_keys()
        params = ((p, group.use_muon) for group in groups for p in group.params)
        streams = self.cpu_offload == "stream" and self._offload.can_offload(params)
        if streams is not self._settings.streams:  # fewer chunks are begun ahead
            self._settings = dataclasses.replace(self._settings, streams=streams)
        return survey_groups(groups, self._settings, self._survey)

    def _check_keys(self) -> None:
        """Checks the keys of each group whose keys are others than at the last check."""
        for number, group in enumerate(self.param_groups):
            if group.keys() != self._checked_keys.get(number):
                where = f"param_groups[{number}]"
                validation.check_keys(group, self._defaults_of(group), where)
                self._checked_keys[number] = set(group)

    def summary(self, schedule: bool = False) -> Summary:
        """What a step does with every parameter, for a person to read: ``print(optim.summary())``.

        Made from the plan of a step in which all trainable parameters have a gradient, without
        talking to other ranks. `Summary.rows` and `Summary.totals` hold it as plain data.

        Args:
            schedule: add what this rank has done in the last step, event by event, in its order.
        """
        groups = self._read_groups()
        # The survey is not kept, as other ranks may not call this.
        summary = self._summarize(groups, self._survey_of(groups))
        if schedule:
            from .extras.summary import order_of

            return dataclasses.replace(summary, schedule=order_of(*self._last))
        return summary

    def _summarize(self, groups: list[Group], survey: Survey) -> Summary:
        from .extras.summary import summarize

        plan = survey.planner(groups, self._settings).plan()
        layers = () if self._clip is None else self._clip.find(groups)
        clipped = {id(projection.param) for la in layers for projection in la.projections}
        where = "with its parameters"
        params = [(param, group.use_muon) for group in groups for param in group.params]
        if self.cpu_offload is not None:
            where = f"in host memory, mode {self.cpu_offload!r}"
            if not self._offload.can_offload(params):
                where = "with its parameters: CPU offload is on, but they are on the CPU"
        return summarize(groups, survey, plan, self._settings, where, clipped)

    # -- audit ---------------------------------------------------------------------------------

    def audit(self, keep: int = 100) -> Audit:
        """Watches what steps do from now on: as a context, or until the ``stop()`` of the result.

        Only one audit watches, the last one.

        Args:
            keep: how many of the last steps to keep. Of each, the polar factor of one matrix stays
                in the memory of the device.

        Its ``report()``, to be called on all ranks, says for each matrix whether it had a gradient
        and who orthogonalized it, the singular values of a sample of updates, how large gradient,
        momentum and update were, and what rounding took away; and first of all what is wrong.

        Steps take the same bits, and a few norms and copies more; they wait for nothing.

        >>> with optimizer.audit() as audit:
        ...     for batch in batches:
        ...         train(batch)
        >>> print(audit.report())
        """
        from .extras.audit import Audit

        if self._audit is not None:
            self._audit.stop()
        self._audit = Audit(keep)
        return self._audit

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step that an `audit` has watched, for any logger; empty without one.

        Of what this rank holds: ``muon/gradient_norm``, ``muon/momentum_norm``,
        ``muon/weight_norm``, ``muon/change_over_weight``, ``muon/lost_by_rounding`` (of the
        update), ``muon/orthogonalized`` and ``muon/without_gradient`` (how many),
        ``muon/relative_rank`` (of the updates, over their shorter sides). Waits for the device, but
        for no other rank.
        """
        return {} if self._audit is None else self._audit.metrics()

    # -- QK-Clip -------------------------------------------------------------------------------

    def set_qk_logits(self, qk_logits: Optional[Mapping[Any, Any]]) -> None:
        """Gives the next `step` its ``qk_logits``, where a trainer calls it without arguments."""
        self._logits.next_logits = qk_logits

    @property
    def qk_recorder(self) -> Any:
        """What `step` takes its logits from: a `QKLogitRecorder`, or whatever has its ``take()``.

        Copies and pickles of the optimizer have none.
        """
        return self._logits.recorder

    @qk_recorder.setter
    def qk_recorder(self, recorder: Any) -> None:
        if recorder is not None and not callable(getattr(recorder, "take", None)):
            raise ValueError(f"qk_recorder must be a QKLogitRecorder or None, found {recorder!r}")
        self._logits.recorder = recorder

    def qk_clip_stats(self) -> dict[str, Any]:
        """What QK-Clip saw and did, as plain numbers. Makes the host wait for the device.

        Returns:
            Of the last step that had logits ``max_logit``, ``heads`` (how many logits there were),
            ``clipped`` and ``nonfinite`` (how many of them), and the same by layer in ``layers``,
            with ``max_logits``, where NaN shows as Inf; of all steps, ``steps`` that had logits,
            ``total_clipped`` and ``total_nonfinite``. Not in checkpoints.
        """
        return {**NO_STATS, "layers": {}} if self._clip is None else self._clip.stats()

    # -- state -----------------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Whether a `step` or a load has left some of weights and state behind the rest.

        `load_state_dict` mends it, beside weights of the same checkpoint.
        """
        return self._integrity.is_broken

    def _create_state(self, groups: list[Group]) -> None:
        entries = self._take_survey(groups).entries
        self._store.create_missing(self.state, groups, entries, self._settings)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with the state created if need be, and dtypes of options as text.

        torch.distributed.checkpoint takes no dtypes in full state dicts. Offloaded state is what is
        in host memory, which steps go on to change.

        Raises:
            RuntimeError: a `step` broke off, so that its state is of no use; see `discard_state`.
        """
        self._integrity.check(accept_void=True)
        groups = self._read_groups()
        self._create_state(groups)
        self._rounding.begin(groups, self.state)
        self._offload.flush()
        held = {id(param) for group in groups for param in group.params}
        params = [key for key in self.state if isinstance(key, Tensor)]  # others are the user's own
        swapped_out = {p: self.state.pop(p) for p in params if id(p) not in held}
        try:
            state_dict = super().state_dict()
        finally:
            self.state.update(swapped_out)
        for group in state_dict["param_groups"]:
            group.update({k: str(v) for k, v in group.items() if isinstance(v, torch.dtype)})
        return state_dict

    @torch.no_grad()
    def exact_weights(self) -> dict[str, Tensor]:
        """The weights of ``weight_rounding="exact"`` in fp32, by the names of their parameters.

        New tensors, placed as the parameters are. To be called on all ranks alike: where replicas
        divide AdamW's state, they send each other its rows.

        >>> state_dict = {**model.state_dict(), **optimizer.exact_weights()}
        """
        params = self._params_with_residuals()
        return {name: self._rounding.exact(param) for name, param in params.items()}

    @torch.no_grad()
    def load_exact_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and their residuals to weights in fp32, as `exact_weights` gives them.

        Not all have to be given. To be called behind `load_state_dict`, whose residuals would
        replace these.

        Raises:
            ValueError: a name that has no residual here, or a tensor that does not fit it; nothing
                was loaded.
        """
        params = self._params_with_residuals()
        for name, value in weights.items():
            validation.check_exact_weight(name, value, params.get(name))
        for name, value in weights.items():
            self._rounding.set_exact(params[name], value)

    def _params_with_residuals(self) -> dict[str, Tensor]:
        """Parameters by name whose state has a residual, which is that of the weight as it is."""
        self._integrity.check()
        groups = self._read_groups()
        self._create_state(groups)
        self._rounding.begin(groups, self.state)
        return {
            group.name_of(index): param
            for group in groups
            for index, param in enumerate(group.params)
            if param in self._rounding.residuals
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but momentum keeps its dtype, and missing group keys get defaults.

        How parameters are read as matrices (``expert_keys``, ``split``, ``flatten``) stays as
        constructed.

        Raises:
            ValueError: the checkpoint does not fit; nothing was loaded.
            RuntimeError: loading broke off after it had begun, and has to be repeated.
        """
        checkpoints.check_structure(state_dict, is_whole=False)
        loaded: dict[str, Any] = {}

        def check(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            checkpoints.check_structure(saved)
            if self._integrity.is_broken and not self._integrity.is_void:
                checkpoints.check_apart(saved["state"], self.state)
            states = checkpoints.normalize_state(saved["state"])
            with names_source(saved["param_groups"], self.param_groups):
                merged = self._check_saved(states, saved["param_groups"])
            loaded.update(saved, state=states, param_groups=merged)
            return {**loaded, "state": checkpoints.without_tensors(states, merged)}

        def restore(_: torch.optim.Optimizer) -> None:
            self._offload.clear()
            saved, states = loaded["param_groups"], loaded["state"]
            groups = self._read_groups()
            checkpoints.place_tensors(groups, self.state, saved, states, self._offload.state_device)
            self._create_state(groups)
            self._integrity.finish_loading()

        # `check` runs after the user's hooks before loading, `restore` before those after it.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        # What inference mode makes could not be changed outside of it.
        enabled = torch.is_grad_enabled()
        try:
            with (
                self._integrity.loading(),
                torch.inference_mode(False),
                torch.set_grad_enabled(enabled),
            ):
                super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_saved(
        self, states: dict[Any, Any], param_groups: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Checks the state and the groups of a checkpoint, and divides the state as this one is.

        Returns:
            The groups with every key.
        """
        checkpoints.check_count(self.param_groups, param_groups)
        param_groups = list(map(in_words_of_this_package, param_groups, self.param_groups))
        merged = checkpoints.merge_groups(self.param_groups, param_groups, self._defaults_of)
        groups = self._read_groups()
        wheres = [f"{group.where} of the checkpoint" for group in groups]
        saved_groups = [
            self._translate({**raw, "names": None, "where": where})
            for raw, where in zip(merged, wheres)
        ]
        entries, live = self._take_survey(groups).entries, self.state
        checkpoints.check_and_divide(groups, entries, saved_groups, states, live, self._settings)
        for group, saved, where in zip(self.param_groups, param_groups, wheres):
            validation.check_keys(saved, self._defaults_of(group), where)
        return merged

    @torch.no_grad()
    def load_foreign_state_dict(
        self,
        states: Any,
        *,
        kind: str,
        params: Optional[Iterable[Any]] = None,
        hyperparameters: bool = True,
    ) -> None:
        """Takes over the state of another optimizer, from its checkpoint.

        The package's `extras.foreign_checkpoints` says how parameters are matched, what is
        converted how, and has an example of each kind.

        Args:
            states: a state dict, already loaded: ``torch.load(path, weights_only=True)``; a list of
                those of all ranks, in order, or of two optimizers; or a mapping ``{"muon": …,
                "adamw": …}``, in which None has those parameters start anew. Every rank of this
                optimizer gets all of it, and takes its part without traffic.
            kind: what wrote ``states``: ``"torch_muon"``, ``"torch_adamw"``, ``"motif"``,
                ``"llamafactory"`` (Moonlight's), ``"nanochat"`` or ``"keller_jordan"``.
            params: parameters, (name, parameter) pairs, or names: all of them, in the order in
                which the other optimizer was given them, whatever it made of that. Needed where
                names and the preset's groups do not tell which parameter is which.
            hyperparameters: bring ``lr``, ``weight_decay``, ``momentum``, ``nesterov``, ``beta2``,
                betas, eps, ``maximize`` and what schedulers keep in groups (``initial_lr``, …), as
                far as both have them; False keeps the groups as they are. How matrices are
                orthogonalized and scaled always stays.

        Raises:
            ValueError: something does not fit, with the parameter's name; nothing was loaded.

        Example:
            >>> states = torch.load("optimizer.pt", weights_only=True)
            >>> optimizer = Muon(**presets.motif(get_default_muon_param_groups(model)))
            >>> optimizer.load_foreign_state_dict(states, kind="motif")
        """
        groups = self._read_groups()
        survey = self._take_survey(groups)
        from .extras.foreign_checkpoints import to_state_dict

        state_dict = to_state_dict(
            states,
            kind,
            params,
            hyperparameters,
            param_groups=self.param_groups,
            groups=groups,
            names=survey.names,
            entries=survey.entries,
            settings=self._settings,
        )
        self.load_state_dict(state_dict)

    @torch.no_grad()
    def discard_state(self) -> None:
        """Sets all state to zeros, for a checkpoint to be loaded into.

        `load_state_dict` alone repairs an optimizer whose `step` broke off. But
        torch.distributed.checkpoint loads into what `state_dict` gives, which raises then, as what
        it gave could be saved just as well. After this it gives zeros, while `step` goes on to
        raise until `load_state_dict` has been called. To be called on all ranks alike.
        """
        self._integrity.discard()
        self._forget_tensors()
        for param in [key for key in self.state if isinstance(key, Tensor)]:
            del self.state[param]
        self._offload.clear()
        self._create_state(self._read_groups())

    def __getstate__(self) -> dict[str, Any]:
        self._integrity.check()
        self._rounding.begin(self._read_groups(), self.state)
        self._offload.flush()
        kept = ("_settings", "_offload", "_clip", "_integrity")
        return {
            **super().__getstate__(),
            "_names": self.names,
            **{key: vars(self)[key] for key in kept},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_unpickled = "_store" not in vars(self)
        if not is_unpickled:
            self._integrity.begin_loading()  # all checks have passed; `restore` places the tensors
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and groups would inherit it
        self._store = StateStore(self._offload)
        self._rounding = Rounding(self._offload)
        self._forget_plans()
        if is_unpickled:
            if self.cpu_offload == "backward":
                self._offload.hooks = Hooks(self, None)
            self._logits = LogitSource()
            self._audit = None
            self._registration = agreement.Registration(self._sets)

    # -- CPU offload -----------------------------------------------------------------------------

    @torch.inference_mode(False)  # memory that it makes could not be changed outside of it
    @torch.no_grad()
    def turn_on_cpu_offload(
        self,
        mode: str = "stream",
        *,
        slot_bytes: Optional[int] = None,
        model: Optional[nn.Module] = None,
        backend: Optional[Backend] = None,
    ) -> None:
        """Keeps optimizer state in page-locked host memory between steps, from now on.

        Results are the same to the bit. To be called on all ranks alike, at any time; again, to
        change how. Where parameters are on the CPU, nothing happens.

        Args:
            mode: how state comes to a step. ``"stream"`` carries it through the device piece by
                piece, under the step's arithmetic; ``"bulk"`` brings all of it before the step and
                all of it back behind it; ``"backward"`` brings that of a parameter when its
                gradient is there, and writes back under the next forward.
            slot_bytes: device memory that ``"stream"`` takes, within the step only; None is 5 % of
                the device's state or 512 MiB, whichever is more.
            model: for ``"backward"``, the model: before the forward of each of its modules that has
                parameters, memory is let go that has been written back (but not in compiled
                forwards); without it, that happens when the next backward begins.
            backend: makes the copies, in place of the devices' streams; parameters on a CPU are
                offloaded, too: a `SimulatedHost` shows what happens without an accelerator.

        Raises:
            ValueError: an unknown mode; ``slot_bytes`` below 1; a model without parameters of this
                optimizer; no backend. Nothing was changed.
        """
        self._offload.turn_on(self, mode, slot_bytes, model, backend)
        self._forget_tensors()

    @torch.inference_mode(False)  # memory that it makes could not be changed outside of it
    @torch.no_grad()
    def turn_off_cpu_offload(self) -> None:
        """Brings all state back to where its parameters are, for good."""
        self._offload.turn_off(self.state)
        self._forget_tensors()

    @property
    def cpu_offload(self) -> Optional[str]:
        """The mode of CPU offload; None while it is off."""
        return self._offload.mode if self._offload.is_on else None

    def synchronize_offload(self) -> None:
        """Makes the host wait until all state is in host memory, and nothing of it on devices.

        To be called before reading or changing what ``optim.state`` holds by hand: before that it
        may be incomplete, or older than on the device. `state_dict` makes the host wait by itself,
        but leaves on the device what was reloaded.
        """
        self._offload.evict()

    @property
    def manual_offload(self) -> bool:
        """Whether what is reloaded stays until `offload` is called.

        While this is set, neither ``step()`` nor the hooks of ``"backward"`` bring or write back
        anything on their own, but for what ``step()`` needs and finds on the host only: that is
        streamed.
        """
        return self._offload.manual

    @manual_offload.setter
    def manual_offload(self, manual: bool) -> None:
        self._offload.manual = bool(manual)

    def set_param_tags(self, tags: Mapping[Union[Tensor, str], Hashable]) -> None:
        """Sorts parameters into groups for `reload_group`, instead of any earlier ones.

        Args:
            tags: of parameters, or of their names; None as a tag is none.

        Raises:
            ValueError: something that is no parameter of this optimizer.
        """
        params: dict[Any, Tensor] = {id(p): p for g in self.param_groups for p in g["params"]}
        for group in self._read_groups():
            params.update(zip(group.names or (), group.params))
        self._offload.tag(tags, params)

    def reload_group(self, tag: Hashable, sync_streams: Sequence[Any] = ()) -> None:
        """Starts to bring the state of the parameters with a tag to the device.

        Args:
            tag: from `set_param_tags`.
            sync_streams: streams whose work so far the copies wait for, beside the current one's:
                those from which memory may come that has just been freed.

        Raises:
            ValueError: no parameter has that tag.
        """
        self._offload.reload(self.state, self._offload.tagged(tag), sync_streams)

    def reload_untagged(self, sync_streams: Sequence[Any] = ()) -> None:
        """The same for all parameters without a tag."""
        params = (param for group in self.param_groups for param in group["params"])
        untagged = (param for param in params if param not in self._offload.tags)
        self._offload.reload(self.state, untagged, sync_streams)

    def wait_reload(self) -> None:
        """Makes the current stream wait for all that is being reloaded; ``step()`` does it, too."""
        self._offload.wait_reload()

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload(self) -> None:
        """Starts to write reloaded state back.

        Its device memory is let go when that is done, as seen by the next call of any of these
        methods, of ``step()``, or by a forward of ``model`` in the mode ``"backward"``.
        """
        self._offload.offload()

    def _forget_plans(self) -> None:
        self._survey = self._agreed = NO_SURVEY
        self._agreement = agreement.Agreement()
        self._compared = False
        self._tried = None
        self._warned = False
        self._checked_keys = {}
        self._untrained = 0
        self._last = EMPTY_PLAN, ()
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        """Lets go of what steps keep of weights and state, which would keep their memory."""
        self._prepared = None
        self._store.recheck()


def _make_clip(clip_config: Any, clip_mode: Any) -> Optional[QKClip]:
    """QK-Clip as configured, loaded where it is used."""
    if clip_config is None and clip_mode == "shared":
        return None
    from .qk_clip.clip import QKClip
    from .qk_clip.config import read_clip_config

    config = read_clip_config(clip_config, clip_mode)
    return None if config is None else QKClip(config)


def _is_zero(lr: Any) -> bool:
    """Without waiting for a device."""
    return (not isinstance(lr, Tensor) or lr.device.type == "cpu") and bool(lr == 0)
