"""Lets the test files import their helpers by name, whatever directory pytest starts in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
