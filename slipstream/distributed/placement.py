"""Starts the processes of a run, on a Ray cluster or on this machine.

The run itself is process 0. Each other process is a Ray actor with its own GPU, or with one CPU.
With GPUs, a placeholder actor on this machine reserves process 0's GPU, so that Ray counts it. This
is the only module that imports Ray.
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
"""Environment variable with the address of the Ray cluster, Ray's own. If unset, the run stays on
this machine."""

JOIN_SECONDS = 120.0
"""Seconds that the processes have to start and to join."""

ENV_PREFIXES = ("GLOO_", "NCCL_", "OMP_", "SLIPSTREAM_", "TORCH_")
"""Environment variables with these prefixes are copied to the other processes."""

MAX_CALLS = 16
"""Concurrent calls per host, one thread each. Only commands and `Host.answers` last long."""

FETCH_SECONDS = 1.0
"""Seconds that `Host.answers` waits for a first answer."""

LOCAL_PROCESSES = 16
"""Number of processes that one machine may always run; with more cores it may run more."""

MAX_PROCESSES = 16_384
"""Maximum number of processes of a run."""

LOCAL_SECONDS = 10.0
"""Seconds to wait for free resources without a cluster."""


class _GPUReservation:
    """An actor that holds process 0's GPU."""

    def gpus(self) -> list[str]:
        import ray

        return [str(name) for name in ray.get_gpu_ids()]


class _Member:
    """A `team.Member` over a Ray actor. Calls are sent one by one; a thread fetches answers in
    batches."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._lock = threading.Lock()
        self._open: dict[str, Future[Any]] = {}
        self._next = 0
        self._failure: BaseException | None = None
        self._fetching = False

    def engine(self, call: str, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
                return future
            self._open[call] = future
            number, self._next = self._next, self._next + 1
            if not self._fetching:
                self._fetching = True
                threading.Thread(target=self._fetch, name="answers", daemon=True).start()
        sent = _future(self._actor.engine.remote(number, call, method, args))
        sent.add_done_callback(self._sent)
        return future

    def withdraw(self, call: str) -> None:
        self._actor.withdraw.remote(call)

    def _sent(self, sent: Future[Any]) -> None:
        if (error := sent.exception()) is not None:
            self._fail(error)

    def _fetch(self) -> None:
        """Fetch answers until no call is open."""
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
                    self._fetching = False
                    return

    def _fail(self, error: BaseException) -> None:
        """Fail all open calls, and each later one: the actor no longer answers."""
        with self._lock:
            self._failure = error
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            future.set_exception(error)


class Cluster:
    """The processes of a run, connected until `close`."""

    def __init__(
        self,
        size: int,
        *,
        device: str,
        timeout_s: float,
        threads: int | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Start `size` processes, including process 0, on `device` ("cpu" or "cuda").

        Collectives fail after `timeout_s` seconds. `threads` limits torch's threads in the other
        processes. Raises ConfigError if Ray is not installed or has too few resources, and
        StageTimeoutError if the processes do not join in time.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "a run with several processes needs Ray, which is not installed; run `pip install "
                "'slipstream-rl[ray]'`, or set trainer.nnodes=1 trainer.n_gpus_per_node=1 (0 "
                "without a GPU)"
            ) from None
        self._ray = ray
        self._group: Any = None
        self.gpu: int | None = None
        """Index of process 0's GPU, None on CPU. Each thread selects it with `use_gpu`."""
        self._actors: list[Any] = []
        # Explicit: Ray's own discovery would also find the cluster of another run on this machine.
        self._address = os.environ.get(ADDRESS)
        self._owns_ray = not ray.is_initialized()
        most = MAX_PROCESSES
        if self._owns_ray and self._address is None:
            most = max(LOCAL_PROCESSES, 4 * (os.cpu_count() or 1))
        if size > most:
            # Ray would start the processes one by one until the machine has no memory left.
            where = "a cluster runs" if self._address else f"without {ADDRESS}, one machine runs"
            raise ConfigError(
                f"a run of {size:,} processes is too large: {where} at most {most:,}; lower "
                f"trainer.nnodes or trainer.n_gpus_per_node, or start Ray on all machines and set "
                f"{ADDRESS}"
            )
        if self._owns_ray:
            self._connect(size)
        try:
            self._actors = self._place(size, device, threads)
            self._ranks = self._join(size, device, timeout_s)
        except BaseException:
            self.close()
            raise
        members = [_Member(actor) for actor in self._actors]
        self.team = Team(self._ranks, members, self._send, on_failure)

    def _connect(self, size: int) -> None:
        """Connect to the cluster at RAY_ADDRESS, or start a local one. Raises ConfigError."""
        options: dict[str, Any] = {"address": "local", "include_dashboard": False}
        options["num_cpus"] = max(size, os.cpu_count() or 1)
        if self._address:
            _check_reachable(self._address)
            options = {"address": self._address}
        handler = signal.getsignal(signal.SIGTERM)
        # Disable Ray's usage reports.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            self._ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(
                f"cannot connect to Ray ({type(error).__name__}: {error}); start the run on a "
                "machine of the cluster, with the cluster's version of Ray and its token, or unset "
                f"{ADDRESS} to use this machine alone"
            ) from error
        finally:
            # Ray's handler ends the process at once; the run's handler saves a checkpoint first.
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def _place(self, size: int, device: str, threads: int | None) -> list[Any]:
        """Reserve resources and start one `Host` actor per other process. Raises ConfigError."""
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy

        gpu = {"GPU": 1.0} if device == "cuda" else {}
        bundles = [{"CPU": 1.0, **gpu} for _ in range(size)]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
        self._group = placement_group(bundles, strategy="PACK")
        # Machines may still be joining a cluster; a local Ray has all its resources at once.
        kind, timeout = "GPU" if gpu else "CPU", JOIN_SECONDS if self._address else LOCAL_SECONDS
        if not self._group.wait(timeout):
            have, free = ray.cluster_resources(), ray.available_resources()
            raise ConfigError(
                f"a run of {size} processes needs {size} {kind}s, one of them on this machine; "
                f"{'the Ray cluster' if self._address else 'this machine'} has "
                f"{have.get(kind, 0):g} in total and {free.get(kind, 0):g} free; "
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
            self._reservation = ray.remote(_GPUReservation).options(**options(0)).remote()
            (name,) = ray.get(self._reservation.gpus.remote())
            self.gpu = _own_index(name)
        args = os.getcwd(), sys.path, threads
        # The same environment everywhere: these variables change numerics or select the network.
        env = {k: v for k, v in os.environ.items() if k.startswith(ENV_PREFIXES)}
        actors = [
            ray.remote(Host)
            # Commands, calls and the thread that fetches answers run concurrently.
            .options(max_concurrency=MAX_CALLS, runtime_env={"env_vars": env}, **options(index))
            .remote(*args)
            for index in range(1, size)
        ]
        self._actors = actors
        self._wait_for([actor.ready.remote() for actor in actors], "were not ready")
        return actors

    def _wait_for(self, references: list[Any], problem: str) -> None:
        """Wait for all references. Raises the first failure, or StageTimeoutError."""
        ray = self._ray
        try:
            ray.get(references, timeout=JOIN_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise StageTimeoutError(
                f"the other {len(references)} processes of the run {problem} in "
                f"{JOIN_SECONDS:g} s; run `ray status` to see what the cluster waits for"
            ) from None
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def _join(self, size: int, device: str, timeout_s: float) -> Ranks:
        """Form the process group of all processes, at a free port of this machine."""
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
        # In a thread: if another process cannot join, this call blocks for `timeout_s`.
        own = DaemonThreads("meeting").submit(lambda: join(address, 0, size, device, timeout_s))
        self._wait_for(joining, f"did not join at {address}")
        ranks = own.result(JOIN_SECONDS)
        # PyTorch selects GPU 0 for rank 0, but Ray may have assigned another one.
        self.use_gpu()
        return ranks

    def _send(
        self, number: int, part: str, method: str, args: tuple[Any, ...]
    ) -> list[Future[Any]]:
        # Store the arguments once: a batch may be large, and there may be many processes.
        shared = self._ray.put(args)
        return [_future(a.command.remote(number, part, method, shared)) for a in self._actors]

    def use_gpu(self) -> None:
        """Select process 0's GPU in the calling thread. CUDA's current device is per thread."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def close(self) -> None:
        """End the other processes, and Ray if this object started it."""
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
    """The CUDA index, in this process, of the GPU that Ray calls `name`.

    CUDA counts the GPUs of CUDA_VISIBLE_DEVICES from 0. Raises ConfigError if `name` is not among
    them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return int(name)
    names = visible.split(",")
    if name not in names:
        raise ConfigError(
            f"Ray assigned GPU {name} of this machine to the run's first process, which sees only "
            f"CUDA_VISIBLE_DEVICES={visible}; start Ray and the run with the same "
            "CUDA_VISIBLE_DEVICES"
        )
    return names.index(name)


def _check_reachable(address: str) -> None:
    """Raise ConfigError if no cluster answers at `address` within 10 s. Ray itself would try for
    minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if "://" in address or not port.isdecimal():
        raise ConfigError(
            f"{ADDRESS}={address}: the address must be HOST:PORT (`ray start --head` prints it) or "
            "auto, and the run must start on a machine of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"{ADDRESS}={address}: no Ray cluster answers there ({error}); start one (`ray start "
            "--head`), or unset it to use this machine alone"
        ) from None


def _future(reference: Any) -> Future[Any]:
    """A future of a Ray result that fails with the exception raised in the other process."""
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
    """The exception behind an error of Ray: a TrainingError if the process died."""
    import ray

    if isinstance(error, ray.exceptions.RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return TrainingError(
            f"another process of the run has died: {lines[0].rstrip('.')}. Its last messages are "
            "in Ray's logs (/tmp/ray/session_latest/logs on its machine); run the same command "
            "again to continue from the last checkpoint"
        )
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SlipstreamError) else error
