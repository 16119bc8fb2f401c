"""Helpers of other folders that the tests of checks use."""

import sys
from pathlib import Path

for helpers in ("models", "trainers"):
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))
