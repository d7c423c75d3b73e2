"""What may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

import pytest

from launcher.config import Config, validate
from launcher.config_changes import FIXED, changed_keys, check_resumed_config
from launcher.config_errors import walk_fields
from launcher.errors import UserError


def test_the_same_configuration_has_no_changes() -> None:
    assert check_resumed_config(Config().model_dump(mode="json"), Config()) == []


def test_compatible_changes_are_told() -> None:
    config = validate({"train": {"lr": 0.5}, "topology": {"drafters": 2}, "runtime": {"run_dir": "elsewhere"}})
    lines = check_resumed_config(Config().model_dump(mode="json"), config)
    assert lines == ["topology.drafters: None -> 2", "train.lr: 0.0006 -> 0.5"]


def test_another_run_is_refused_with_all_its_keys() -> None:
    config = validate({"drafter": {"layers": 7, "block_size": 8}, "train": {"lr": 0.5}})
    with pytest.raises(UserError) as refusal:
        check_resumed_config(Config().model_dump(mode="json"), config)
    assert "drafter.block_size: 16 -> 8; drafter.layers: 5 -> 7" in str(refusal.value)
    assert "lr" not in refusal.value.what


def test_options_of_another_version_do_not_count() -> None:
    assert changed_keys({"train": {"gone": 1, "lr": 1}}, {"train": {"lr": 1, "new": 2}}) == {}


def test_the_fixed_options_exist() -> None:
    assert {key for key, _ in walk_fields(Config)} >= FIXED
