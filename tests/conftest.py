"""Tests import the scripts from the repository's root and the toy environments from this directory."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
