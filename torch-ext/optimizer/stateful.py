"""What an optimizer offers of its state: it makes, saves, loads and copies it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from . import adamw, checkpoints, foreign
from .condition import Condition
from .cpu_offload import Hooks, Offloadable, Use
from .distributed import agreement
from .distributed import utils as dtensors
from .options import Group
from .planning import Survey
from .qk_clip.clip import QKClip
from .state import KEYS, Spec, keys_of, place, specs_of, zeros


class Stateful(Offloadable):
    """An optimizer whose state is known before there is any, and outlives the cluster it is on."""

    _clip: QKClip
    _registration: agreement.Registration
    _condition: Condition
    # Of each parameter its state, and the tensors in it, as the last step has checked them.
    _settled: Optional[list[tuple[Tensor, dict[str, Any], list[Any]]]]

    @property
    def is_broken(self) -> bool:
        """Whether a `step` or a load has left some of weights and state behind the rest.

        `load_state_dict` mends it, beside weights of the same checkpoint.
        """
        return self._condition.is_broken

    def _views(self) -> list[Group]:
        """What the rest of the package reads of each group."""
        raise NotImplementedError

    def _translate(self, group: dict[str, Any]) -> Group:
        """The view of a group."""
        raise NotImplementedError

    def _defaults_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What keys missing from a group are set to."""
        raise NotImplementedError

    def _look_at(self, groups: list[Group]) -> Survey:
        """What there is to plan of the groups, after checking them."""
        raise NotImplementedError

    def _sets(self) -> set[agreement.Ranks]:
        """The sets of ranks that share parameters with this one."""
        raise NotImplementedError

    def _forget_plans(self) -> None:
        """Has the next step plan and agree anew."""
        raise NotImplementedError

    @torch.inference_mode(False)  # state made under it could not be changed outside of it
    @torch.no_grad()
    def _init_state(self, groups: list[Group], found: Survey) -> None:
        """Creates whatever state is missing, for all trainable parameters, on all ranks alike."""
        missing: list[tuple[dict[str, Tensor], str, Spec]] = []
        on_host: list[tuple[dict[str, Tensor], str, Spec, Use]] = []
        for group, entries in zip(groups, found.entries):
            keys = keys_of(group)
            for index, param in enumerate(group["params"]):
                if not param.requires_grad:
                    continue
                own = self.state[param]
                if group["use_muon"]:
                    self._convert(own, "momentum_buffer", group["momentum_dtype"])
                else:
                    adamw.init_step(param, own, group)
                    for key in keys:  # as the parameter's, which may be changed at any time, too
                        self._convert(own, key, param.dtype)
                absent = [key for key in keys if own.get(key) is None]
                if absent:
                    entry = entries[index] if entries else None
                    specs = specs_of(param, entry, group, self._wide)
                    use = self._offload.use_of(param, group["use_muon"])
                    if use is None:
                        missing += [(own, key, specs[key]) for key in absent]
                    else:
                        on_host += [(own, key, specs[key], use) for key in absent]
        for own, key, spec in missing:
            own[key] = zeros(spec)
        self._offload.create(on_host)
        if self._offload.is_on or found.hosted:
            self._hold_state()

    def _settle(self) -> None:
        """Spares steps the checks of all state, as long as it is the same."""
        params = (param for group in self.param_groups for param in group["params"])
        some = [param for param in params if param in self.state]
        self._settled = [(p, self.state[p], list(self.state[p].values())) for p in some]

    def _unsettle(self) -> None:
        """Has state checked again where any of it is not the same tensor any more."""
        for param, own, values in self._settled or ():
            is_same = self.state.get(param) is own and len(own) == len(values)
            if not (is_same and all(map(operator.is_, own.values(), values))):
                self._settled = None
                return

    def _forget_strangers(self) -> None:
        """Lets go of state that is all zeros, of parameters that have left the groups.

        Trainers that swap parameters for their shards have had it made by `state_dict`. Kept, it
        would keep the whole model, too; made again it would be the same.
        """
        held = {id(param) for group in self.param_groups for param in group["params"]}
        strangers = [key for key in self.state if isinstance(key, Tensor) and id(key) not in held]
        if strangers:
            self._offload.settle()
        for param in strangers:
            own = self.state[param]
            if own.keys() <= {*KEYS, "step"} and all(_is_zero(value) for value in own.values()):
                del self.state[param]

    def _convert(self, own: dict[str, Tensor], key: str, dtype: Optional[torch.dtype]) -> None:
        """Follows a ``momentum_dtype`` that was changed."""
        value = own.get(key)
        if dtype is not None and value is not None and value.dtype != dtype:
            self._offload.settle()
            own[key] = place(value, dtype, dtensors.local(value).device)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim, with the state created if need be, and dtypes of options as text.

        torch.distributed.checkpoint takes no dtypes in full state dicts. Offloaded state is what is
        in host memory, which steps go on to change.

        Raises:
            RuntimeError: a `step` broke off, which has left no state that anybody could go on from;
                see `discard_state`.
        """
        self._condition.check(void_will_do=True)
        groups = self._views()
        self._init_state(groups, self._look_at(groups))
        self._offload.settle()
        held = {id(param) for group in groups for param in group["params"]}
        params = [key for key in self.state if isinstance(key, Tensor)]  # others are the user's own
        swapped_out = {p: self.state.pop(p) for p in params if id(p) not in held}
        try:
            state_dict = super().state_dict()
        finally:
            self.state.update(swapped_out)
        for group in state_dict["param_groups"]:
            group.update({k: str(v) for k, v in group.items() if isinstance(v, torch.dtype)})
        return state_dict

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

        def check(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            checkpoints.check_structure(given)
            if self._condition.is_broken and not self._condition.is_void:
                checkpoints.check_apart(given["state"], self.state)
            loaded.update(given, state=checkpoints.normalize_state(given["state"]))
            loaded["param_groups"] = checkpoints.merge_groups(
                self.param_groups, loaded["param_groups"], self._defaults_of
            )
            views = [self._translate({**group, "names": None}) for group in loaded["param_groups"]]
            groups = self._views()
            entries = self._look_at(groups).entries
            checkpoints.fit_state(groups, entries, views, loaded["state"], self._wide)
            checkpoints.check_checkpoint(
                groups, entries, views, loaded["state"], self.state, self._wide
            )
            rest = checkpoints.without_tensors(loaded["state"], loaded["param_groups"])
            return {**loaded, "state": rest}

        def restore(_: torch.optim.Optimizer) -> None:
            self._offload.forget()
            saved, states = loaded["param_groups"], loaded["state"]
            checkpoints.place_tensors(
                self.param_groups, self.state, saved, states, self._offload.home_of
            )
            groups = self._views()
            self._init_state(groups, self._look_at(groups))
            self._condition.finish_loading()

        # Behind the user's hooks before loading, and ahead of theirs after it.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        # What inference mode makes could not be changed outside of it.
        enabled = torch.is_grad_enabled()
        try:
            with (
                self._condition.loading(),
                torch.inference_mode(False),
                torch.set_grad_enabled(enabled),
            ):
                super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

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

        ``kind`` tells what wrote ``states``:

        - ``"torch_muon"``: torch.optim.Muon's and torch.optim.AdamW's, in a list.
        - ``"torch_adamw"``: torch.optim.AdamW's.
        - ``"motif"``: Motif's ``Muon``'s.
        - ``"llamafactory"``: Moonlight's ``Muon``'s, which LlamaFactory ships.
        - ``"nanochat"``: ``MuonAdamW``'s, or a list of ``DistMuonAdamW``'s, one for each rank.
        - ``"keller_jordan"``: any of his Muons', or a list of one for each rank.

        A mapping ``{"muon": …, "adamw": …}`` is for two optimizers, each as above; None in it has
        those parameters start anew. Lists of ranks are in their order, complete. State dicts that
        torch.distributed.checkpoint has made, by names, flattened or not, will do where they hold
        whole tensors, or DTensors that lie as the parameters do. Every rank of this optimizer gets
        all of ``states``, and takes its part without traffic.

        Which parameter is which is told by names, where both have them for all parameters; else by
        position, which fits where the preset of the source made the groups from what the source was
        given; else by ``params``.

        AdamW's moments and steps are taken as they are. Momentum keeps its dtype; with constant μ
        the averaged one (``"ema"``) is 1 − μ of the summed one (``"classical"``), and it becomes
        what its group has. A matrix that AdamW trained begins with ``exp_avg`` as averaged
        momentum. Second moments of nanochat are taken by groups with ``beta2``. What is used here
        is a copy.

        Args:
            states: state dicts, already loaded: ``torch.load(path, weights_only=True)``.
            kind: what wrote them, see above.
            params: parameters, (name, parameter) pairs, or names: all of them, in the order in
                which the other optimizer was given them, whatever it made of that. Of two
                optimizers each takes those that are its own. They may be frozen ones, without
                state.
            hyperparameters: bring ``lr``, ``weight_decay``, ``momentum``, ``nesterov``, ``beta2``,
                betas, eps, ``maximize`` and what schedulers keep in groups (``initial_lr``, …), as
                far as both have them; False keeps the groups as they are. How matrices are
                orthogonalized and scaled always stays. A matrix that AdamW trained brings its rates
                only to ``adjust_lr="match_rms_adamw"``, and no momentum.

        Raises:
            ValueError: something does not fit, with the parameter's name; nothing was loaded.

        Example:
            >>> load = functools.partial(torch.load, weights_only=True)
            >>> groups = [{"params": matrices}, {"params": others, "use_muon": False}]
            >>> optimizer = Muon(**presets.torch_muon(groups))
            >>> optimizer.load_foreign_state_dict([load("muon.pt"), load("adamw.pt")],
            ...                                   kind="torch_muon")
            >>> optimizer = Muon(get_default_muon_param_groups(model))
            >>> optimizer.load_foreign_state_dict(load("adamw.pt"), kind="torch_adamw",
            ...                                   params=model.parameters())
            >>> optimizer = Muon(**presets.motif(get_default_muon_param_groups(model)))
            >>> optimizer.load_foreign_state_dict(load("motif.pt"), kind="motif")
            >>> optimizer = Muon(**presets.moonlight(muon_params=matrices, adamw_params=others))
            >>> optimizer.load_foreign_state_dict(load("optimizer.pt"), kind="llamafactory")
            >>> optimizer = DistMuonAdamW(param_groups)
            >>> ranks = [load(f"optim_021400_rank{rank}.pt") for rank in range(8)]
            >>> optimizer.load_foreign_state_dict(ranks, kind="nanochat")
            >>> optimizer = Muon(**presets.keller_jordan(param_groups))
            >>> optimizer.load_foreign_state_dict(ranks, kind="keller_jordan")
        """
        groups = self._views()
        found = self._look_at(groups)
        state_dict = foreign.to_state_dict(
            states,
            kind,
            params,
            hyperparameters,
            own_groups=self.param_groups,
            groups=groups,
            names=found.names,
            entries=found.entries,
            wide=self._wide,
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
        self._condition.discard()
        self._work = None
        for param in [key for key in self.state if isinstance(key, Tensor)]:
            del self.state[param]
        self._offload.forget()
        groups = self._views()
        self._init_state(groups, self._look_at(groups))

    def __getstate__(self) -> dict[str, Any]:
        self._condition.check()
        self._offload.settle()
        kept = ("_wide", "_offload", "_tags", "_clip", "_condition")
        return {
            **super().__getstate__(),
            "_names": self.names,
            **{key: vars(self)[key] for key in kept},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_unpickled = "_hooks" not in vars(self)
        if not is_unpickled:
            self._condition.begin_loading()  # behind all checks; its tensors are still to be placed
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and groups would inherit it
        self._forget_plans()
        if is_unpickled:
            self._hooks = Hooks(self, None) if self.cpu_offload == "backward" else None
            self._registration = agreement.Registration(self._sets)


def _is_zero(value: Tensor) -> bool:
    """Whether a tensor has nothing but zeros, or no numbers at all."""
    return value.is_meta or not dtensors.local(value).any()
