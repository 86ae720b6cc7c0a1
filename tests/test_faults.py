"""The faults that `make faults` plants: that each still has its place in the code. It runs them for real."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

from faults import FAULTS, Fault  # noqa: E402


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_and_leaves_valid_code(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    broken = fault.plant(text)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))
    assert all((ROOT / test).is_file() for test in fault.tests)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_place_is_found_however_it_is_laid_out() -> None:
    fault = Fault("", "", "    call(a, [b], c)\n    done()\n", "    call(a,\n         c)\n    done()\n")
    text = "if a:\n        call(\n            a, [b,],\n            c,\n        )\n        done()\n"
    assert fault.plant(text) == "if a:\n        call(a,\n             c)\n        done()\n"
    assert fault.plant("    call(a, [b], c)\n    done()\n") == "    call(a,\n         c)\n    done()\n"
    assert not fault.find("    call(a, [b, c])\n    done()\n")


@pytest.mark.parametrize("text", ["", "call(a)\ncall( a )\n"])
def test_a_place_that_is_gone_or_there_twice_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"^x: y has [02] places that read 'call\(a\)'; bring"):
        Fault("x", "y", "call(a)", "").plant(text)
