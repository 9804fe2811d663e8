"""Breaks one line of the engine at a time, and shows which tests notice.

    python scripts/mutate.py --results runs/mutants.json

Each mutant is tried in a clone of the last commit: first by the tests that tests/README.md lists
for its module, until one fails, then, if all of them pass, by all that `make test` runs. Run again
with the same results, the script goes on where it was interrupted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("torch-ext", "optimizer")


class Mutant(NamedTuple):
    """A line of a module, of which ``before`` becomes ``after``; it occurs once in the module."""

    module: str
    before: str
    after: str


MUTANTS = [
    Mutant("core.py", "torch._foreach_add_(outputs, buffers, alpha=momentum)", "pass"),
    Mutant("core.py", "rms * math.sqrt(max(rows, cols))", "rms * math.sqrt(min(rows, cols))"),
    Mutant("core.py", "d * w >= 0, w, 0.0", "d * w <= 0, w, 0.0"),
    Mutant("core.py", "v, 1.0 - beta2)", "v, beta2)"),
    Mutant("pipeline.py", 'if options.decay_lr == "adjusted" else', "if False else"),
    Mutant("step/binding.py", "sum(present[at : at + count])", "count"),
    Mutant(
        "newton_schulz/iteration.py", "last = scale if step == len(triples) else 1.0", "last = 1.0"
    ),
    Mutant("newton_schulz/forms.py", "restarts.append(stop)", "pass"),
    Mutant("matrices.py", "start - index * stride, stop - index * stride", "start, stop"),
    Mutant("split_notation.py", "start += _size(summand, sizes) * stride", "start += stride"),
    Mutant("regions.py", "if placement is not None and placement.strided:", "if False:"),
    Mutant(
        "regions.py",
        "if placement is None else placement.dim in dims",
        "if placement is None else True",
    ),
    Mutant("distributed/wire.py", "recipe.dtype if is_wide", "torch.float32 if is_wide"),
    Mutant("distributed/hsdp.py", "> sent * per_byte", "< sent * per_byte"),
    Mutant("distributed/owners.py", "of_owner[2] > most_matrices", "False"),
    Mutant(
        "distributed/zero2.py", "slot_rows.zero_()\n            else:", "pass\n            else:"
    ),
    Mutant(
        "distributed/agreement.py",
        "(votes & _FAILS).any() or digests.sum()",
        "(votes & _FAILS).any()",
    ),
    Mutant(
        "distributed/agreement.py",
        'if how_often != "plan" or may_skip or',
        'if how_often != "plan" or',
    ),
    Mutant("distributed/replicas.py", "* norms.maximum(norms[0])", "* norms.minimum(norms[0]) * 0"),
    Mutant(
        "async_utils.py", "if computed - updated > 1 or not gathering or makes_room:", "if True:"
    ),
    Mutant("step/grad_scaler.py", "if reached != everyone and not replicated", "if not reached"),
    Mutant(
        "qk_clip/scales.py",
        "torch.stack([least.sqrt(), least], 1)",
        "torch.stack([least, least], 1)",
    ),
    Mutant("qk_clip/clip.py", "_ = self._scales  # a rank", "pass  # a rank"),
    Mutant("state/specs.py", "torch.float32 if in_fp32 else param.dtype", "param.dtype"),
    Mutant("state/checkpoints.py", "if saved.use_muon != group.use_muon:", "if False:"),
    Mutant("weight_rounding.py", "bits + 0x8000 if", "bits + 0x7FFF if"),
    Mutant("adamw.py", "clip_weights(part.weights, clip, rounded_by)", "pass"),
    Mutant("cpu_offload/ring.py", "self._backend.wait(COMPUTE, load.arrived)", "pass"),
]


def tests_of(module: str) -> list[str]:
    """The test files of a module, from the table in tests/README.md: its longest prefix there."""
    table = (ROOT / "tests" / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", table, re.M))
    files = rows[max((prefix for prefix in rows if module.startswith(prefix)), key=len)]
    return [f"tests/{name}.py" for name in re.findall(r"test_\w+", files)]


def failing_test(checkout: Path, tests: list[str]) -> str:
    """The first test that fails, "" where none does."""
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "auto", "-m", "not slow", *tests]
    output = subprocess.run(run, cwd=checkout, capture_output=True, text=True).stdout
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    if failed is None and not re.search(r"^\d+ passed", output, re.M):
        raise RuntimeError(output[-2000:])
    return failed[1] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.json")
    args = parser.parse_args()
    known = json.loads(args.results.read_text()) if args.results.exists() else {}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for mutant in MUTANTS:
        key = f"{mutant.module}: {mutant.before} → {mutant.after}"
        if key not in known:
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
                checkout = Path(folder, "checkout")
                subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
                module = checkout / PACKAGE / mutant.module
                text = module.read_text()
                if text.count(mutant.before) != 1:
                    raise SystemExit(f"{key}: found {text.count(mutant.before)} times, not once")
                module.write_text(text.replace(mutant.before, mutant.after))
                killer = failing_test(checkout, tests_of(mutant.module)) or failing_test(
                    checkout, []
                )
            known[key] = {"killer": killer, "seconds": round(time.monotonic() - start)}
            args.results.write_text(json.dumps(known, indent=1, ensure_ascii=False))
        print(
            f"{known[key]['seconds']:5} s  {known[key]['killer'] or 'SURVIVES':90}  {key}",
            flush=True,
        )
    killed = sum(bool(known_one["killer"]) for known_one in known.values())
    print(f"{killed} of {len(MUTANTS)} mutants die")


if __name__ == "__main__":
    main()
