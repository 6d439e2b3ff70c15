"""Lets the test files import their helpers by name, whatever directory pytest starts in."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

# Products this small take longer to share between threads than to compute, most of all on a busy
# machine; test_cpu.py runs with more than one.
torch.set_num_threads(1)
