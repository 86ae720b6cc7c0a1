"""Settings of the order in which requests are served."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Settings


class SchedulingConfig(Settings):
    """In which order requests run, and which are preempted. Service is counted in passes over the whole model
    (layers run / layers).

    policy               "fcfs": first come, first served; "sjf": shortest predicted output first; "mlfq":
                         least attained service first, in queues; "laps": as mlfq, until a request's
                         acceptance is stable; from then on by its estimated remaining time [LAPS-SD]
    num_queues           of mlfq and laps; the number and the thresholds are our choice, the paper gives none
    first_quantum        service that a request gets in the highest queue
    quantum_growth       factor between the quanta of a queue and of the one above it
    stability_window     of laps: acceptance is stable when its means over the last so many rounds, and over
                         as many rounds before them, differ by less than stability_tolerance
    stability_tolerance  see stability_window
    max_slowdown         a request whose time since arrival is so many times the time that it would take alone
                         goes before all others, the oldest first; None = never, and long requests may starve
    expected_tokens      output length that is assumed until the first request has finished
    review_rounds        of policies that preempt: rounds between two decisions on which requests run, while
                         others wait
    swap_bytes           host memory for the KV of preempted requests whose blocks others need; 0 = such KV is
                         computed again
    """

    policy: Literal["fcfs", "sjf", "mlfq", "laps"] = "fcfs"
    num_queues: Annotated[int, Field(ge=1, le=16)] = 6
    first_quantum: Annotated[float, Field(gt=0.0, le=1e9)] = 16.0
    quantum_growth: Annotated[float, Field(gt=1.0, le=100.0)] = 2.0
    stability_window: Annotated[int, Field(ge=2, le=256)] = 8
    stability_tolerance: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    max_slowdown: Annotated[float, Field(ge=1.0)] | None = 20.0
    expected_tokens: Annotated[int, Field(ge=1)] = 256
    review_rounds: Annotated[int, Field(ge=1)] = 4
    swap_bytes: Annotated[int, Field(ge=0)] = 1 << 30
