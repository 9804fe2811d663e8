"""Muon: orthogonalized momentum for the matrices of a model, AdamW for the rest."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

from . import newton_schulz, pipeline, triton_kernels
from .async_utils import Event
from .cpu_offload import CPUOffload
from .distributed import agreement, process_groups
from .distributed.plan import EMPTY_PLAN, Plan
from .distributed.replicas import Replicas
from .parameters import options, replaced, validation
from .parameters.aliases import refuses_unknown_arguments
from .parameters.names import counted
from .parameters.options import GROUP_OPTIONS, SETTINGS, Group
from .parameters.survey import (
    NO_SURVEY,
    Survey,
    entries_of,
    has_replicas,
    sets_of,
    survey_groups,
    with_replicas,
)
from .qk_clip.clip import QKClip
from .qk_clip.config import read_config
from .qk_clip.layers import Logits
from .rules.assignment import AUTO
from .rules.decisions import ExpertKeys, default_is_muon
from .rules.groups import get_default_muon_param_groups, groups_for
from .state import integrity
from .state.rounding import Rounding
from .state.specs import check_state
from .state.stateful import Stateful, through_wrappers
from .state.store import StateStore
from .step.binding import Bound
from .step.context import Step, has_nonzero_gradient, is_zero_rate
from .step.grad_scaler import Scaling, scaler_agrees
from .step.notes import replica_difference, take_notes
from .step.progress import Progress
from .step.warm_up import warm_up

if TYPE_CHECKING:
    from .extras.audit import Audit
    from .extras.summary import Summary

__all__ = ["Muon", "default_is_muon", "get_default_muon_param_groups"]


logger = logging.getLogger(__name__)


class Muon(Stateful):
    r"""Muon for matrices (Jordan et al. 2024), AdamW for all other parameters.

    For each matrix W with gradient G, momentum buffer B and learning rate lr::

        B ← μB + w·G                       w = 1; with momentum_style="ema" w = 1 − μ
        U ← newton_schulz(w·G + μB)        with Nesterov; otherwise newton_schulz(B)
        U ← U / sqrt(running mean of U²)   only with beta2, per row or column, norm preserved
        W ← W·(1 − lr·weight_decay) − lr·scale·U

    The default scale is 0.2·sqrt(max(rows, cols)) (Liu et al. 2025, arXiv:2502.16982), so a weight
    decay tuned for AdamW also fits Muon. `describe` prints multiples of AdamW's learning rate to
    try. U doesn't depend on the scale of the gradients unless ``ns_eps_absolute`` or
    ``ns_equilibrate`` is set.

    `Muon.for_model` also makes the parameter groups. docs/options.md describes all arguments; the
    defaults suit most training runs. Any argument can also be set per group, as a key of the
    group's dict, except those that docs/options.md lists under "For all groups".

    Args:
        params: parameter groups, as dicts. ``use_muon`` is True if Muon trains the group, False if
            AdamW does. ``params`` lists tensors (with ``names`` in the same order) or (name,
            parameter) pairs.
        lr: learning rate of both algorithms: a number or a tensor with one element.
        weight_decay: decoupled weight decay of both algorithms.
        momentum: μ.
        nesterov: True orthogonalizes w·G + μB instead of B.
        adamw_betas, adamw_eps: AdamW's betas and eps, for groups with ``use_muon=False``.
        process_group: the ranks that hold replicas of plain parameters: a process group or a
            one-dimensional mesh. DTensors need none: they carry their own mesh and placements.

    Raises:
        ValueError: invalid input. The message names the parameter; nothing was changed.
        TypeError: unknown argument. The message says what to write instead.

    Example:
        >>> groups = get_default_muon_param_groups(model)
        >>> optim = Muon(groups, lr=1e-3, weight_decay=0.1)
        >>> loss.backward()
        >>> optim.step()
    """

    @refuses_unknown_arguments
    @process_groups.refuses_groups_before_init("process_group")
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
        adjust_lr: Union[str, float] = "match_rms_adamw",
        momentum_style: str = "classical",
        ns_coefficients: newton_schulz.Coefficients = "polar_express",
        ns_dtype: Optional[torch.dtype] = None,
        ns_options: Optional[Mapping[str, Any]] = None,
        beta2: Optional[float] = None,
        second_moment_side: str = "longer",
        cautious: bool = False,
        decay_lr: str = "base",
        momentum_dtype: Optional[torch.dtype] = None,
        weight_rounding: str = "nearest",
        missing_grad: str = "raise",
        split: Any = None,
        flatten: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        exact: bool = False,
        comm_dtype: Optional[torch.dtype] = None,
        consistency_check: str = "step",
        hsdp: str = "auto",
        staging_bytes: Optional[int] = None,
        triton: bool = True,
        process_group: Any = None,
        grad_reduce: Optional[str] = None,
    ):
        arguments = {**locals(), **options.read_ns_options(ns_options)}
        self._settings = options.Settings(
            **{key: arguments[key] for key in SETTINGS},
            replicas=None if process_group is None else Replicas(process_group),
        )
        self._settings.validate()
        clip = QKClip(None if clip_config is None else read_config(clip_config))
        defaults = {key: arguments[key] for key in GROUP_OPTIONS}
        options.settle_steps(defaults, not isinstance(ns_steps, options.DefaultSteps))
        self._names = []
        self._offload = CPUOffload()
        self._store = StateStore(self._offload)
        self._rounding = Rounding(self._offload)
        self._integrity = integrity.Integrity()
        self._audit = None
        self._clip = QKClip(None)  # off until all groups are added, since a layer may span groups
        self._forget_plans()
        super().__init__(validation.as_groups(params), defaults)
        groups = self._read_groups()
        clip.check_and_warn(groups)
        self._clip = clip
        self._check_reference(groups)
        self._registration = agreement.Registration(self._sets)
        validation.warn_about_unmatched_split(split, groups)

    @classmethod
    def for_model(
        cls,
        model: torch.nn.Module,
        lr: Any,
        adamw_lr: Any = None,
        weight_decay: float = 0.1,
        *,
        per_head: bool = False,
        expert_keys: ExpertKeys = AUTO,
        split: Any = AUTO,
        convolutions: bool = False,
        is_muon_func: Callable[..., bool] = default_is_muon,
        adamw_keys: ExpertKeys = None,
        decay_vectors: bool = True,
        **options: Any,
    ) -> Muon:
        """Makes an optimizer for a model: Muon for matrices, AdamW for all other parameters.

        Modules and names show which tensors hold stacked experts or several matrices, such as fused
        projections. Tensors that nothing identifies are left to AdamW, with one warning.
        ``print(optimizer.describe(model, …))`` takes the same arguments and shows the decisions.

        Args:
            model: the model, after ``fully_shard`` or anything else that replaces its parameters.
            lr: learning rate of the matrices.
            adamw_lr: learning rate of all other parameters; None uses ``lr``.
            weight_decay: decoupled weight decay of both algorithms.
            per_head: True orthogonalizes each head of query, key, and value projections separately.
                Projections whose head size is unknown stay whole, with one warning.
            expert_keys: name components that mark stacked experts; "auto" finds them.
            split: how to split tensors into matrices. "auto" finds the splits; a mapping from name
                patterns adds to what "auto" finds; None keeps every tensor whole.
            convolutions: True gives convolutions to Muon too, as matrices (first dimension, the
                rest).
            is_muon_func, adamw_keys, decay_vectors: see `get_default_muon_param_groups`.
            options: further arguments of `Muon`, such as ``process_group``.

        Raises:
            ValueError: ``model`` isn't a module, or FSDP1 has flattened its parameters; or
                anything that `Muon` raises.

        Example:
            >>> optim = Muon.for_model(model, lr=2e-3, adamw_lr=4e-3, weight_decay=0.1)
        """
        chosen = expert_keys, adamw_keys, convolutions, split, per_head
        groups, split = groups_for(model, is_muon_func, *chosen, adamw_lr, decay_vectors)
        return cls(groups, lr=lr, weight_decay=weight_decay, split=split, **options)

    def _forget_plans(self) -> None:
        self._survey: Survey = NO_SURVEY  # the latest survey of the groups
        self._agreed: Survey = NO_SURVEY  # the survey that ranks last agreed on
        self._agreement = agreement.Agreement()
        self._compared = False  # True once replicas have compared their weights and gradients
        self._warmed_up: Optional[Plan] = None  # the plan whose kernels were compiled last
        self._warned = False  # True after the warning about a step that trains nothing
        self._warned_of_rows = False
        self._checked: list[dict[str, Any]] = []  # groups at their last check
        self._checked_settings: object = None
        self._last: tuple[Plan, tuple[Event, ...]] = EMPTY_PLAN, ()  # the last step's, for summary
        self._forget_tensors()

    def _forget_tensors(self) -> None:
        """Drops cached views of weights and state, which would keep their memory alive."""
        self._bound: Optional[Bound] = None
        self._store.recheck()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, after checking all of it.

        Args:
            param_group: a dict like those in ``params`` of the constructor.

        Raises:
            ValueError: the group is invalid; nothing was added.
        """
        where = f"param_groups[{len(self.param_groups)}]"
        group = validation.normalize_group(param_group, where)
        validation.check_keys(group, self._defaults_of(group), where)
        options.settle_steps(group, "ns_steps" in group)
        group = {"names": None, **self._defaults_of(group), **group}
        group_view = self._translate({**group, "where": where})
        group_view.validate()
        if group_view.weight_rounding == "stochastic":  # so that loading restores it
            group.setdefault("rounding_step", 0)
        entries_of(group_view, len(self.param_groups), self._settings)  # raises if one is wrong
        validation.check_unshared(group_view, self.param_groups)
        if self._clip.config is not None:
            self._clip.find([*self._read_groups(), group_view])  # raises if a layer doesn't fit
        validation.warn_about_overshoot(group_view)
        names = group.pop("names")
        # torch requires param_names in all groups or in none. This optimizer also allows names in
        # only some groups, so they are hidden from torch during the call.
        every_group = (*self.param_groups, group)
        hidden = [each.pop("param_names", None) for each in every_group]
        try:
            super().add_param_group(group)
            self._names.append(names)
        finally:
            for each, param_names in zip(every_group, hidden):
                if param_names is not None:
                    each["param_names"] = param_names

    def __repr__(self) -> str:
        """One line per group: its algorithm, its rates, and options that aren't the default."""
        arguments, lines = inspect.signature(Muon).parameters.values(), []
        defaults = {**{p.name: p.default for p in arguments}, **options.NS_DEFAULTS}
        for number, group in enumerate(self.param_groups):
            view = self._translate(
                {**self._defaults_of(group), **group, "names": None, "where": ""}
            )
            keys = GROUP_OPTIONS if view.use_muon else ("adamw_betas", "adamw_eps")
            values = {"lr": view.lr, "weight_decay": view.weight_decay}
            values |= {k: v for k in keys if (v := getattr(view, k)) != defaults[k]}
            shown = ", ".join(f"{key}={value!r}" for key, value in values.items())
            algorithm = "Muon" if view.use_muon else "AdamW"
            lines.append(
                f"    {number}: {algorithm}, {counted(view.params, 'parameter')}, {shown}\n"
            )
        return f"{type(self).__name__} (\n{''.join(lines)})"

    @property
    def process_group(self) -> Any:
        """Process group of the replicated parameters, or None; set it again after unpickling."""
        replicas = self._settings.replicas
        return None if replicas is None else replicas.group

    @process_group.setter
    @through_wrappers
    @process_groups.refuses_groups_before_init("process_group")
    def process_group(self, process_group: Any) -> None:
        replicas = None if process_group is None else Replicas(process_group)
        self._settings = dataclasses.replace(self._settings, replicas=replicas)
        self._forget_plans()

    @torch.no_grad()
    def step(
        self,
        closure: Optional[Callable[[], Any]] = None,
        qk_logits: Optional[Mapping[Any, Tensor]] = None,
    ) -> Any:
        """Performs one optimization step.

        With `torch.amp.GradScaler`, all ranks that step together skip the same steps. If the
        scaler's own check doesn't cover all of them, the scaler calls `step()` even after Inf or
        NaN, and this method decides: it unscales the gradients in place, unless the caller already
        has, and changes nothing if any rank found Inf or NaN.

        Args:
            closure: re-evaluates the model and returns the loss.
            qk_logits: for QK-Clip: maps each layer (its number, or its attention module's FQN) to a
                tensor (heads,) on the CPU or the weights' device: the largest attention logit of
                each query head in this step's forward pass. If ``q_indices`` is set, it has one
                logit per entry instead. None means that this rank ran no attention of the layer.
                Ranks that share the weights use the maximum over all of them. Without
                ``qk_logits``, the step uses the logits given to `set_qk_logits`, or else those that
                `qk_recorder` recorded.

        Returns:
            The return value of the closure, or None.

        Raises:
            ValueError: invalid gradients, hyperparameters, or logits; or ranks would do different
                things. The parameters and their state are unchanged.
            RuntimeError: a rank didn't arrive. Or this step or an earlier one failed after some
                rank might already have changed something: then load a checkpoint, or call
                `accept_partial_step`.
        """
        loss = None
        with Scaling(self) as scaling:
            if closure is not None:
                with self._reporting_errors(scaling), torch.enable_grad():
                    loss = closure()
            self._step(qk_logits, scaling)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if `GradScaler` must always call `step()` and leave skipping to it."""
        return not scaler_agrees(list(self._params()), self._settings)

    @torch._disable_dynamo  # torch.compile must not trace into a step
    @torch.inference_mode(False)  # state created as inference tensors couldn't be updated later
    @torch.no_grad()
    def _step(self, qk_logits: Optional[Logits], scaling: Scaling) -> None:
        progress = Progress(self._agreement, lambda: has_replicas(self._params(), self._settings))
        changing = self._integrity.changing(
            "step()", progress.may_have_written, progress.may_have_parted
        )
        with changing, triton_kernels.enabled(self._settings.triton):
            with self._reporting_errors(scaling):
                step = self._check(qk_logits, scaling, progress)
            if self._agree(step, scaling):
                self._run(step, scaling)

    @contextmanager
    def _reporting_errors(self, scaling: Scaling) -> Iterator[None]:
        """Reports an error raised in this context to the ranks that would wait for this one."""
        self._agreement.begin()
        try:
            yield
        except BaseException as error:
            sets, settings = self._sets(), self._settings
            for ranks in sets:  # as `_agree` does: ranks must draw numbers at the same time
                self._registration.number(ranks)
            structure = self._survey.structure(settings)
            how_often = settings.consistency_check
            self._agreement.report(error, how_often, structure, sets, scaling.skips)
            raise

    def _check(self, qk_logits: Optional[Logits], scaling: Scaling, progress: Progress) -> Step:
        """Checks all that the step depends on; returns the `Step`; changes no weights or state."""
        self._integrity.check()
        self._integrity.check_together()
        if self._settings is not self._checked_settings or self._settings.replicas:
            self._settings.validate()
        self._checked_settings = self._settings
        groups = self._read_groups()
        self._check_reference(groups)
        survey, settings = self._take_survey(groups), self._settings
        replaced.check_not_replaced(groups)
        self._store.recheck_replaced(self.state)
        if not self._store.is_checked:
            self._bound = None
        for group, entries in zip(groups, survey.entries):
            validation.check_gradients(group)
            if not self._store.is_checked:
                validation.check_list_operations(group)
                check_state(group, entries, self.state, settings)
        plan, absent = survey.plan(groups, settings)
        validation.check_capturable(groups, plan, settings, self._offload.destination)
        scaling.check(groups)
        # torch.distributed.checkpoint creates state by calling step() with lr=0.
        is_dry = not self.state and all(is_zero_rate(group.lr) for group in groups)
        clipping = self._clip.begin(qk_logits, groups, survey, settings, is_dry)
        if settings.triton and plan is not self._warmed_up:
            warm_up(plan, groups)
            self._warmed_up = plan
        is_audited = self._audit is not None and self._audit.is_on and not is_dry
        return Step(
            plan,
            groups,
            absent,
            state=self.state,
            settings=settings,
            offload=self._offload,
            rounding=self._rounding,
            clipping=clipping,
            bound=self._bound,
            audit=self._audit if is_audited else None,
            progress=progress,
            only_creates=is_dry and not any(map(has_nonzero_gradient, groups)),
        )

    def _agree(self, step: Step, scaling: Scaling) -> bool:
        """Returns True if all ranks run the step, False if all skip it.

        Raises:
            ValueError: if ranks would do different things, or any rank has an error.
        """
        survey, agreement, registration = self._survey, self._agreement, self._registration
        sets = with_replicas(set(survey.shared), self._settings)
        for ranks in sets:
            registration.number(ranks)
        skips = agreement.decide(
            self._settings.consistency_check,
            survey.structure(self._settings),
            sets,
            lambda: take_notes(step, survey, registration, agreement.steps),
            skip=scaling.skips,
            only_creates=step.only_creates,
        )
        step.only_creates = agreement.only_creates
        if survey is not self._agreed:
            self._agreed = survey
            self._store.drop_departed(self.state, self._params())
        if skips:
            return False
        if agreement.has_compared and not self._compared:
            problem = replica_difference(step, survey.names, self.state)
            if problem is not None:  # all replicas have the same problem, so all raise
                agreement.revoke()
                raise ValueError(problem)
            self._compared = True
        self._warned = self._warned or validation.warn_about_no_gradients(step.groups)
        return True

    def _run(self, step: Step, scaling: Scaling) -> None:
        """Creates missing state, runs the step, and caches what the next step reuses."""
        step.progress.is_running = True
        if not self._store.is_checked:
            self._store.drop_zeros(self.state)
            self._store.create_missing(
                self.state, step.groups, self._survey.entries, self._settings
            )
            self._store.mark_checked(self.state, self._params())
        self._rounding.begin_step(step.groups, self.state)
        try:
            with step:
                scaling.unscale(step.groups, step.progress)
                pipeline.run(step)
        finally:
            self._rounding.end()
        if not step.only_creates:
            self._rounding.count_step(self.param_groups)
        self._bound = step.bound
        self._last = step.plan, step.bound.schedule
        self._agreement.steps += 1

    def _sets(self) -> set[agreement.Ranks]:
        return sets_of(self._params(), self._settings)

    def _check_reference(self, groups: list[Group]) -> None:
        """With ``use_distributed_muon``, raises ValueError for options `reference` lacks."""
        if self._settings.use_distributed_muon:
            from .reference import check

            others = {
                "a clip_config": self._clip.config is not None,
                "CPU offload": self._offload.is_on,
                "an audit": self._audit is not None and self._audit.is_on,
                "weights in host memory": any(map(self._offload.is_on_host, self._params())),
                "a process_group": self._settings.replicas is not None,
            }
            check(groups, others)

    def _take_survey(self, groups: list[Group]) -> Survey:
        """Checks and surveys the groups, and keeps the survey."""
        survey = self._survey_of(groups)
        if survey is not self._survey:
            self._survey = survey
            self._forget_tensors()
            if self._settings.debug:
                logger.info("planned:\n%s", self._summarize(groups, survey))
        return survey

    def _survey_of(self, groups: list[Group]) -> Survey:
        """Checks and surveys the groups; returns the kept survey if nothing has changed."""
        self._checked = validation.check_changed(
            groups, self.param_groups, self._checked, self._defaults_of
        )
        params = ((p, group.use_muon) for group in groups for p in group.params)
        streams_state = self.cpu_offload and self._offload.can_offload(params)
        if streams_state is not self._settings.streams_state:  # the plan depends on it
            self._settings = dataclasses.replace(self._settings, streams_state=streams_state)
        return survey_groups(groups, self._settings, self._survey)

    def summary(self, schedule: bool = False) -> Summary:
        """Shows what a step does with every parameter: ``print(optim.summary())``.

        It reads the plan of a step in which every trainable parameter has a gradient, and doesn't
        communicate with other ranks. `Summary.rows` and `Summary.totals` are plain data.

        Args:
            schedule: True also lists the events of this rank's last step, in order.
        """
        groups = self._read_groups()
        # Other ranks might not call this, so it must not replace the kept survey.
        return self._summarize(groups, self._survey_of(groups), self._last if schedule else None)

    def _summarize(
        self, groups: list[Group], survey: Survey, last: Optional[tuple[Plan, Any]] = None
    ) -> Summary:
        from .extras.summary import summarize

        layers = self._clip.find(groups)
        clipped = {id(param) for layer in layers for param in layer.params}
        return summarize(groups, survey, self._settings, self.cpu_offload, clipped, last)

    @through_wrappers
    def audit(self, keep: int = 100) -> Audit:
        """Starts an audit, which watches steps until its context ends or its ``stop()`` is called.

        Call its ``report()`` on all ranks and print the result: first what is wrong, then what the
        steps did to each parameter (docs/checks.md). Steps are bit-identical with and without an
        audit. A new audit stops the previous one.

        Args:
            keep: how many of the last steps to keep. Each keeps one polar factor in device memory.

        >>> with optim.audit() as audit:
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
        """Numbers about the last audited step, for any logger; empty without an `audit`.

        They cover this rank's share of the matrices; docs/checks.md lists the keys. The host waits
        for the device, but not for other ranks.
        """
        return {} if self._audit is None else self._audit.metrics()

    def set_qk_logits(self, qk_logits: Optional[Mapping[Any, Any]]) -> None:
        """Sets ``qk_logits`` for the next `step`, for trainers that call it without arguments."""
        self._clip.next_logits = qk_logits

    @property
    def qk_recorder(self) -> Any:
        """The recorder whose logits `step` uses: a `QKLogitRecorder` or an object with ``take()``.

        Copied and unpickled optimizers have none.
        """
        return self._clip.recorder

    @qk_recorder.setter
    def qk_recorder(self, recorder: Any) -> None:
        if recorder is not None and not callable(getattr(recorder, "take", None)):
            raise ValueError(f"qk_recorder must be a QKLogitRecorder or None, found {recorder!r}")
        self._clip.recorder = recorder

    def qk_clip_stats(self) -> dict[str, Any]:
        """What QK-Clip saw and did, as plain numbers; empty without ``clip_config``.

        The host waits for the device. Checkpoints don't contain these numbers.

        Returns:
            For the last step with logits: ``max_logit``; ``heads``, the number of logits;
            ``clipped`` and ``nonfinite``, how many of them were clipped, or were Inf or NaN; and
            ``layers``, which maps each layer to its ``max_logit``, ``clipped``, ``nonfinite`` and
            ``max_logits`` (NaN shows as Inf). For all steps: ``steps``, the number of steps with
            logits; ``total_clipped``; and ``total_nonfinite``.
        """
        return self._clip.stats()
