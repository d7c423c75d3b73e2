"""One rank under torchrun, from its first line to its last."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher import faults
from launcher.cli import Command
from launcher.compile_cache import ActiveCache, activate, share_cache
from launcher.config import for_device
from launcher.deadlines import collective_patience, row_patience, scale_deadlines
from launcher.environment import record_environment
from launcher.errors import DeadlineError, LauncherError
from launcher.fingerprint import Fingerprint, collect
from launcher.groups import join_groups
from launcher.out_of_memory import record_history
from launcher.outcome import STATUS_VARIABLE, end_to_keep
from launcher.preflight import check_checkpoint
from launcher.refusal import blame_first_rank, first_rank_is_lost, refuse, tell_other_nodes
from launcher.run_folder import ATTEMPT_VARIABLE, keep_config, lock_run, make_run_dir, open_attempt
from launcher.runtime import Device, RankEnv, connect, point_traces, prepare_environment, set_threads
from launcher.signal_inbox import catch_signals
from launcher.split_choice import Choice, agree_on_split, choose_split, load_rates
from launcher.start_notices import announce_start, attempt_key
from launcher.started_as import STARTED_AS, under_torchrun
from launcher.topology import RoleName, Topology, build_topology

if TYPE_CHECKING:
    from launcher.barrier import OrderedTurns
    from launcher.control import Control
    from launcher.journal import Journal
    from launcher.lifecycle import Lifecycle
    from launcher.rank import Rank


@dataclass(frozen=True)
class Start:
    """What a rank knows before it joins the others; no torch yet."""

    command: Command
    env: RankEnv
    topology: Topology
    device: Device
    fingerprint: Fingerprint
    notices: tuple[str, ...]
    choice: Choice
    cache: ActiveCache | None
    """None where another rank of the node checks it, until that one has."""


def run_rank(command: Command) -> NoReturn:
    """Set this rank up, play its role, and leave with the code that `status.json` gets."""
    catch_signals()
    faults.trip("start")
    gc.disable()  # imports make a million objects that stay; looking for garbage among them takes a second
    env = RankEnv.read()
    os.environ.setdefault(STARTED_AS, under_torchrun(command, env))
    control: Control | None = None
    with ExitStack() as stack:
        try:
            start = prepare(stack, command, env)
            control = connect(env, command.config.runtime.init_timeout)
            control.hopeless = lambda: first_rank_is_lost(env)
            start = agree(start, control)
            attempt_dir = find_attempt(stack, start, control)
        except LauncherError as error:
            if control is not None and isinstance(error, DeadlineError):
                blame_first_rank(control, env, error, command.config.runtime.run_dir)
            elif env.nodes > 1 and env.local_rank == 0:
                tell_other_nodes(env, error)
            refuse(error, env.local_rank)
        play(stack, start, control, attempt_dir)


def prepare(stack: ExitStack, command: Command, env: RankEnv) -> Start:
    """Everything that must be settled before torch is imported: roles, device, environment, a node's compile cache."""
    env.check_nodes()
    device = prepare_environment(command.config, env)
    config, grown = scale_deadlines(for_device(command.config, device.kind), device.kind)
    make_run_dir(config.runtime.run_dir)
    fingerprint = collect()
    cache = None
    if env.local_rank == 0:
        session = os.environ.get(ATTEMPT_VARIABLE) or os.environ.get("TORCHELASTIC_RUN_ID", "run")
        cache = activate(config, device.kind, fingerprint, session)
        stack.callback(cache.close)
    rates = load_rates(cache.shared_folder if cache else None, config, device.ranks, env.nodes)
    choice = choose_split(config, env.local_world_size, rates, fingerprint.get("gpu"))
    settled, topology = replace(command, config=config), build_topology(choice.split, env.nodes)
    notices = (*(cache.notices if cache else ()), *grown)
    return Start(settled, env, topology, device, fingerprint, notices, choice, cache)


def agree(start: Start, control: Control) -> Start:
    """The same compile cache on every rank of a node, and the same split on every rank of every node."""
    env, timeout = start.env, start.command.config.runtime.init_timeout
    cache = share_cache(start.cache, control, env.node, timeout)
    os.environ.update(cache.environment)  # read by the compilers when they begin, not when torch is imported
    choice = agree_on_split(start.choice, control, env.rank, env.node, timeout)
    return replace(start, cache=cache, choice=choice, topology=build_topology(choice.split, env.nodes))


def find_attempt(stack: ExitStack, start: Start, control: Control) -> Path:
    """The folder of this attempt on this node: launch.sh's, or the next one, made by the node's first rank."""
    key, run_dir, config_file = attempt_key(start.env), start.command.config.runtime.run_dir, start.command.config_file
    given = os.environ.get(ATTEMPT_VARIABLE)
    if start.env.local_rank == 0:
        try:
            if given is None:
                stack.enter_context(lock_run(run_dir))
                if start.env.node == 0:  # checkpoints lie on the first node
                    check_checkpoint(start.command.config)
            folder = Path(given) if given else open_attempt(run_dir, start.command.config)
            strict, dry_run = start.command.strict_environment, start.command.config.dry_run
            changes = record_environment(run_dir, folder, start.fingerprint, strict, config_file, dry_run)
            if given is None:
                keep_config(run_dir, start.command.config, config_file)
        except LauncherError:
            control.set(key, None)
            raise
        keep = given is None and end_to_keep(run_dir, start.command.config.dry_run) is not None
        control.set(key, {"folder": str(folder), "notices": [*start.notices, *changes], "keep_status": keep})
    what = f"the first rank of node {start.env.node} to open the run folder"
    attempt = control.wait(key, what, start.command.config.runtime.init_timeout)
    if attempt is None:
        raise LauncherError("the first rank did not open the run folder", "see its message")
    if attempt["keep_status"]:
        os.environ[STATUS_VARIABLE] = attempt["folder"]
    return Path(attempt["folder"])


def play(stack: ExitStack, start: Start, control: Control, attempt_dir: Path) -> NoReturn:
    """Join the others, play the role, report the end. From here on every failure reaches every rank."""
    from launcher.journal import Journal
    from launcher.lifecycle import Lifecycle

    role, config = start.topology.roles[start.env.rank], start.command.config
    speaks = role.name == "drafter" and role.index == 0
    journal = Journal(role, attempt_dir / f"rank_{role.rank}.log", speaks)
    lifecycle = Lifecycle(control, role, start.topology.roles, config.runtime.run_dir, journal.path, config.runtime)
    lifecycle.start()
    try:
        rank = join(stack, start, control, attempt_dir, journal, lifecycle)
        code = lifecycle.finish(play_role(rank))
    except BaseException as error:  # the one place where a rank's end, whatever it is, becomes a code and a status
        code = lifecycle.fail(error)
    lifecycle.leave(code, stack.close)


def join(
    stack: ExitStack, start: Start, control: Control, attempt_dir: Path, journal: Journal, lifecycle: Lifecycle
) -> Rank:
    """Process groups and the memory watcher: what a rank needs beside the others."""
    env, device, topology, runtime = start.env, start.device, start.topology, start.command.config.runtime
    role = topology.roles[env.rank]
    announce_start(start, control, attempt_dir, journal)
    with lifecycle.phase("init", runtime.init_timeout):
        set_threads(device, env)
        if device.kind == "cuda" and runtime.memory_snapshot:
            record_history()
        if device.kind == "cuda":
            point_traces(attempt_dir / "traces")
        patience = collective_patience(runtime)
        groups = join_groups(stack, env, device, topology, control, runtime.init_timeout, patience)
    from launcher.memory import MemoryWatcher
    from launcher.rank import Rank  # with transformers; whoever cannot join need not wait for it

    memory = MemoryWatcher(
        runtime.run_dir / "memory.jsonl",
        role,
        device.uuid,
        runtime.memory_interval,
        lambda: lifecycle.phase_name,
    )
    stack.enter_context(memory)
    return Rank(
        start.command.config,
        role,
        topology,
        device,
        attempt_dir,
        control,
        lifecycle,
        groups,
        journal,
        memory,
        start.cache.shared_folder if start.cache else None,
        start.choice.guessed,
    )


def play_role(rank: Rank) -> str:
    """The work itself; returns the line that sums the run up, the same on every rank."""
    drafter_turns, target_turns = make_turns(rank, "drafter"), make_turns(rank, "target")
    if rank.role.name == "target":
        from launcher.target_role import run_target

        collect_garbage_from_here()
        run_target(rank, drafter_turns, target_turns)
    else:
        from launcher.drafter_role import run_drafter

        collect_garbage_from_here()
        summary = run_drafter(rank, drafter_turns, target_turns)
        if rank.leads_drafters:
            rank.control.set("summary", summary)
    rank.control.set(f"peaks/{rank.role.rank}", rank.memory.peaks())
    text = rank.wait_for("summary", "the first drafter to sum the run up", row_patience(rank.config.runtime))
    if rank.leads_drafters:
        rank.journal.announce(memory_summary(rank))
        rank.journal.announce(text)
    return text


def make_turns(rank: Rank, role: RoleName) -> OrderedTurns:
    """The turns of one role at the gate."""
    from launcher.barrier import OrderedTurns

    ranks, chosen = rank.topology.leaders_by_node(role), rank.config.compile
    return OrderedTurns(role, ranks, chosen.turns, chosen.turn_timeout, rank.control, rank.lifecycle)


def collect_garbage_from_here() -> None:
    """End the pause of `run_rank`; what was imported meanwhile is never looked at again."""
    gc.freeze()
    gc.enable()


def memory_summary(rank: Rank) -> str:
    """Highest memory of each role's ranks, by phase, once every rank has told its own."""
    from launcher.memory import peaks_by_role

    keys = [f"peaks/{role.rank}" for role in rank.topology.roles]
    what = "every rank's memory peaks"
    rank.lifecycle.wait_until(lambda: rank.control.has(*keys), what, rank.config.runtime.save_timeout, 0.02)
    return peaks_by_role({role: rank.control.get(key) for role, key in zip(rank.topology.roles, keys, strict=True)})
