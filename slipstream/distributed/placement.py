"""Where the processes of a run are: a Ray cluster, or this machine alone.

The run itself is process 0. For each other one there is an actor with a GPU of its own, or with a
share of the CPU. With GPUs process 0 takes one that Ray counts, too: a placeholder actor on this
machine holds it. The only module that imports Ray.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from slipstream.distributed.host import Host, join
from slipstream.distributed.team import Team
from slipstream.errors import ConfigError, SlipstreamError, StageTimeoutError, TrainingError
from slipstream.threads import DaemonThreads
from slipstream.training.fsdp2 import Ranks

ADDRESS = "RAY_ADDRESS"
"""Names the Ray cluster to run on, as everywhere in Ray; without it there is this machine alone."""

JOIN_SECONDS = 120.0
"""Processes that have not met after so long do not."""

TOLD = ("GLOO_", "NCCL_", "OMP_", "SLIPSTREAM_", "TORCH_")
"""Beginnings of the names of variables that the other processes get as this one has them."""

MOST_CALLS = 16
"""At once, of one process: a thread for each. None but orders and `Host.answers` take time."""

FETCH_SECONDS = 1.0
"""For so long a process waits for an answer before it says that there is none yet."""

LOCAL_SECONDS = 10.0
"""The same of places on this machine."""


class _Seat:
    """Holds the GPU that process 0 works on."""

    def gpus(self) -> list[str]:
        import ray

        return [str(name) for name in ray.get_gpu_ids()]


class _Member:
    """Calls go there one by one, and answers are fetched together, by a thread."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._open: dict[str, Future[Any]] = {}
        self._asked = 0
        self._gone: BaseException | None = None
        self._fetches = False

    def engine(self, call: str, method: str, *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._gone is not None:
                future.set_exception(self._gone)
                return future
            self._open[call] = future
            number, self._asked = self._asked, self._asked + 1
            if not self._fetches:
                self._fetches = True
                threading.Thread(target=self._fetch, name="answers", daemon=True).start()
        sent = _future(self._actor.engine.remote(number, call, method, given))
        sent.add_done_callback(self._sent)
        return future

    def withdraw(self, call: str) -> None:
        self._actor.withdraw.remote(call)

    def _sent(self, sent: Future[Any]) -> None:
        if (error := sent.exception()) is not None:
            self._fail(error)

    def _fetch(self) -> None:
        """Until nobody waits any more."""
        import ray

        while True:
            try:
                answers = ray.get(self._actor.answers.remote(FETCH_SECONDS))
            except Exception as error:
                self._fail(_cause(error))
                return
            for call, result, failure, stats in answers:
                with self._lock:
                    future = self._open.pop(call, None)
                if future is None:
                    continue
                if failure is None:
                    future.set_result((result, stats))
                else:
                    future.set_exception(failure)
            with self._lock:
                if not self._open:
                    self._fetches = False
                    return

    def _fail(self, error: BaseException) -> None:
        """Nothing comes from there any more."""
        with self._lock:
            self._gone = error
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            future.set_exception(error)


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
        self.gpu: int | None = None
        """What process 0 is to compute on, in each of its threads: see `use_gpu`."""
        self._actors: list[Any] = []
        # Only where it is named: Ray would find that of any other run on this machine, too.
        self._address = os.environ.get(ADDRESS)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            self._connect(size)
        try:
            self._actors = self._place(size, device, threads)
            self._ranks = self._meet(size, device, timeout_s)
        except BaseException:
            self.close()
            raise
        members = [_Member(actor) for actor in self._actors]
        self.team = Team(self._ranks, members, self._tell, on_failure)

    def _connect(self, size: int) -> None:
        """To the cluster that is named, or one for this process alone. Raises ConfigError."""
        given: dict[str, Any] = {"address": "local", "include_dashboard": False}
        given["num_cpus"] = max(size, os.cpu_count() or 1)
        if self._address:
            _check_answers(self._address)
            given = {"address": self._address}
        ends = signal.getsignal(signal.SIGTERM)
        # Ray would tell its makers that it runs.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray.init(**given, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(
                f"Ray cannot be used ({type(error).__name__}: {error}); a run is on one of the "
                f"cluster's machines, with its version of Ray and its token. Without {ADDRESS} it "
                "is on this machine alone"
            ) from error
        finally:
            # Ray ends the process at once; a run ends with a checkpoint.
            if ends is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, ends)

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
            (name,) = ray.get(self._seat.gpus.remote())
            self.gpu = _own_index(name)
        given = os.getcwd(), sys.path, threads
        # As here: what libraries are told there changes numbers, or finds the network.
        told = {k: v for k, v in os.environ.items() if k.startswith(TOLD)}
        actors = [
            ray.remote(Host)
            # Orders, calls and a thread that waits for answers at the same time.
            .options(max_concurrency=MOST_CALLS, runtime_env={"env_vars": told}, **options(index))
            .remote(*given)
            for index in range(1, size)
        ]
        self._actors = actors
        self._all([actor.ready.remote() for actor in actors], "were not ready")
        return actors

    def _all(self, references: list[Any], problem: str) -> None:
        """Wait for all. Raises what one of them raised, and StageTimeoutError."""
        ray = self._ray
        try:
            ray.get(references, timeout=JOIN_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise StageTimeoutError(
                f"the other {len(references)} processes of the run {problem} in "
                f"{JOIN_SECONDS:g} s; `ray status` says what the cluster waits for"
            ) from None
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

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
        self.use_gpu()
        # In a thread: where another process cannot come, it waits for as long as a stage may take.
        own = DaemonThreads("meeting").submit(lambda: join(address, 0, size, device, timeout_s))
        self._all(joining, f"have not met at {address}")
        ranks = own.result(JOIN_SECONDS)
        # PyTorch takes the first one for rank 0, and this machine may have given another.
        self.use_gpu()
        return ranks

    def _tell(
        self, number: int, part: str, method: str, given: tuple[Any, ...]
    ) -> list[Future[Any]]:
        # Put once: a batch may be large, and the others many.
        shared = self._ray.put(given)
        return [_future(a.order.remote(number, part, method, shared)) for a in self._actors]

    def use_gpu(self) -> None:
        """Have this thread compute on process 0's GPU: each thread has a choice of its own."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def close(self) -> None:
        """End the other processes."""
        ray = self._ray
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._owns_ray:
            ray.shutdown()


def _own_index(name: str) -> int:
    """Which of this process's GPUs Ray means: those that it may see are counted from 0. Raises
    ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(name)
    names = visible.split(",")
    if name not in names:
        raise ConfigError(
            f"Ray gives the run's first process GPU {name} of this machine, and it may see "
            f"CUDA_VISIBLE_DEVICES={visible} alone; start Ray and the run with the same"
        )
    return names.index(name)


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
