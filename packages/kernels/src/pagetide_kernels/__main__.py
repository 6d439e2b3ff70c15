"""``python -m pagetide_kernels``: which back ends work here, and why the others do not."""

from __future__ import annotations

import sys

import torch

from pagetide_kernels.__about__ import __version__
from pagetide_kernels.backends import available_backends
from pagetide_kernels.cuda.library import missing_reason


def main() -> int:
    """Print a line a device and back end; returns the exit status."""
    print(f"pagetide-kernels {__version__}, torch {torch.__version__}")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    for device in devices:
        label = device
        if device != "cpu":
            major, minor = torch.cuda.get_device_capability(device)
            label += f" ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
        print(label)
        for name, status in available_backends(device).items():
            print(f"  {name:<10} {'works' if status.is_available else 'no: ' + status.reason}")
    if len(devices) == 1:
        print("cuda\n  PyTorch sees no GPU here")
    print(f"compiled CUDA library: {missing_reason() or 'loads'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
