"""Processes of one group on this machine, which run scenarios one after another and tell how each ended."""

from __future__ import annotations

import gc
import os
import queue
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autostream.tuning import select

Scenario = Callable[[int, int, dist.ProcessGroup], None]
"""Takes its rank, the number of processes and a group of its own; raises if something is not as it should be."""

LOST = "it has not ended"

IMPORTED = ["tests.distributed.scenarios", "torch._dynamo.convert_frame", "torch._functorch.aot_autograd"]
"""What scenarios import, and a first capture, which takes seconds."""


def outcomes(
    scenarios: Mapping[str, Scenario], processes: int, seconds: float = 240.0, backend: str = "gloo"
) -> dict[str, list[str]]:
    """How each scenario ended in each process: ``""``, the traceback of what it raised, or that it has not ended.

    Args:
        scenarios: functions of a module, by name.
        processes: how many run all of them, each once.
        seconds: after which processes that still run are killed, each by its id.
        backend: of the group; for ``"nccl"`` each has a GPU.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forks of a process that has imported all; but CUDA may have started there, and no fork could use it.
    context: Any = mp.get_context("spawn" if backend == "nccl" else "forkserver")
    context.set_forkserver_preload(IMPORTED)
    told: Any = context.Queue()
    arguments = (processes, port, list(scenarios.items()), os.environ["AUTOSTREAM_CACHE_DIR"], backend, told)
    started = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(processes)]
    found = {name: [LOST] * processes for name in scenarios}
    end = time.monotonic() + seconds
    try:
        for each in started:
            each.start()
        while any(LOST in ended for ended in found.values()) and time.monotonic() < end:
            try:
                rank, name, text = told.get(timeout=0.5)
            except queue.Empty:
                if not any(each.is_alive() for each in started):
                    break
            else:
                found[name][rank] = text
    finally:
        for each in started:
            each.join(max(0.0, min(5.0, end - time.monotonic())))
            if each.is_alive():
                each.kill()
                each.join()
    return found


def torchrun(script: Path, processes: int) -> tuple[int, str]:
    """Run a script in processes that ``torchrun`` starts and ends; its exit status, and what all have printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment) as agent:
        try:
            told, _ = agent.communicate(timeout=120)
        finally:
            agent.terminate()  # which ends what it has started
    return agent.returncode, told


def _process(
    rank: int,
    processes: int,
    port: int,
    scenarios: Sequence[tuple[str, Scenario]],
    cache: str,
    backend: str,
    told: Any,
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # As in ``conftest.py``:
    select._ROUND_US["cpu"] = 1.0
    gc.set_threshold(20_000, 10, 10)
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    os.environ["AUTOSTREAM_CACHE_DIR"] = cache
    store = dist.TCPStore("127.0.0.1", port, processes, is_master=rank == 0)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    for name, scenario in scenarios:
        torch._dynamo.reset()
        group = dist.new_group()
        try:
            scenario(rank, processes, group)
        except BaseException:
            told.put((rank, name, traceback.format_exc()))
        else:
            told.put((rank, name, ""))
    told.close()
    told.join_thread()
    os._exit(0)  # a group of which a process has died would wait for it
