"""Several nodes: two launchers on one machine that share nothing but a port, and what their drafters hold."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from launcher.cli import parse
from launcher.errors import ConfigError, UserError
from launcher.resume import copy_from_first_node
from launcher.runtime import RankEnv
from launcher.trial import Trial, run_trial
from tests.rank_pool import run_ranks
from tests.training import make_batch, make_step

FLAGS = ["--preset=tiny", "--device=cpu", "--data.row_length=64", "--train.anchors=4", "--nproc=2", "--nnodes=2"]
FLAGS += ["--checkpoint.every=2", "--train.schedule=constant", "--eval.prompts=2", "--eval.max_new_tokens=4"]


def mesh_of(nodes: int) -> DeviceMesh:
    """All ranks, in one dimension or as nodes of equal size."""
    ranks = torch.arange(dist.get_world_size()).view(nodes, -1)
    names = ("nodes", "drafters")
    return DeviceMesh("cpu", ranks, mesh_dim_names=names) if nodes > 1 else DeviceMesh("cpu", ranks.flatten())


def train(nodes: int) -> tuple[list[float], list[float], int]:
    """Losses and norms of two steps, sums of the weights, and bytes of weights that this rank holds."""
    world, rank = dist.get_world_size(), dist.get_rank()
    step, read = make_step(mesh_of(nodes)), []
    for number in range(2):
        for part in range(2):
            step.accumulate(make_batch((2 * number + part) * world + rank), last=part == 1)
        metrics = step.update(number).read()
        read += [metrics["loss"], metrics["grad_norm"]]
    weights = step.state()["model"].values()
    held = sum(weight.to_local().numel() for weight in weights)
    return read, [float(weight.full_tensor().sum()) for weight in weights], held


@pytest.mark.parametrize(("world", "nodes"), [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_a_copy_on_each_node_trains_as_one_over_all_ranks_does(world: int, nodes: int) -> None:
    flat, by_node = run_ranks(world, train, 1), run_ranks(world, train, nodes)
    for (numbers, sums, held), (other_numbers, other_sums, other_held) in zip(flat, by_node, strict=True):
        assert other_numbers == pytest.approx(numbers, rel=1e-5) and other_sums == pytest.approx(sums, rel=1e-4)
        assert other_held == pytest.approx(nodes * held, rel=0.01), "shards lie within a node"
    assert all(other[:2] == by_node[0][:2] for other in by_node), "the copies are the same to the last bit"


def copy(nodes: int) -> list[bool]:
    """Spoil the state everywhere but on the first node, copy it from there; what equals the first node's then."""
    mesh = mesh_of(nodes)
    step = make_step(mesh)
    step.accumulate(make_batch(dist.get_rank()), last=True)
    step.update(0)
    state = step.state()
    tensors = [tensor for part in state.values() for tensor in part.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    wanted = [tensor.detach().clone() for tensor in local]
    if mesh.get_coordinate()[0]:  # type: ignore[index]
        for tensor in local:
            tensor.detach().fill_(7)
    copy_from_first_node(state, mesh.get_group(0), torch.device("cpu"))
    return [torch.equal(one.detach(), other) for one, other in zip(local, wanted, strict=True)]


def test_other_nodes_get_their_state_from_the_first() -> None:
    for same in run_ranks(4, copy, 2):
        assert len(same) > 20 and all(same)


def start(folder: Path, port: int, *flags: str, fault: str = "", own: tuple[str, str] = ("", "")) -> list[Trial]:
    """Two launchers at once, each with a run folder and a cache of its own; `own`: a flag for each."""

    def node(number: int) -> Trial:
        mine = folder / f"node{number}"
        environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(mine / "cache")}
        words = [*FLAGS, f"--node-rank={number}", f"--master=127.0.0.1:{port}", *flags, *own[number].split()]
        return run_trial(words, mine / "run", environment | {"LAUNCHER_FAULT": fault}, limit=240)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(node, range(2)))


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return listener.getsockname()[1]

    return find


@pytest.mark.slow
def test_two_nodes_train_save_go_on_and_name_a_failure(tmp_path: Path, free_port: Callable[[], int]) -> None:
    first, second = start(tmp_path, free_port(), "--max-steps=4")
    for trial in (first, second):
        assert (trial.code, trial.status.state, trial.status.step) == (0, "finished", 4), trial.console
        assert trial.left == () and trial.checkpoint_problems == ()
    assert [entry["step"] for entry in first.metrics if "loss" in entry] == [1, 2, 3, 4] and second.metrics == ()
    assert "1t+1d on cpu" in first.console and "node 1 of 2" in second.console
    assert "acceptance length" in first.console
    # One checkpoint, whole, where the first drafter is; nothing of it is needed on the other node.
    assert sorted(path.name for path in (tmp_path / "node0/run/checkpoints").iterdir()) == [
        "latest",
        "step-2",
        "step-4",
    ]
    assert not (tmp_path / "node1/run/checkpoints").exists()

    failed = start(tmp_path, free_port(), "--max-steps=8", fault="raise@step:6:3")
    assert "resumed from" in failed[0].console and "at step 4" in failed[0].console
    for trial in failed:
        assert (trial.code, trial.status.state, trial.status.rank) == (1, "failed", 3), trial.console
        assert "injected error in phase step" in trial.console and trial.left == ()
        assert trial.seconds < 120
    steps = [entry["step"] for entry in failed[0].metrics if "loss" in entry]
    assert steps[:5] == [1, 2, 3, 4, 5], "the drafters of both nodes went on at step 4"


@pytest.mark.slow
def test_nodes_with_other_splits_are_refused_on_both(tmp_path: Path, free_port: Callable[[], int]) -> None:
    own = ("--topology.targets=1", "--topology.targets=2")
    for trial in start(tmp_path, free_port(), "--nproc=3", own=own):
        assert trial.code == 78 and "node 1 was started as 2t+1d, the first one as 1t+2d" in trial.console
        assert trial.left == () and trial.seconds < 100


def test_a_node_that_refuses_to_start_ends_the_other(tmp_path: Path, free_port: Callable[[], int]) -> None:
    (tmp_path / "mine.toml").touch()
    (tmp_path / "environment.lock").write_text('{"torch": "1.0.0"}')
    first, second = start(tmp_path, free_port(), own=("", f"--config={tmp_path}/mine.toml"))
    assert "environment.lock pins another environment:\n  torch: 1.0.0 -> " in second.console
    assert "telling the others at 127.0.0.1:" in second.console
    assert "node 1 (" in first.console and ") refused to start: " in first.console
    assert first.console.endswith(second.console.partition(" s\n")[2]), "the words of node 1, on both"
    for trial in (first, second):
        assert trial.code == 78 and trial.left == () and trial.seconds < 60
        assert not (trial.run_dir / "attempts").exists() and "Traceback" not in trial.console


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--nnodes=2"], "--master: several nodes need host:port of node 0"),
        (["--nnodes=2", "--master=somewhere"], "--master: several nodes need host:port"),
        (["--nnodes=2", "--master=:29500"], "--master: several nodes need host:port"),
        (["--nnodes=2", "--master=a:65536"], "--master: several nodes need host:port"),
        (["--nnodes=2", "--node-rank=2", "--master=a:1"], "--node-rank: 2 is no node of 2 -> 0 to 1"),
        (["--nnodes=2", "--node-rank=-1", "--master=a:1"], "--node-rank: -1 is no node of 2 -> 0 to 1"),
        (["--nnodes=0"], "--nnodes: 0 nodes cannot hold a run"),
        (["--node-rank=1"], "--node-rank: means something with several nodes only -> add --nnodes N"),
        (["--master=a:1"], "--master: means something with several nodes only -> add --nnodes N"),
        (["--nnodes=2", "--master=a:1", "--max-restarts=1"], "--max-restarts: works on one node only"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--preset=tiny", *flags])
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(line)


@pytest.mark.parametrize(("local", "world", "agents"), [(2, 6, 2), (4, 6, 2), (3, 8, 2)])
def test_nodes_of_different_sizes_are_refused(local: int, world: int, agents: int) -> None:
    env = RankEnv(0, 0, world, local, "127.0.0.1", 29500, 0, True)
    with pytest.raises(UserError, match=f"{agents} nodes with {world} ranks in all, but {local} of them on this one"):
        env.check_nodes({"GROUP_WORLD_SIZE": str(agents)})


def test_equal_nodes_and_a_bare_environment_pass() -> None:
    env: dict[str, Any] = {"master_addr": "127.0.0.1", "master_port": 1, "restart": 0, "agent_store": True}
    ranks = RankEnv(rank=5, local_rank=1, world_size=8, local_world_size=4, **env)
    ranks.check_nodes({"GROUP_WORLD_SIZE": "2"})
    ranks.check_nodes({})
    assert (ranks.nodes, ranks.node) == (2, 1)
