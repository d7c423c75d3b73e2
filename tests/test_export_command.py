"""`export`: a checkpoint of a run becomes a drafter folder with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.checkpoint import Checkpointer
from launcher.cli import parse
from launcher.config import for_device, to_toml
from launcher.config_sections import CheckpointConfig
from launcher.errors import UserError
from launcher.export_command import find_named, main
from launcher.rank import describe_models
from models.dflash import DFlashDrafter
from models.export import load_drafter


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One checkpoint of a tiny run, with optimizer state beside the weights."""
    config = parse(["--preset=tiny", "--run-dir", str(tmp_path / "run")]).config
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config))
    torch.manual_seed(1)
    weights = DFlashDrafter(describe_models(for_device(config, "cpu")).drafter).state_dict()
    state = {"model": weights, "optimizer": {"fc.weight.exp_avg": torch.zeros_like(weights["fc.weight"])}}
    saver = Checkpointer(tmp_path / "run", CheckpointConfig(), None, lambda ready, what, timeout: None, 60.0)
    saver.save(3, state, {"step": 3}, required=True)
    torch.save(weights, tmp_path / "weights.pt")
    return tmp_path / "run" / "checkpoints" / "step-3"


def test_export_holds_the_checkpoints_weights(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "drafter"
    assert main(["--checkpoint", str(checkpoint), "--out", str(out)]) == 0
    saved, exported = torch.load(tmp_path / "weights.pt"), load_drafter(out, torch.bfloat16, "cpu").state_dict()
    assert saved.keys() == exported.keys()
    for name, weight in saved.items():
        assert torch.equal(weight.bfloat16(), exported[name]), name
    assert "14 tensors" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="cannot be used"):
        main(["--checkpoint", str(checkpoint), "--out", str(tmp_path / "drafter")])
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("given", [".", "checkpoints/latest", "checkpoints/step-3"])
def test_a_run_stands_for_its_newest_checkpoint(given: str, checkpoint: Path) -> None:
    assert find_named(checkpoint.parent.parent / given) == checkpoint


def test_a_step_that_is_gone_costs_the_list_of_those_that_are_there(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder .*step-1 -> give one of step-3$"):
        find_named(checkpoint.with_name("step-1"))
    (tmp_path / "new/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoint in .*new/checkpoints -> give RUN"):
        find_named(tmp_path / "new")


@pytest.mark.parametrize("argv", [["--out", "x"], ["--checkpoint", "absent", "--out", "x"]])
def test_bad_arguments_cost_one_line(argv: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        main(argv)
    assert "\n" not in str(caught.value) and "->" in str(caught.value)
