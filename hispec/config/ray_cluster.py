"""The setting `ray`: workers on the machines of a Ray cluster."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from ..errors import shown
from .base import Settings
from .workers import Workers

LOCAL = "local"
CLIENT = "ray://"
NO_CLIENT = (
    "is a Ray Client; start the command on a machine of the cluster, with `ray job submit` for example"
)


def _whole_or_auto(least: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (is_number and value >= least):
            raise ValueError(f"must be auto, or an integer of at least {least}, got {shown(value)}")
        return value

    return BeforeValidator(check)


class RayConfig(Settings):
    """Workers as actors of a Ray cluster (docs/scaling.md).

    address   auto: RAY_ADDRESS, or the cluster that this machine is part of; local: a cluster of this machine
              alone, which ends with the LLM; or the HOST:PORT of a head node
    workers   how many; auto: as many as the cluster has room for at the start. Those that find none yet start
              when it has grown
    num_cpus  cores of each, which is also its number of threads; auto: 1 beside a GPU, else as many as the
              smallest machine has, at most 8
    num_gpus  GPUs of each, 0 or 1; auto: 1 if the cluster has any and engine.device allows it
    """

    address: Annotated[str, Field(min_length=1)] = "auto"
    workers: Workers = "auto"
    num_cpus: Annotated[int | Literal["auto"], _whole_or_auto(1)] = "auto"
    num_gpus: Annotated[int | Literal["auto"], _whole_or_auto(0)] = "auto"

    @field_validator("address")
    @classmethod
    def _no_client(cls, address: str) -> str:
        if address.startswith(CLIENT):
            raise ValueError(f"{shown(address)} {NO_CLIENT}")
        return address

    @field_validator("num_gpus")
    @classmethod
    def _at_most_one(cls, num_gpus: int | str) -> int | str:
        if isinstance(num_gpus, int) and num_gpus > 1:
            raise ValueError(
                f"an engine has one GPU, got {num_gpus}; set it to 1, and workers to their number"
            )
        return num_gpus
