"""Helpers: real gloo ranks in processes forked from a server that has torch imported, so that each starts quickly."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 150.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ]
)


def run_ranks(world_size: int, work: Callable[..., Any], *arguments: Any, fault: str = "") -> list[Any]:
    """Run `work(*arguments)` on gloo ranks. Returns what each rank returned; its exit code where it died, and the
    exception where it raised one.

    Args:
        work: a function of a test module.
        fault: value of LAUNCHER_FAULT.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            _context.Process(target=_rank, args=(rank, world_size, folder, fault, pipes[rank][1], work, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        results = []
        for process, (receiver, _) in zip(ranks, pipes, strict=True):
            try:
                results.append(receiver.recv() if receiver.poll(TIMEOUT) else "timeout")
            except EOFError:
                process.join(TIMEOUT)
                results.append(process.exitcode)
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()
        return results


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    fault: str,
    sender: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    import torch
    import torch.distributed as dist

    from launcher import faults

    faults._TEXT = fault
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        result = work(*arguments)
    except BaseException as error:
        traceback.print_exc()
        result = error
    sender.send(result)
    sender.close()
    os._exit(0)
