"""The kernel under test, loaded as users load it; conftest.py has pointed LOCAL_KERNELS at it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels import get_kernel

optimizer = get_kernel("org/optimizer", version=1)

NS_OPTIONS = [f"ns_{key}" for key in ("algorithm", "eps", "eps_absolute", "norm_factor")]
NS_OPTIONS += ["ns_equilibrate", "ns_renormalize"]


def as_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as keys of groups have them, as the constructor takes them: rare ones together."""
    rare = {key.removeprefix("ns_"): options[key] for key in NS_OPTIONS if key in options}
    others = {key: value for key, value in options.items() if key not in NS_OPTIONS}
    return {**others, "ns_options": rare} if rare else others
