"""The compiled CUDA back end: hand-written kernels in one library for every Python and PyTorch."""

from __future__ import annotations
