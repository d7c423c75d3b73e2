"""The parent of a run that `./launch.sh` starts: lock, numbered attempt, torchrun, signals, and the true exit code.

torchrun ends with 0 or 1 whatever happened, so the code comes from the run's status.json; where no rank could write
one, it is written here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher.cli import Command, parse
from launcher.compile_cache import private_folder
from launcher.config import Config
from launcher.console import Tee
from launcher.environment import check_environment
from launcher.errors import ExitCode
from launcher.fingerprint import collect
from launcher.gpus import gpu_uuids
from launcher.outcome import SUPERVISED, end_to_keep, record, reported_end, stopped_status
from launcher.outlet import guard_stderr
from launcher.preflight import check_checkpoint, wait_for_gpus
from launcher.restarts import Ended, going_on, may_restart, newest_checkpoint, wants_another_start, why_given_up
from launcher.roll_call import roll_call
from launcher.run_folder import ATTEMPT_VARIABLE, keep_config, lock_run, open_attempt
from launcher.runtime import RankEnv, choose_device
from launcher.signal_inbox import StoppedBy, Wishes
from launcher.split_choice import flags_of_another_start
from launcher.started_as import STARTED_AS, as_launched
from launcher.status import FILE_NAME, Status, final_box
from launcher.topology import resolve_split
from launcher.torchrun import PASSED_ON, Torchrun, collected_stops
from launcher.watched_torchrun import run_torchrun

# Of an attempt's folder, while it runs.
ERRORS = "torchrun"
MAIN, AGENT = (Path(__file__).resolve().parent / name for name in ("main.py", "agent.py"))
RESTARTS_VARIABLE = "LAUNCHER_RESTARTS"
CPU_RANKS = 8


def supervise(command: Command, worker: Path = MAIN) -> int:
    """Run a training command under torchrun and return the code of its status.json.

    Args:
        worker: the script that every rank runs.

    Raises:
        UserError: the run cannot start as asked: its split, its GPUs, a run folder in use, a changed environment, no
            usable checkpoint.
        RetryableError: other processes hold its GPUs.
        RollCallError: of several nodes another one cannot start, or does not call.
    """
    config, run_dir = command.config, command.config.runtime.run_dir
    guard_stderr()
    os.environ[STARTED_AS] = as_launched(command)  # for the ranks, and for this process
    with ExitStack() as held:
        with roll_call(command, say) as ready:
            gpus = gpu_uuids(config.runtime.device)
            ranks = choose_ranks(config, command.nproc, gpus)
            held.enter_context(lock_run(run_dir))
            if command.node_rank == 0:  # checkpoints lie on the first node
                check_checkpoint(config)
            fingerprint = collect()
            check_environment(run_dir, fingerprint, command.strict_environment, command.config_file)
            wait_for_gpus(own_gpus(config, gpus, ranks), config.runtime.gpu_wait, say)
            ready(ranks, config.runtime.device != "cpu" and bool(gpus), fingerprint)
        logs = run_dir / "logs"
        former_attempt = logs.resolve()
        try:
            ended = run_attempts(command, ranks, worker)
            while wants_another_start(ended.status, logs):
                ended = run_attempts(parse([*command.args, *flags_of_another_start(logs)]), ranks, worker)
        except StoppedBy as stop:  # while no attempt was there to take the signal
            if logs.resolve() != former_attempt and end_to_keep(run_dir, config.dry_run) is None:
                record_stop(stop, run_dir)
            raise
    return ExitCode.UNCLASSIFIED if ended.status.code is None else ended.status.code


def run_attempts(command: Command, ranks: int, worker: Path) -> Ended:
    """One attempt, and as many more as a failure allows; how the last one ended."""
    ended: list[Ended] = []
    runtime = command.config.runtime
    gpus = own_gpus(command.config, gpu_uuids(runtime.device), ranks)
    before = newest_checkpoint(command.config)
    while not ended or may_restart(ended, command.max_restarts):
        wait_for_gpus(gpus, runtime.gpu_wait, say)  # ranks of the last attempt may still be on their way out
        ended.append(run_attempt(command, ranks, worker, ended))
        command = going_on(command, before)
    return ended[-1]


def record_stop(stop: StoppedBy, run_dir: Path) -> None:
    """What a stop between two attempts leaves: the run would have gone on, and was asked not to."""
    last = reported_end(run_dir)
    status = stopped_status(stop.stop_code, stop.cause, "restart", (last and last.step) or 0, run_dir)
    record(status, run_dir)
    say(final_box(status).rstrip())


def own_gpus(config: Config, gpus: list[str], ranks: int) -> list[str]:
    """The GPUs that nobody else may compute on."""
    return [] if config.runtime.device == "cpu" or config.runtime.share_gpus else gpus[:ranks]


def run_attempt(command: Command, ranks: int, worker: Path, former: Sequence[Ended]) -> Ended:
    """One attempt, from its new folder to the status it ended with; takes all the stop signals of that time.

    Args:
        former: how those before it ended.
    """
    with collected_stops() as asked:
        ended = play_attempt(command, ranks, worker, former, asked)
        return replace(ended, stop_asked=bool(asked))


def play_attempt(command: Command, ranks: int, worker: Path, former: Sequence[Ended], asked: Wishes) -> Ended:
    """As `run_attempt`.

    Args:
        asked: stop signals so far; more may come.
    """
    config, run_dir = command.config, command.config.runtime.run_dir
    attempt, kept, restarts = open_attempt(run_dir, config), end_to_keep(run_dir, config.dry_run), len(former)
    keep_config(run_dir, config, command.config_file)
    # In the place of the former one: a disk that fills up later still takes an end where this is.
    if not record(Status(state="running", reason="starting"), run_dir):
        (run_dir / FILE_NAME).unlink(missing_ok=True)
    tee = Tee(attempt / "console.log")
    tee.say(f"[launch] attempt {attempt.name}: {ranks} ranks" + f", restart {restarts}" * bool(restarts))
    environment = rank_environment(os.environ, attempt, restarts, config.runtime.grace, sys.stdout.isatty())
    words = torchrun_command(command, ranks, worker, attempt / ERRORS)
    ended = run_torchrun(Torchrun(words, environment, attempt / "torchrun.log", asked), config, attempt, tee)
    for done_with in (attempt / ERRORS, private_folder(str(attempt))):
        shutil.rmtree(done_with, ignore_errors=True)
    record(ended.status, attempt)
    if kept is not None or reported_end(run_dir) != ended.status:  # else the ranks wrote it
        record(kept or ended.status, run_dir)
    if why := why_given_up([*former, ended], command.max_restarts):
        tee.say(f"[launch] not started again: {why}")
    if ended.status.state in {"failed", "stopped"}:
        tee.say(final_box(ended.status, sys.stdout if sys.stdout.isatty() else None).rstrip())
    tee.close()
    return ended


def say(text: str) -> None:
    """A line of the parent's own while it has no attempt whose console it could keep."""
    print(text, file=sys.stderr, flush=True)


def choose_ranks(config: Config, asked: int | None, gpus: Sequence[str]) -> int:
    """Ranks of this node: `--nproc`, else what the split names, else one per GPU, else 8.

    Raises:
        UserError: the split or the GPUs do not fit that number.
    """
    topology, on_gpus = config.topology, config.runtime.device != "cpu" and bool(gpus)
    ranks = asked
    if ranks is None and topology.targets is not None and topology.drafters is not None:
        ranks = topology.targets * topology.target_tp + topology.drafters
    if ranks is None:
        ranks = len(gpus) if on_gpus and not (config.runtime.share_gpus and len(gpus) < 2) else CPU_RANKS
    choose_device(
        config.runtime.device, config.runtime.share_gpus, list(gpus), RankEnv(0, 0, ranks, ranks, "", 0, 0, False)
    )
    resolve_split(ranks, topology.targets, topology.drafters, topology.target_tp)
    return ranks


def torchrun_command(command: Command, ranks: int, worker: Path, errors: Path) -> list[str]:
    """The command line of torchrun, or of our own on one node; the ranks read the same flags again.

    Args:
        errors: folder for the ranks' last errors, which torchrun would else leave behind in the system's own.
    """
    nproc = ["--nproc-per-node", str(ranks), "--log-dir", str(errors)]
    if command.nnodes == 1:
        launcher = [sys.executable, str(AGENT), *nproc]
    else:
        host, _, port = command.master.rpartition(":")
        launcher = [sys.executable, "-m", "torch.distributed.run", *nproc]
        launcher += ["--nnodes", str(command.nnodes), "--node-rank", str(command.node_rank)]
        launcher += ["--master-addr", host, "--master-port", port]
    # Without "--" torchrun takes our --nproc for a short form of its own options.
    return [*launcher, "--", str(worker), *command.args]


def rank_environment(
    environ: Mapping[str, str], attempt: Path, restarts: int, grace: float, terminal: bool
) -> dict[str, str]:
    """What the ranks are told beside their flags; everything that torch reads is set in runtime.py."""
    told = {
        SUPERVISED: "1",
        ATTEMPT_VARIABLE: str(attempt),
        RESTARTS_VARIABLE: str(restarts),
        # torchrun kills ranks that have not ended this long after it passed a signal on (torch 2.12; before, 30 s).
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(grace) + 10),
        **PASSED_ON,
    }
    if terminal:  # the ranks write to a pipe and could not know
        told |= {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    return {**environ, **told}
