"""The names, order and defaults that users of Motif's kernel have already written down."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import nn

from checkout import PACKAGE
from kernel import optimizer
from layouts import set_gradients

pytestmark = pytest.mark.kernels_ci

POSITIONAL = {
    **{"lr": 1e-3, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1},
    **{"adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8, "none_grad": True, "debug": False},
    **{"clip_config": None, "warmup_step": 5, "chunk_size": -1, "use_distributed_muon": False},
    "expert_keys": None,
}
FOR_ALL_GROUPS = {"exact", "comm_dtype", "consistency_check", "hsdp", "staging_bytes", "triton"}
FOR_ALL_GROUPS |= {"process_group", "grad_reduce", "ns_options"}
RECIPES = ["deepseek_v4", "glm_5", "kimi_k2", "kimi_k3", "moonlight", "nanochat"]


def test_the_constructor_takes_motifs_arguments_in_motifs_order_and_others_by_keyword_only():
    params, *others = inspect.signature(optimizer.Muon).parameters.values()
    assert params.name == "params"
    positional = [(p.name, p.default) for p in others if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == list(POSITIONAL.items())
    keywords = {p.name for p in others if p.kind == p.KEYWORD_ONLY}
    keys = optimizer.Muon([{"params": [], "use_muon": True}]).defaults.keys() - POSITIONAL.keys()
    rare = {key for key in keys if key.startswith("ns_")} - {"ns_coefficients", "ns_dtype"}
    assert keywords == keys - rare | FOR_ALL_GROUPS


def test_what_users_of_motifs_kernel_write_runs():
    experts = nn.ParameterDict({"w1": torch.randn(3, 6, 4)})
    model = nn.ModuleDict({"wq": nn.Linear(4, 4), "experts": experts})
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    optim = optimizer.Muon(groups, lr=1e-3, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model.parameters())
    optim.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_what_users_of_motifs_kernel_write_of_qk_clip_runs():
    weights = [nn.Parameter(torch.ones(8, 8)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.randn(8, 8)
    names = ["model.layers.3.attn.wq.weight", "model.layers.3.attn.wk.weight"]
    group = {"params": weights, "names": names, "use_muon": True}
    config = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 100}
    optim = optimizer.Muon([group], lr=0.0, clip_config=config)
    optim.step(qk_logits={3: torch.tensor([50.0, 400.0])})
    for weight in weights:
        assert (weight[:4] == 1).all() and (weight[4:] == 0.5).all()


def test_the_public_names_are_there():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assigned = {ast.unparse(n.targets[0]): n.value for n in body if isinstance(n, ast.Assign)}
    assert ast.literal_eval(assigned["__all__"]) == optimizer.__all__  # the Hub's card has them
    assert all(hasattr(optimizer, name) for name in optimizer.__all__)
    assert optimizer.__all__[0] == "Muon" and dir(optimizer) == sorted(optimizer.__all__)
    assert dir(optimizer.recipes) == RECIPES
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing


def test_an_optimizer_prints_a_line_for_each_group():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
    groups = optimizer.get_default_muon_param_groups(model, adamw_lr=0.5)
    optim = optimizer.Muon(groups, beta2=0.9, split={"0": [8, 8]})
    muon, adamw = repr(optim).splitlines()[1:-1]
    assert "Muon, 2" in muon and muon.endswith("beta2=0.9, split={'0': [8, 8]}")
    assert "AdamW, 2" in adamw and adamw.endswith("lr=0.5, weight_decay=0.1")
    group = {"params": [model[0].weight], "kind": "muon", "lr": 0.02}
    assert "Muon, 1" in repr(optimizer.MuonAdamW([group]))
