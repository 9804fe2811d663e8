"""A plain FSDP2 loop trains as one process does, but for the order in which ranks add up."""

from __future__ import annotations

import pytest

import ranked
import torchrun_loop
from plain import FP32, Trained, assert_same, linear, train, whole_weights_of

STEPS = 16


def ranks_train() -> Trained:
    losses, model = torchrun_loop.train(STEPS, **FP32)
    return Trained(losses, whole_weights_of(model))


@pytest.mark.usefixtures("one_thread")
def test_fsdp2_equals_one_process(tmp_path):
    found = ranked.run(ranks_train, tmp_path)
    assert_same(found, train(STEPS, 16, schedule=linear(STEPS), **FP32), rounding=1e-5)
