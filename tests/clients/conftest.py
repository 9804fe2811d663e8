"""Examples are imported by name; nothing asks the Hub."""

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
sys.path.insert(0, str(EXAMPLES))
os.environ["HF_HUB_OFFLINE"] = "1"  # LOCAL_KERNELS, set by then, needs no Hub
os.environ["OMP_NUM_THREADS"] = "1"
