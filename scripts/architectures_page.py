"""Writes benchmarks/results/architectures.md, which shows what `Muon.for_model` finds in models.

It runs in the environment of `make test-clients`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    sys.path[:0] = [str(ROOT / folder) for folder in ("tests/clients", "tests", "torch-ext")]
    importlib.import_module("conftest")  # finds timm, and asks no Hub
    families = importlib.import_module("causal_families")
    warnings.simplefilter("ignore")  # the page tells of them
    families.PAGE.parent.mkdir(exist_ok=True)
    families.PAGE.write_text(families.page(importlib.import_module("optimizer")))
    print(f"Wrote {families.PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
