"""Saving and loading the training state of the drafters: complete and checked, or not there at all.

A save writes `step-N.tmp` with DCP, seals every file (fsync, size, SHA-256), writes the manifest, renames the folder
and moves the `latest` pointer. Every stage ends in a vote, so that one rank's full disk is raised on all of them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from launcher import faults
from launcher.background import BackgroundWork
from launcher.checkpoint_folder import (
    EXTRA,
    FOLDER_MODE,
    TEMPORARY,
    apply_retention,
    checkpoints_of,
    point_to,
    publish,
    step_of,
)
from launcher.checkpoint_io import RecordReader, ShardWriter, differences, merge_values, split_state
from launcher.errors import UserError
from launcher.journal import SHARED
from launcher.manifest import seal_files, set_score, write_durably, write_manifest
from launcher.save_failure import SaveFailed
from launcher.votes import VoteFailed, Votes, describe

if TYPE_CHECKING:
    from launcher.config_sections import CheckpointConfig

Wait = Callable[[Callable[[], bool], str, float], None]
log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads on a group of ranks; every method is called by all of them, in the same order.

    Args:
        group: a gloo group of the drafters that nothing else uses (saves run in a thread), None for one process.
        wait_until: `Lifecycle.wait_until`.
        timeout: seconds one save may take.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig, group: dist.ProcessGroup | None, wait_until: Wait, timeout: float
    ) -> None:
        self.run_dir, self.config, self.group = run_dir, config, group
        self._wait_until, self._timeout = wait_until, timeout
        self._votes = Votes(group)
        self._verified: set[int] = set()
        self._failed_saves = 0
        self._pending: tuple[int, BackgroundWork] | None = None
        # Pinned memory that is used again is worth its size only where tensors come from a GPU.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())

    def save(
        self,
        step: int,
        state: dict[str, Any],
        extra: dict[str, Any],
        required: bool = False,
    ) -> None:
        """Save a checkpoint, in the background if the config says so.

        Args:
            state: nested dict of tensors and DTensors, e.g. model and optimizer state dicts; JSON leaves are kept too.
            extra: JSON values to get back from `load`.
            required: wait for the end and raise if it fails, as for the last save of a run.

        Raises:
            SaveFailed: required, or too many saves in a row have failed (`checkpoint.max_failed_saves`).
        """
        self.wait()
        if step in self._verified:
            return
        tensors, values = split_state(state)
        document = {"step": step, "extra": extra, "values": values}
        if self.config.asynchronous and not required:
            staged = self._stager.stage(tensors)
            save = BackgroundWork(f"save-{step}", lambda: self._write(step, staged, document))
            self._pending = (step, save)
            save.start()
            return
        save = BackgroundWork(f"save-{step}", lambda: self._write(step, tensors, document))
        save.run()
        self._conclude(step, save.error, required)

    def poll(self) -> None:
        """Take note of a background save that has ended; called at every step.

        Raises:
            SaveFailed: too many saves in a row have failed.
        """
        if self._pending is not None and not self._pending[1].is_alive():
            (step, save), self._pending = self._pending, None
            self._conclude(step, save.error, required=False)

    def wait(self) -> None:
        """Wait for a background save; called before the end of a run.

        Raises:
            DeadlineError: it takes longer than the timeout.
            SaveFailed: as `poll`.
        """
        if self._pending is not None:
            step, save = self._pending
            self._wait_until(lambda: not save.is_alive(), f"the checkpoint of step {step}", self._timeout)
            self.poll()

    def rate(self, step: int, score: float) -> None:
        """Say how good the checkpoint of a step is (higher is better), if there is one; the best is never removed.

        The first rank writes it down; a disk that takes it not costs a warning.

        Raises:
            SaveFailed: as `poll`.
        """
        self.wait()
        if step not in self._verified or self._votes.rank != 0:
            return
        try:
            set_score(self._folder(step), score)
        except OSError as error:
            log.warning("%s does not say how good it is: %s", self._folder(step), error.strerror)

    def load(self, path: Path, state: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint that `find_checkpoint` verified, in place; any number of ranks may have saved it.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: its tensors are not those of `state`.
        """
        tensors, _ = split_state(state)
        problems = differences(tensors, path)
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UserError(
                f"checkpoint {path} does not fit this model: {'; '.join(problems[:5])}{more}",
                "use the options it was trained with, or --resume none",
            )
        dcp.load(tensors, storage_reader=RecordReader(path), process_group=self.group, no_dist=self.group is None)
        document = json.loads((path / EXTRA).read_text())
        merge_values(state, document["values"])
        if path.parent.resolve() == checkpoints_of(self.run_dir).resolve():
            self._verified.add(step_of(path))
        return document["extra"]

    def _conclude(self, step: int, error: BaseException | None, required: bool) -> None:
        """Count a save as done or failed, on the main thread."""
        if error is None:
            self._failed_saves = 0
            self._verified.add(step)
            return
        if not isinstance(error, SaveFailed):
            raise error
        self._failed_saves += 1
        limit = self.config.max_failed_saves
        if required:
            raise error.ends_the_run("the last checkpoint of this start is missing")
        if self._failed_saves >= limit:
            raise error.ends_the_run(f"checkpoint.max_failed_saves={limit} is reached")
        log.warning("%s (%d of %d in a row)", error, self._failed_saves, limit, extra=SHARED)

    def _write(self, step: int, tensors: dict[str, Any], document: dict[str, Any]) -> None:
        """All stages of one save, on every rank."""
        final = self._folder(step)
        temporary, votes, stage = final.with_name(final.name + TEMPORARY), self._votes, "making the folder of"
        try:
            votes.take_leader(lambda: _make_folder(temporary))
            stage = "writing"
            self._write_shards(temporary, step, tensors)
            votes.take_leader(lambda: write_durably(temporary / EXTRA, json.dumps(document)))
            stage = "sealing"
            sealed = votes.take(lambda: seal_files(self._own_files(temporary)))
            stage = "publishing"
            files = {name: entry for part in sealed for name, entry in part.items()}
            votes.take_leader(lambda: self._publish(temporary, final, files, step))
        except VoteFailed as failure:
            if votes.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise SaveFailed(stage, failure, final) from None

    def _write_shards(self, folder: Path, step: int, tensors: dict[str, Any]) -> None:
        writer = ShardWriter(folder, step)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        except CheckpointException as error:
            self._votes.check({rank: describe(failure[0]) for rank, failure in error.failures.items()})

    def _publish(self, temporary: Path, final: Path, files: dict[str, Any], step: int) -> None:
        faults.trip("save-manifest", step)
        write_manifest(temporary, files, step)
        faults.trip("save-rename", step)
        publish(temporary, final)
        faults.trip("save-pointer", step)
        point_to(final)
        for removed in apply_retention(self.run_dir, self._verified | {step}, self.config.keep):
            log.info("removed checkpoint %s", removed)
        faults.spoil_shard(final, step)

    def _own_files(self, folder: Path) -> list[Path]:
        """The files this rank wrote: its shard; the first rank also what belongs to nobody."""
        shards = f"__{self._votes.rank}_"
        return sorted(
            path
            for path in folder.iterdir()
            if path.name.startswith(shards) or (self._votes.rank == 0 and not path.name.startswith("__"))
        )

    def _folder(self, step: int) -> Path:
        return checkpoints_of(self.run_dir) / f"step-{step}"


def _make_folder(temporary: Path) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    os.mkdir(temporary, FOLDER_MODE)
