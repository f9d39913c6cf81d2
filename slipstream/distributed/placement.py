"""Where the processes of a run are: a Ray cluster, or this machine alone.

The run itself is process 0. For each other one there is an actor with a GPU of its own, or with a
share of the CPU. With GPUs process 0 takes one that Ray counts, too: a placeholder actor on this
machine holds it. The only module that imports Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slipstream.distributed.host import Host, join
from slipstream.distributed.team import Team
from slipstream.errors import ConfigError, SlipstreamError, StageTimeoutError, TrainingError
from slipstream.training.fsdp2 import Ranks

ADDRESS = "RAY_ADDRESS"
"""Names the Ray cluster to run on, as everywhere in Ray; without it there is this machine alone."""

JOIN_SECONDS = 120.0
"""Processes that have not met after so long do not."""

LOCAL_SECONDS = 10.0
"""The same of places on this machine."""


class _Seat:
    """Holds the GPU that process 0 works on."""

    def gpus(self) -> list[int]:
        import ray

        return [int(name) for name in ray.get_gpu_ids()]


@dataclass(frozen=True, slots=True)
class _Member:
    actor: Any

    def order(self, number: int, part: str, method: str, given: tuple[Any, ...]) -> Future[Any]:
        return _future(self.actor.order.remote(number, part, method, given))

    def engine(self, call: str, method: str, *given: Any) -> Future[Any]:
        return _future(self.actor.engine.remote(call, method, given))

    def withdraw(self, call: str) -> None:
        self.actor.withdraw.remote(call)


class Cluster:
    """The processes of a run, from the moment that they have met until `close`."""

    def __init__(
        self,
        size: int,
        *,
        device: str,
        timeout_s: float,
        threads: int | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`size` processes, process 0 included, that compute on `device` (cpu or cuda) in groups
        whose collectives end after `timeout_s`. `threads` is how many each of the others uses.

        Raises ConfigError where Ray is not installed, or has not so many places.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "several processes are placed by Ray, which is not installed; run `pip install "
                "'slipstream-rl[ray]'`, or set trainer.nnodes=1 trainer.n_gpus_per_node=1 (0 "
                "without a GPU)"
            ) from None
        self._ray = ray
        self._group: Any = None
        self._actors: list[Any] = []
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        # Only where it is named: Ray would find that of any other run on this machine, too.
        self._address = os.environ.get(ADDRESS)
        if self._address:
            _check_answers(self._address)
            ray.init(address=self._address, **quiet)
        else:
            cores = max(size, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        try:
            self._actors = self._place(size, device, threads)
            self._ranks = self._meet(size, device, timeout_s)
        except BaseException:
            self.close()
            raise
        self.team = Team(self._ranks, [_Member(actor) for actor in self._actors], on_failure)

    def _place(self, size: int, device: str, threads: int | None) -> list[Any]:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy

        gpu = {"GPU": 1.0} if device == "cuda" else {}
        bundles = [{"CPU": 1.0, **gpu} for _ in range(size)]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._group = placement_group(bundles, strategy="PACK")
        # Machines may still be joining a cluster that others have started; this one has all it has.
        kind, patience = "GPU" if gpu else "CPU", JOIN_SECONDS if self._address else LOCAL_SECONDS
        if not self._group.wait(patience):
            have, free = ray.cluster_resources(), ray.available_resources()
            raise ConfigError(
                f"a run of {size} processes takes {size} {kind}s, one of them on this machine, and "
                f"{'the Ray cluster' if self._address else 'this machine'} has "
                f"{have.get(kind, 0):g}, {free.get(kind, 0):g} of them free; "
                + (
                    "let more machines join (`ray start --address=...`), or lower trainer.nnodes"
                    if self._address
                    else f"start Ray on all machines and set {ADDRESS}, or lower trainer.nnodes"
                )
                + " or trainer.n_gpus_per_node"
            )

        def options(index: int) -> dict[str, Any]:
            strategy = Strategy(self._group, placement_group_bundle_index=index)
            return {"num_cpus": 1, "num_gpus": len(gpu), "scheduling_strategy": strategy}

        if gpu:
            self._seat = ray.remote(_Seat).options(**options(0)).remote()
            torch.cuda.set_device(ray.get(self._seat.gpus.remote())[0])
        host = ray.remote(Host)
        given = os.getcwd(), sys.path, threads
        actors = [host.options(**options(index)).remote(*given) for index in range(1, size)]
        try:
            ray.get([actor.ready.remote() for actor in actors], timeout=JOIN_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise StageTimeoutError(
                f"the other {size - 1} processes of the run were not ready in {JOIN_SECONDS:g} s; "
                "`ray status` says what the cluster waits for"
            ) from None
        return actors

    def _meet(self, size: int, device: str, timeout_s: float) -> Ranks:
        ray = self._ray
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address = f"{ray.util.get_node_ip_address()}:{port}"
        joining = [
            actor.join.remote(address, rank, size, device, timeout_s)
            for rank, actor in enumerate(self._actors, 1)
        ]
        ranks = join(address, 0, size, device, timeout_s)
        try:
            ray.get(joining, timeout=JOIN_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise StageTimeoutError(
                f"the {size} processes of the run have not met at {address} in {JOIN_SECONDS:g} s"
            ) from None
        return ranks

    def close(self) -> None:
        """End the other processes."""
        ray = self._ray
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if dist.is_initialized():
            dist.destroy_process_group()
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "://" in address or not port.isdecimal():
        raise ConfigError(
            f"{ADDRESS}={address}: a run is on one of the cluster's machines and takes its address "
            "as HOST:PORT (`ray start --head` prints it), or auto"
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"{ADDRESS}={address}: no Ray cluster answers there ({error}); start one (`ray start "
            "--head`), or unset it to use this machine alone"
        ) from None


def _future(reference: Any) -> Future[Any]:
    """That of a result of Ray's, whose failure is what was raised over there."""
    inner: Future[Any] = reference.future()
    outer: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(_cause(error))

    inner.add_done_callback(settle)
    return outer


def _cause(error: BaseException) -> BaseException:
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return TrainingError(
            f"another process of the run has died: {lines[0].rstrip('.')}. What it said last is in "
            "Ray's logs (/tmp/ray/session_latest/logs on its machine); the same command goes on "
            "from the last checkpoint"
        )
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SlipstreamError) else error
