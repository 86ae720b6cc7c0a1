"""What is said in a process that is forked from this one."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

from hispec import HiSpecError


def said_in_a_fork(call: Callable[[], Any]) -> str:
    """The name and text of the error that `call` raises there; empty if it raises none."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads here, which is the point
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # whoever waits without end is ended
        try:
            call()
        except HiSpecError as error:
            os.write(writes, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said
