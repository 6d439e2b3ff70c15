"""The Triton back end: one kernel a path, a work list made on the device, bits that stay put."""

from __future__ import annotations
