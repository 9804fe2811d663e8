"""The names, order and defaults that users of Motif's kernel have already written down."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from kernel import optimizer

pytestmark = pytest.mark.kernels_ci

POSITIONAL = {
    "lr": 1e-3,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "weight_decay": 0.1,
    "adamw_betas": (0.9, 0.95),
    "adamw_eps": 1e-8,
    "none_grad": True,
    "debug": False,
    "clip_config": None,
    "warmup_step": 5,
    "chunk_size": -1,
    "use_distributed_muon": False,
    "expert_keys": None,
}


def test_the_constructor_takes_motifs_arguments_in_motifs_order():
    parameters = list(inspect.signature(optimizer.Muon).parameters.values())
    assert parameters[0].name == "params"
    positional = [p for p in parameters[1:] if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert {p.name: p.default for p in positional} == POSITIONAL
    assert [p.name for p in positional] == list(POSITIONAL)


def test_every_further_option_is_keyword_only():
    parameters = inspect.signature(optimizer.Muon).parameters.values()
    options = inspect.getmodule(optimizer.Muon).options.GROUP_OPTIONS
    keywords = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
    for_all_groups = {"exact", "comm_dtype", "consistency_check", "hsdp", "staging_bytes"}
    for_all_groups |= {"triton", "process_group", "grad_reduce", "ns_options"}
    rare = {f"ns_{key}" for key in inspect.getmodule(optimizer.Muon).options.NS_OPTIONS}
    assert keywords == options.keys() - POSITIONAL.keys() - rare | for_all_groups
    assert len(keywords) <= 24


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(3, 6, 4))


def test_what_users_of_motifs_kernel_write_runs():
    model = nn.ModuleDict({"wq": nn.Linear(4, 4), "experts": Experts()})
    groups = optimizer.muon.get_default_muon_param_groups(model, expert_keys=["experts"])
    optim = optimizer.Muon(groups, lr=1e-3, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optim.step()
    for p, old in zip(model.parameters(), before):
        assert not torch.equal(p, old)


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
    for name in optimizer.__all__:
        assert hasattr(optimizer, name)
    assert optimizer.__all__[0] == "Muon"
    assert dir(optimizer) == sorted(optimizer.__all__)
    assert dir(optimizer.recipes) == [
        "deepseek_v4",
        "glm_5",
        "kimi_k2",
        "kimi_k3",
        "moonlight",
        "nanochat",
    ]


def test_an_optimizer_prints_a_line_for_each_group():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 16))
    optim = optimizer.Muon(
        optimizer.get_default_muon_param_groups(model, adamw_lr=0.5), beta2=0.9, split={"0": [8, 8]}
    )
    assert repr(optim).splitlines() == [
        "Muon (",
        "    0: Muon, 2 parameters, lr=0.001, weight_decay=0.1, beta2=0.9, split={'0': [8, 8]}",
        "    1: AdamW, 2 parameters, lr=0.5, weight_decay=0.1",
        ")",
    ]
    group = {"params": [model[0].weight], "kind": "muon", "lr": 0.02}
    printed = repr(optimizer.MuonAdamW([group]))
    assert printed.startswith("MuonAdamW (\n    0: Muon, 1 parameter, lr=0.02, ")
