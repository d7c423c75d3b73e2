"""Builds the drafter's training step from a configuration: for the gate, for training, and for the bench."""

from __future__ import annotations

import torch
from torch.distributed import DeviceMesh

from launcher.config import Config
from launcher.drafter_step import DrafterStep
from launcher.rank import user_input
from models.attention import Backend, choose_backend
from models.dflash import DFlashDrafter
from models.dflash_config import DFlashConfig
from models.draft_step import DraftForward, FrozenEnds
from models.export import load_drafter


class StepFactory:
    """Steps of one run; they differ only in the ranks they span.

    Args:
        shape: the drafter's.
        ends: the target's embedding and head, in the compute dtype, on the device.

    Raises:
        UserError: the attention that was asked for cannot run on the device.
    """

    def __init__(self, config: Config, shape: DFlashConfig, ends: FrozenEnds, device: torch.device) -> None:
        self._config, self._shape, self._ends, self._device = config, shape, ends, device
        self.backend: Backend = user_input(lambda: choose_backend(config.drafter.attention, device.type))

    def build(self, mesh: DeviceMesh, steps: int, sharded: bool, shift: int = 0) -> DrafterStep:
        """A compiled drafter with the run's initial weights.

        Args:
            mesh: the ranks that train together.
            steps: length of the learning rate schedule.
            sharded: FSDP2 over the mesh, as with several drafters.
            shift: where a step stands in that schedule, beside its own number (schedule.rate_span).

        Raises:
            UserError: `drafter.init_from` or the precision does not fit.
        """
        torch.manual_seed(self._config.train.seed)
        with torch.device(self._device):
            drafter = DFlashDrafter(self._shape)
        init_from = self._config.drafter.init_from
        if init_from is not None:
            start = user_input(lambda: load_drafter(init_from, torch.float32, self._device))
            user_input(lambda: _same_shape(drafter, start))
            drafter.load_state_dict(start.state_dict())
        drafter.compile_layers()
        return user_input(lambda: DrafterStep(drafter, self._forward, mesh, self._config.train, steps, sharded, shift))

    def _forward(self, drafter: DFlashDrafter) -> DraftForward:
        train = self._config.train
        return DraftForward(
            drafter,
            self._ends,
            anchors=train.anchors,
            backend=self.backend,
            loss=train.loss,
            gamma=train.gamma,
            alpha=train.dpace_alpha,
            seed=train.seed,
            float8=train.precision == "float8",
        )


def _same_shape(drafter: DFlashDrafter, start: DFlashDrafter) -> None:
    if drafter.config != start.config:
        raise ValueError("drafter.init_from: the exported drafter has another shape -> match drafter.* and the target")
