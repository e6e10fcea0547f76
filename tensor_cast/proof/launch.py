"""Ranks as processes of this machine: a pool that serves many runs, and process groups under the axis names.

The pool forks its ranks from a clean server process that has imported torch once (``forkserver``), so a rank costs
milliseconds. Everything stays on the loopback interface; ranks find each other through a file. A rank that fails ends
the run with its traceback; a pool whose ranks may be stuck in a collective is killed and made anew at the next run.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from tensor_cast.layers.context import ParallelContext

#: Seconds a run may take, and a rank may wait for another.
TIMEOUT_S = 120.0
#: Seconds that the other ranks get to report once one has failed.
_GRACE_S = 1.0
#: What the server process imports before it forks.
_PRELOAD = ["tensor_cast.proof.session"]


class RankError(RuntimeError):
    """Ranks failed or did not answer.

    Args:
        failures: rank -> traceback text, or a sentence on how it ended.
        size: ranks of the run.
    """

    def __init__(self, failures: dict[int, str], size: int) -> None:
        self.failures = failures
        ranks = ", ".join(map(str, sorted(failures)))
        first = min(failures)
        others = "" if len(failures) == 1 else f" (ranks {ranks} failed)"
        super().__init__(f"rank {first} of {size} failed{others}:\n{failures[first].rstrip()}")


class RankPool:
    """Processes that run functions as ranks 0 to ``size - 1``.

    Args:
        size: how many.
        timeout_s: limit of one run.
    """

    def __init__(self, size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.size = size
        self.alive = True
        self._timeout_s = timeout_s
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        context = _context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, str(Path(self._folder, "store")), theirs, timeout_s),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``function(*arguments[r])`` on rank r, for as many ranks as there are arguments; the results in rank order.

        Function, arguments and results travel by pickle, so the function must be importable by name.

        Raises:
            RankError: a rank raised, ended or did not answer in time.
        """
        size = len(arguments)
        if not self.alive or size > self.size:
            raise ValueError(f"a pool of {self.size} ranks (alive: {self.alive}) cannot run {size}")
        pending = {}
        for rank, args in enumerate(arguments):
            self._pipes[rank].send_bytes(pickle.dumps((function, args)))
            pending[self._pipes[rank]] = rank
        results: list[Any] = [None] * size
        failures: dict[int, str] = {}
        limit = time.monotonic() + self._timeout_s
        try:
            while pending:
                ready = wait(list(pending), timeout=max(0.0, limit - time.monotonic()))
                if not ready:
                    break
                for pipe in ready:
                    rank = pending.pop(pipe)  # type: ignore[index]
                    try:
                        succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    except (EOFError, ConnectionError):
                        succeeded, value = False, f"the process ended with exit code {self._exit_code(rank)}"
                    if succeeded:
                        results[rank] = value
                    else:
                        failures[rank] = value
                        limit = min(limit, time.monotonic() + _GRACE_S)
        except BaseException:
            self.close()
            raise
        if pending:
            self.close()  # they may wait in a collective for ever
        if pending and not failures:
            failures = dict.fromkeys(pending.values(), f"no answer within {self._timeout_s:g} s")
        if failures:
            raise RankError(failures, size)
        return results

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(timeout=_GRACE_S)
        self.alive = False
        return self._processes[rank].exitcode

    def close(self) -> None:
        """End the processes."""
        self.alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


_pool: RankPool | None = None


def shared_pool(size: int) -> RankPool:
    """The process-wide pool with at least ``size`` ranks; it is made when first asked for and ends with the process."""
    global _pool
    if _pool is not None and not (_pool.alive and _pool.size >= size):
        close_shared_pool()
    if _pool is None:
        _pool = RankPool(size)
    return _pool


def close_shared_pool() -> None:
    """End the processes of :func:`shared_pool`, if there are any."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


atexit.register(close_shared_pool)


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(_PRELOAD)
    return context


# -- in the ranks -------------------------------------------------------------------------------------------------


def _serve(rank: int, size: int, store: str, pipe: Connection, timeout_s: float) -> None:
    """Take functions from the pipe and run them until it closes."""
    global _store, _timeout
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    _store, _timeout = dist.FileStore(store, size), timedelta(seconds=timeout_s)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone or wants no more; nothing here needs an orderly end
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


_store: Any = None
_timeout = timedelta(seconds=TIMEOUT_S)
_groups: dict[tuple[int, ...], Any] = {}
_named: dict[str, tuple[int, ...]] = {}


def axis_group(ctx: ParallelContext, axis: str) -> tuple[int, ...]:
    """Ranks of the group of ``axis`` that the rank of ``ctx`` belongs to, in group order.

    Args:
        ctx: the rank.
        axis: ``tp | dcp | dp | ep``.
    """
    match axis:
        case "tp":
            return tuple(range(ctx.dp_rank * ctx.tp, (ctx.dp_rank + 1) * ctx.tp))
        case "dcp":
            first = ctx.rank - ctx.dcp_rank
            return tuple(range(first, first + ctx.dcp))
        case "dp":
            return tuple(range(ctx.tp_rank, ctx.tp * ctx.dp, ctx.tp))
        case "ep":
            first = ctx.rank - ctx.ep_rank * ctx.moe_tp
            return tuple(range(first, first + ctx.ep * ctx.moe_tp, ctx.moe_tp))
    raise ValueError(f"no groups for the axis {axis!r}")


def use_axes(ctx: ParallelContext) -> None:
    """In a rank of a pool: make the axis names stand for the groups of this layout.

    Groups are made once per set of ranks and kept. An axis of one rank has no group: nothing may ask for it.
    """
    use_groups({axis: axis_group(ctx, axis) for axis in ("tp", "dcp", "dp", "ep")}, ctx.rank)


def use_groups(groups: Mapping[str, tuple[int, ...]], rank: int) -> None:
    """As :func:`use_axes` for groups of any ranks of the pool; ``rank`` is this one."""
    for axis, ranks in groups.items():
        if _named.get(axis) == ranks:
            continue
        if _named.pop(axis, None):
            _unregister_process_group(axis)
        if len(ranks) == 1:
            continue
        if ranks not in _groups:
            _groups[ranks] = _gloo(ranks, rank)
        _register_process_group(axis, _groups[ranks])
        _named[axis] = ranks


def _gloo(ranks: tuple[int, ...], rank: int) -> Any:
    """A process group of some ranks; only they take part in making it."""
    store = dist.PrefixStore("ranks " + " ".join(map(str, ranks)), _store)
    place, size = ranks.index(rank), len(ranks)
    group = dist.ProcessGroup(store, place, size)
    backend = dist.ProcessGroupGloo(store, place, size, _timeout)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
