"""Writes benchmarks/results/architectures.md, which shows what `Muon.for_model` finds in models.

It runs in the environment of `make test-clients`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def main() -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/clients", "tests", "torch-ext")]
    importlib.import_module("conftest")  # finds timm, and asks no Hub
    families = importlib.import_module("causal_families")
    warnings.simplefilter("ignore")  # the page tells of them
    families.PAGE.parent.mkdir(exist_ok=True)
    families.PAGE.write_text(page(families, importlib.import_module("optimizer")))
    print(f"Wrote {families.PAGE.relative_to(ROOT)}")


def page(families: Any, optimizer: Any) -> str:
    """Rows of all families; those of which the same is found share one."""
    names: dict[str, list[str]] = {}
    for name in families.FAMILIES:
        with torch.device("meta"):
            model = families.build(name)
        splits = [
            optimizer.Muon.for_model(model, lr=1e-3, per_head=per_head).defaults["split"]
            for per_head in (False, True)
        ]
        row = families.cells(*splits, [trap.kind for trap in optimizer.describe(model).warnings])
        names.setdefault(row, []).append(f"`{name}`")
    release = families.TABLE["transformers"]
    head = f"""# Causal language models and mixtures of experts in transformers {release}

This table shows what `Muon.for_model` finds in a small model of each family, with a hidden size of
64 and 4 query heads and 2 key heads of 16 rows each. A `split` lists the rows of each matrix in one
tensor. Muon trains all other matrices whole. AdamW trains embeddings, output heads, vectors,
convolutions, and tables. `scripts/architectures_page.py` writes this page.

| families | several matrices in one tensor | `per_head=True` parts, too | warnings of `describe` |
|---|---|---|---|
"""
    return head + "".join(f"| {', '.join(found)} | {row}\n" for row, found in names.items())


if __name__ == "__main__":
    main()
