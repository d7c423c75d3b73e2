"""environment.json of a run, environment.lock of a config or a folder, and the command `fingerprint`.

./launch.sh fingerprint [--json]           print it
./launch.sh fingerprint --diff A B         compare two run folders or files; exits 1 where they differ
./launch.sh fingerprint --lock [WHERE]     pin it: environment.lock beside the config file WHERE, or in that folder;
                                           without WHERE here, for starts from here that name no config file
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from launcher.command_parser import CommandParser
from launcher.errors import RetryableError, UserError
from launcher.fingerprint import Change, Fingerprint, collect, diff, digest
from launcher.whole_files import write_whole

FILE_NAME = "environment.json"
LOCK_NAME = "environment.lock"
# A lock pins what runs the code, not the code itself, and survives a kernel update of the host.
NOT_LOCKED = ("kernels", "os")


def record_environment(
    run_dir: Path,
    attempt_dir: Path,
    current: Fingerprint,
    strict: bool,
    config_file: Path | None = None,
    dry_run: bool = False,
) -> list[str]:
    """Compare this start with the run's last one and with the lock, then write environment.json.

    A dry run is no part of the run: it replaces no record that is there, so the next start is told of a change as well.

    Returns:
        As `check_environment`.

    Raises:
        UserError: as `check_environment`; nothing is written then.
        RetryableError: the disk does not take it.
    """
    notices = check_environment(run_dir, current, strict, config_file)
    kept = [] if dry_run and (run_dir / FILE_NAME).exists() else [run_dir]
    for folder in (attempt_dir, *kept):
        try:
            write_fingerprint(folder / FILE_NAME, current)
        except OSError as error:
            problem = f"cannot write {folder / FILE_NAME}: {error.strerror}"
            raise RetryableError(problem, "make room there, or choose another --run-dir") from None
    return notices


def check_environment(run_dir: Path, current: Fingerprint, strict: bool, config_file: Path | None = None) -> list[str]:
    """What changed since the run's last attempt, one line per change, to be shown to the user.

    A record that nobody can read costs a line as well: the run needs none of it.

    Raises:
        UserError: the lock does not match; under `--strict-environment` also a change, or a record that is unreadable.
    """
    check_lock(config_file, current)
    record = run_dir / FILE_NAME
    if not record.exists():
        return []
    try:
        changes = diff(read_fingerprint(record), current)
    except UserError as error:
        if strict:
            raise UserError(
                error.what, "remove it, or leave out --strict-environment once: that start writes a new one"
            ) from None
        return [f"{error.what}; whether the environment changed since the last attempt is not known"]
    if changes and strict:
        raise UserError(
            "the environment changed since the last attempt:\n" + _lines(changes),
            "restore it, start another run folder, or leave out --strict-environment",
        )
    return [f"environment changed: {change}" for change in changes]


def check_lock(config_file: Path | None, current: Fingerprint) -> None:
    """Refuse an environment that differs from the lock of a start.

    Raises:
        UserError: lists the fields that differ.
    """
    lock = lock_of(config_file)
    if not lock.exists():
        return
    changes = [change for change in diff(read_fingerprint(lock), current) if change.field not in NOT_LOCKED]
    if changes:
        again = f"./launch.sh fingerprint --lock {config_file or ''}".rstrip()
        raise UserError(
            f"{lock} pins another environment:\n{_lines(changes)}", f"restore it, or pin this one with {again}"
        )


def copy_lock(config_file: Path | None, run_dir: Path) -> None:
    """Put the lock of a start, or its absence, beside the run's own config.toml as well."""
    source, kept = lock_of(config_file), run_dir / LOCK_NAME
    if not source.exists():
        kept.unlink(missing_ok=True)
    elif source.resolve() != kept.resolve():
        write_whole(kept, source.read_text())


def lock_of(config_file: Path | None) -> Path:
    """The lock that a start has to fit: beside its config file, or in the working directory if it has none."""
    return (config_file.expanduser().parent if config_file else Path.cwd()) / LOCK_NAME


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a fingerprint from a file, or from the environment.json of a folder.

    Raises:
        UserError: missing, or no fingerprint.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read a fingerprint from {file}: {error}", "give a run folder or a file") from None
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise UserError(f"{file} is no fingerprint", "give a run folder, its environment.json, or an environment.lock")
    return values


def write_fingerprint(path: Path, fingerprint: Fingerprint) -> None:
    write_whole(path, json.dumps(fingerprint, indent=2, sort_keys=True) + "\n")


def main(args: list[str]) -> int:
    """The command `fingerprint`; returns the exit code."""
    parser = CommandParser(prog="./launch.sh fingerprint", description="What this machine compiles with.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print JSON")
    what.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two run folders or files")
    what.add_argument(
        "--lock", nargs="?", type=Path, const=Path(), metavar="WHERE", help="pin it beside a config file, or here"
    )
    flags = parser.parse_args(args)
    if flags.diff:
        changes = diff(*map(read_fingerprint, flags.diff))
        print(_lines(changes) if changes else "no difference")
        return int(bool(changes))
    current = collect()
    if flags.lock is not None:
        path = (flags.lock if flags.lock.is_dir() else flags.lock.parent) / LOCK_NAME
        _lock(path, current)
        print(f"wrote {path}")
    elif flags.json:
        print(json.dumps(current, indent=2, sort_keys=True))
    else:
        print(describe(current))
    return 0


def _lock(path: Path, current: Fingerprint) -> None:
    try:
        write_fingerprint(path, {k: v for k, v in current.items() if k not in NOT_LOCKED})
    except OSError as error:
        raise UserError(f"--lock: cannot write {path}: {error.strerror}", "give a config file or a folder") from None


def describe(fingerprint: Fingerprint) -> str:
    """A table to paste into a bug report."""
    rows = [("digest", digest(fingerprint)), *fingerprint.items()]
    return "\n".join(f"{field:<28} {value or 'none'}" for field, value in rows)


def _lines(changes: Iterable[Change]) -> str:
    return "\n".join(f"  {change}" for change in changes)
