"""Manages an optimizer's state: state dicts, exact weights, failed steps, pickles, CPU offload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, TypeVar, cast

import torch
from torch import Tensor

from ..cpu_offload import Backend, CPUOffload
from ..distributed import agreement, dtensors
from ..parameters import validation
from ..parameters.names import find_name, state_dict_key
from ..parameters.options import GROUP_OPTIONS, Group, Settings
from ..parameters.survey import Survey
from ..qk_clip.clip import QKClip
from . import checkpoints, integrity
from .rounding import Rounding
from .specs import divided_rows
from .store import StateStore

_Function = TypeVar("_Function", bound=Callable[..., Any])


def through_wrappers(method: _Function) -> _Function:
    """Decorates a method that sets attributes, so that it sets them on the optimizer itself.

    A wrapper that derives from the optimizer's class and forwards attributes, as Lightning's does,
    inherits methods. It would forward their reads, but keep their writes.
    """

    @functools.wraps(method)
    def call(self: Stateful, *args: Any, **kwargs: Any) -> Any:
        return method(self._registration.optimizer, *args, **kwargs)

    return cast(_Function, call)


class Stateful(torch.optim.Optimizer):
    """An optimizer whose state can be saved on one layout and loaded on another.

    This class reads the parameter groups; `Muon` checks and surveys them, and steps.
    """

    _settings: Settings
    _clip: QKClip
    _offload: CPUOffload
    _store: StateStore
    _rounding: Rounding
    _integrity: integrity.Integrity
    _agreement: agreement.Agreement
    _registration: agreement.Registration
    _names: list[Optional[list[str]]]  # by group
    _audit: Any
    _load: object  # identifies the last load
    _warned_of_rows: bool  # True after the warning that a state dict has only this rank's rows

    def _take_survey(self, groups: list[Group]) -> Survey:
        raise NotImplementedError

    def _sets(self) -> set[agreement.Ranks]:
        raise NotImplementedError

    def _forget_plans(self) -> None:
        raise NotImplementedError

    def _forget_tensors(self) -> None:
        raise NotImplementedError

    def _params(self) -> Iterator[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    @property
    def names(self) -> list[Optional[list[str]]]:
        """For each group, the names of its parameters, in order, or None.

        Names aren't keys of the groups, since torch.distributed.checkpoint would require them in
        checkpoints.
        """
        return [view.names for view in self._read_groups()]

    def _read_groups(self) -> list[Group]:
        """Views of all groups as they are now; most of the package reads only these.

        First reads names that were set on a group since the last call.
        """
        if len(self._names) != len(self.param_groups):
            raise ValueError(
                f"there are {len(self.param_groups)} param_groups, but {len(self._names)} were "
                "added: add groups with add_param_group; create a new optimizer to remove groups"
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
        """The view of a group; subclasses whose groups have other keys rename the keys first."""
        group.setdefault("rounding_step", 0)
        return Group(**{key: group[key] for key in Group.__dataclass_fields__})

    def _defaults_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the keys that a group may lack; subclasses may choose them by group."""
        return {key: self.defaults[key] for key in GROUP_OPTIONS}

    @property
    def is_broken(self) -> bool:
        """True if weights and state don't belong to the same step.

        This is the case after a `step` or a load failed partway, or after `discard_state`. To
        recover, call `load_state_dict` or, after a step, `accept_partial_step`.
        """
        return self._integrity.is_broken()

    def _create_state(self, groups: list[Group]) -> None:
        entries = self._take_survey(groups).entries
        self._store.create_missing(self.state, groups, entries, self._settings)

    def state_dict(self) -> dict[str, Any]:
        """Returns a state dict as torch.optim does, after creating missing state.

        If ``process_group`` divides state among replicas, it has only this rank's rows. Dtypes
        among the options are saved as strings, because torch.distributed.checkpoint doesn't accept
        dtypes in full state dicts.

        Raises:
            RuntimeError: a `step` or a load failed partway; see `accept_partial_step` and
                `discard_state`.
        """
        self._integrity.check(accept=integrity.VOID)
        groups = self._read_groups()
        self._create_state(groups)
        self._rounding.begin(groups, self.state)
        self._offload.synchronize()
        self._store.note_zeros(self.state)
        self._warn_about_divided_state()
        held = set(map(id, self._params()))
        params = [key for key in self.state if isinstance(key, Tensor)]  # other keys are the user's
        departed = {p: self.state.pop(p) for p in params if id(p) not in held}
        try:
            state_dict = super().state_dict()
        finally:
            self.state.update(departed)
        # A later step, or a change of options, may replace tensors in the optimizer's own dicts.
        state_dict["state"] = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
        for group in state_dict["param_groups"]:
            group.update({k: str(v) for k, v in group.items() if isinstance(v, torch.dtype)})
        return state_dict

    def _warn_about_divided_state(self) -> None:
        """Warns once that replicas divide state, unless torch.distributed.checkpoint is calling."""
        if self._warned_of_rows or len(self._settings.replica_ranks or ()) < 2:
            return
        is_divided = any(
            divided_rows(self.state.get(param, {})) is not None
            for param in self._params()
            if not dtensors.is_dtensor(param)
        )
        if is_divided and not validation.is_called_by("torch.distributed.checkpoint"):
            validation.warn(
                "state_dict() has only this rank's rows of the state that process_group divides, "
                "so a file from one rank alone (torch.save on rank 0) can't resume training. Save "
                "with torch.distributed.checkpoint, or one file per rank, or leave process_group "
                "out"
            )
            self._warned_of_rows = True

    @torch.no_grad()
    def exact_weights(self) -> dict[str, Tensor]:
        """Returns the fp32 weights of all parameters with ``weight_rounding="exact"``.

        Their keys are the names in the groups, which are the keys of the model's ``state_dict()``.
        The tensors are new, and placed like the parameters. Call this on all ranks: replicas that
        divide AdamW's state exchange its rows.

        Raises:
            ValueError: a group has no names, or two parameters have the same name.

        >>> state_dict = {**model.state_dict(), **optim.exact_weights()}
        """
        params = self._params_with_residuals()
        return {key: self._rounding.exact(param) for key, param in params.items()}

    @torch.no_grad()
    def load_exact_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Sets weights and their residuals from fp32 weights, as `exact_weights` returns them.

        ``weights`` may contain only some of them. Name components that wrappers add are ignored.
        Call this after `load_state_dict`, which replaces the residuals.

        Raises:
            ValueError: a name has no residual here or matches several parameters, two names match
                one parameter, or a tensor doesn't fit. Nothing was loaded.
        """
        params, values = self._params_with_residuals(), {}
        find = find_name(name for group in self._read_groups() for name in group.names or ())
        for name, value in weights.items():
            key = state_dict_key(find(name) or name)
            validation.check_exact_weight(name, value, params.get(key))
            if key in values:
                raise ValueError(f"{name} is {key}, which is given twice; pass it once")
            values[key] = value
        for key, value in values.items():
            self._rounding.set_exact(params[key], value)

    def _params_with_residuals(self) -> dict[str, Tensor]:
        """Parameters that have a residual, by their keys in the model's ``state_dict()``."""
        self._integrity.check()
        groups = self._read_groups()
        self._create_state(groups)
        self._rounding.begin(groups, self.state)
        return self._rounding.by_key(groups)

    @through_wrappers
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch.optim does, but momentum keeps its saved dtype.

        Group keys that the checkpoint lacks get their defaults. ``expert_keys``, ``split`` and
        ``flatten``, which say how parameters are read as matrices, stay as constructed.

        Raises:
            ValueError: the checkpoint doesn't fit; nothing was loaded.
            RuntimeError: loading failed partway and has to be repeated.
        """
        checkpoints.check_type(state_dict)
        loaded: dict[Tensor, dict[str, Any]] = {}
        own: set[int] = set()  # ids of tensors to reuse
        before = id(self.state)  # torch replaces it once all checks have passed

        # An interrupt may leave hooks of an earlier load registered; these must do nothing.
        this_load = self._load = object()

        def check(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            if self._load is not this_load:
                return saved
            states, others = checkpoints.read_states(saved)
            if self._integrity.is_broken(accept=integrity.VOID):
                checkpoints.check_apart(states, self.state)
            own.update(map(id, checkpoints.tensors_of(self.state)))
            own.difference_update(map(id, self._store.unwritten_zeros()))
            with _suggesting_kind(saved["param_groups"]):
                merged, by_param = self._check_saved(states, others, saved["param_groups"])
            loaded.update(by_param)
            return {**saved, "state": others, "param_groups": merged}

        def restore(_: torch.optim.Optimizer) -> None:
            nonlocal before
            if self._load is not this_load:
                return
            self._offload.clear()
            checkpoints.place_tensors(self.state, loaded, self._offload, own)
            self._create_state(self._read_groups())
            self._integrity.restore()
            before = id(self.state)  # errors in the user's post-hooks break nothing

        def has_begun(_: BaseException) -> bool:
            return id(self.state) != before

        # `check` runs after the user's pre-hooks, `restore` before the user's post-hooks.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        # Tensors created in inference mode can't be changed outside it. The context that turns it
        # off would also turn gradients on, so the previous mode is restored.
        enabled = torch.is_grad_enabled()
        try:
            with (
                self._integrity.changing("load_state_dict()", has_begun),
                torch.inference_mode(False),
                torch.set_grad_enabled(enabled),
            ):
                super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_saved(
        self,
        states: dict[Any, Any],
        others: dict[Any, Any],
        param_groups: Sequence[dict[str, Any]],
    ) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
        """Checks a checkpoint's state and groups, and divides its state like this optimizer's.
        Returns its groups, with every key, and its state by parameter."""
        merged = checkpoints.merge_groups(self.param_groups, param_groups, self._defaults_of)
        groups = self._read_groups()
        wheres = [f"{group.where} of the checkpoint" for group in groups]
        saved_groups = [
            self._translate({**raw, "names": None, "where": where})
            for raw, where in zip(merged, wheres)
        ]
        entries = self._take_survey(groups).entries
        by_param = checkpoints.check_and_divide(
            groups, entries, saved_groups, states, others, self._settings
        )
        known = [{*group, *self._defaults_of(group)} for group in self.param_groups]
        for group, saved, where in zip(self.param_groups, param_groups, wheres):
            validation.check_keys(saved, self._defaults_of(group), where)
        return validation.without_unknown_keys(merged, known), by_param

    @torch.no_grad()
    def load_foreign_state_dict(
        self,
        states: Any,
        *,
        kind: str,
        params: Optional[Iterable[Any]] = None,
        hyperparameters: bool = True,
    ) -> None:
        """Loads the state of another optimizer from its checkpoint.

        `foreign_checkpoints` in ``extras`` describes the conversion, with an example of each kind.

        Args:
            states: a state dict, as ``torch.load(path, weights_only=True)`` returns it; a list of
                the state dicts of all ranks, in order; or, from two optimizers, a mapping
                ``{"muon": …, "adamw": …}``, where None means that these parameters start with fresh
                state. Pass all state on every rank: each rank keeps its part, without
                communication.
            kind: the optimizer that wrote ``states``: ``"torch_muon"``, ``"torch_adamw"``,
                ``"motif"``, ``"llamafactory"`` (Moonlight's), ``"nanochat"`` or
                ``"keller_jordan"``.
            params: all parameters, as tensors, (name, parameter) pairs or names, in the order in
                which the other optimizer received them. Needed if names and the preset's groups do
                not show which parameter is which.
            hyperparameters: True also loads the hyperparameters that both optimizers have and the
                keys that schedulers keep, but not the options of orthogonalization or scale. False
                keeps this optimizer's.

        Raises:
            ValueError: something doesn't fit. The message names the parameter; nothing was loaded.
        """
        groups = self._read_groups()
        survey = self._take_survey(groups)
        from ..extras.foreign_checkpoints import to_state_dict

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

    @through_wrappers
    @torch.no_grad()
    def accept_partial_step(self) -> None:
        """Accepts the result of a step that failed partway, so that training can continue.

        Some parameters, or their momentum, remain one step ahead of others. The step may have
        changed or cleared gradients: call `zero_grad` and continue with the next batch.

        Call this on all ranks, including those whose step completed. If a rank's step ended before
        its last exchange with other ranks, or if other ranks hold the same parameters and may have
        updated them differently, state can be saved, but the next step raises on all ranks that
        share parameters: save, and resume in a new launch.

        Raises:
            RuntimeError: a load failed partway, or `discard_state` was called. Nothing was changed.
        """
        self._integrity.check(accept=integrity.PARTIAL)
        self._create_state(self._read_groups())  # the first step may have created only some of it
        if self.is_broken and not self._agreement.only_creates:
            # As on other ranks, where the step was completed.
            self._rounding.count_step(self.param_groups)
        self._integrity.accept()
        self._forget_plans()

    @through_wrappers
    @torch.no_grad()
    def discard_state(self) -> None:
        """Sets all state to zeros, for torch.distributed.checkpoint to load into.

        After a `step` that failed partway, `state_dict` raises so that broken state isn't saved.
        After ``discard_state()`` it returns zeros, and `step` raises until `load_state_dict` has
        been called. Call this on all ranks.
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
        self._offload.synchronize()
        keys = ("_settings", "_offload", "_clip", "_integrity", "_rounding")
        kept = {key: vars(self)[key] for key in keys}
        return {**super().__getstate__(), "_names": self.names, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_unpickled = "_store" not in vars(self)
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and groups would inherit it
        self._store = StateStore(self._offload)
        self._forget_plans()
        if not is_unpickled:
            self._rounding = Rounding(self._offload)
            return
        self._clip = QKClip(self._clip.config)
        self._audit = None
        self._registration = agreement.Registration(self._sets)

    @through_wrappers
    @torch.inference_mode(False)  # else the memory made here couldn't be changed later
    @torch.no_grad()
    def turn_on_cpu_offload(
        self, *, slot_bytes: Optional[int] = None, backend: Optional[Backend] = None
    ) -> None:
        """Keeps optimizer state in page-locked host memory between steps, from now on.

        A step streams the state through the device piece by piece while it computes; results are
        bit-identical. Call this on all ranks, at any time, and again to change the arguments.
        Without a ``backend``, it does nothing for parameters on the CPU.

        Args:
            slot_bytes: bytes of device memory that the state uses during a step. None is 5% of the
                device's state or 512 MiB, whichever is more. A chunk of matrices with more state
                than this uses as much as it needs.
            backend: makes the copies instead of the device's streams. With a `SimulatedHost` you
                can try offload on a CPU.

        Raises:
            ValueError: ``slot_bytes`` is less than 1, or ``backend`` isn't a backend. Nothing was
                changed.
        """
        params = ((p, g["use_muon"]) for g in self.param_groups for p in g["params"])
        self._offload.turn_on(self.state, params, slot_bytes, backend)
        self._forget_tensors()

    @through_wrappers
    @torch.inference_mode(False)  # else the memory made here couldn't be changed later
    @torch.no_grad()
    def turn_off_cpu_offload(self) -> None:
        """Moves all state back to the device of its parameters and turns CPU offload off."""
        self._offload.turn_off(self.state)
        self._forget_tensors()

    @property
    def cpu_offload(self) -> bool:
        """True if CPU offload is on."""
        return self._offload.is_on

    def synchronize_offload(self) -> None:
        """Waits until all state is in host memory. Call it before you read ``optim.state``.

        `state_dict` waits by itself.
        """
        self._offload.synchronize()


def _suggesting_kind(saved_groups: Sequence[Mapping[str, Any]]) -> AbstractContextManager[None]:
    """A context in which errors name the optimizer that wrote the checkpoint, if not this one."""
    if all(checkpoints.OWN_KEY in group for group in saved_groups):
        return nullcontext()
    from ..extras.foreign_checkpoints.kinds import suggesting_kind

    return suggesting_kind(saved_groups)
