"""What tests of the command line run it with."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
SPECULATIVE = ["speculative.draft.layer=2", "speculative.check.layer=5"]
SLOW_RUN = """
import signal, sys, time, types
# A shell in the background starts what it starts with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.helpers.fake_llm import FakeLLM
module = types.ModuleType("hispec.llm")
module.LLM = FakeLLM
sys.modules["hispec.llm"] = module
FakeLLM.on_step = lambda number: time.sleep(0.01)
from hispec.cli import main
sys.exit(main(sys.argv[1:]))
"""
