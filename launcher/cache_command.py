"""The command `cache`: the only thing that ever deletes a compile cache.

./launch.sh cache ls | verify [NAME ...] | export FILE [NAME ...] | import FILE
./launch.sh cache prune --keep N | --older-than DAYS | --damaged
"""

from __future__ import annotations

import os
import shutil
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from launcher.cache_bundle import export_caches, import_bundle
from launcher.cache_files import IN_USE, Manifest, cache_files, damage, list_caches
from launcher.command_parser import CommandParser, at_least
from launcher.compile_cache import cache_root, hold
from launcher.errors import ExitCode, UserError
from launcher.fingerprint import collect, digest

DAY = 86400.0


def main(args: list[str]) -> int:
    """Run `cache ARGS`; returns the exit code."""
    flags = _parser().parse_args(args)
    root = cache_root(flags.cache_dir)
    return {"ls": _ls, "verify": _verify, "export": _export, "import": _import, "prune": _prune}[flags.verb](
        root, flags
    )


def _parser() -> CommandParser:
    parser = CommandParser(prog="./launch.sh cache", description="Compile caches: one per fingerprint and model shape.")
    parser.add_argument("--cache-dir", type=Path, help="root of the caches (default: the user's cache folder)")
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=CommandParser)
    verbs.add_parser("ls", help="sizes, last use, what built each")
    verify = verbs.add_parser("verify", help="compare every file with its checksum")
    verify.add_argument("names", nargs="*", help="caches (default: all)")
    export = verbs.add_parser("export", help="pack this environment's caches into one file")
    export.add_argument("file", type=Path)
    export.add_argument("names", nargs="*", help="caches (default: all of this environment)")
    importing = verbs.add_parser("import", help="unpack such a file, checked, if it fits this environment")
    importing.add_argument("file", type=Path)
    prune = verbs.add_parser("prune", help="delete caches that are not in use")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=at_least(0), metavar="N", help="all but the N most recently used")
    which.add_argument("--older-than", type=days, metavar="DAYS", help="those not used for DAYS days")
    which.add_argument("--damaged", action="store_true", help="those that `cache verify` finds damaged")
    return parser


def days(text: str) -> float:
    """The type of an option that takes an age in days; below 0 every cache would be old enough to go."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"invalid number of days: {text!r}") from None
    if not value >= 0:  # nor is nan an age
        raise ArgumentTypeError(f"{text} is no age, give days from 0 on")
    return value


def _ls(root: Path, flags: Namespace) -> int:
    caches, current = list_caches(root), digest(collect())
    print(f"{root}: {len(caches)} cache{'s' * (len(caches) != 1)}")
    for path, entry in caches:
        size, count = _usage(path)
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_use(path, entry)))
        mark = "*" if path.name.startswith(current) else " "
        print(f"{mark} {path.name}  {format_bytes(size)}, {count} files, last use {used}, {_builder(entry)}")
    if caches:
        print("* fits this environment")
    return ExitCode.FINISHED


def _verify(root: Path, flags: Namespace) -> int:
    code = ExitCode.FINISHED
    for path, entry in _named(root, flags.names):
        found = problems(path, entry)
        code = ExitCode.DO_NOT_RETRY if found else code
        print(f"{path.name}: " + (f"damaged ({len(found)})" if found else "good"))
        for problem in found:
            print(f"  {problem}")
    if code:
        print("remove damaged caches with ./launch.sh cache prune --damaged; the next run compiles anew")
    return code


def _export(root: Path, flags: Namespace) -> int:
    current = digest(collect())
    caches = [
        (path, entry) for path, entry in _named(root, flags.names) if flags.names or path.name.startswith(current)
    ]
    whole = {path: entry for path, entry in caches if isinstance(entry, Manifest)}
    if len(whole) < len(caches) or not whole:
        what = "a damaged cache" if caches else "no cache of this environment"
        raise UserError(f"{root} has {what}", "see ./launch.sh cache ls")
    bundle = export_caches(whole, flags.file)
    print(f"wrote {flags.file}, {format_bytes(flags.file.stat().st_size)}: {', '.join(bundle.caches)}")
    return ExitCode.FINISHED


def _import(root: Path, flags: Namespace) -> int:
    bundle = import_bundle(flags.file, root, collect())
    for name, manifest in bundle.caches.items():
        print(f"imported {name}: {len(manifest.files)} files, {format_bytes(manifest.size)}")
    return ExitCode.FINISHED


def _prune(root: Path, flags: Namespace) -> int:
    caches = sorted(list_caches(root), key=lambda cache: last_use(*cache), reverse=True)
    if flags.keep is not None:
        doomed = caches[flags.keep :]
    elif flags.older_than is not None:
        doomed = [cache for cache in caches if time.time() - last_use(*cache) > flags.older_than * DAY]
    else:
        doomed = [cache for cache in caches if problems(*cache)]
    for path, _ in doomed:
        size, _ = _usage(path)
        print(f"removed {path.name}, {format_bytes(size)}" if remove(path) else f"kept {path.name}: a run uses it")
    return ExitCode.FINISHED


def remove(folder: Path) -> bool:
    """Delete a cache unless a run holds it; says whether it did."""
    try:
        lock = hold(folder, exclusive=True)
    except BlockingIOError:
        return False
    try:
        shutil.rmtree(folder)
    finally:
        if lock is not None:
            os.close(lock)
    return True


def problems(folder: Path, entry: Manifest | str) -> list[str]:
    """Everything wrong with a cache, contents compared."""
    return [entry] if isinstance(entry, str) else damage(folder, entry)


def last_use(folder: Path, entry: Manifest | str) -> float:
    """Seconds since the epoch; the lock is touched at every start, the manifest at every clean end."""
    lock = folder / IN_USE
    touched = lock.stat().st_mtime if lock.exists() else 0.0
    return max(touched, entry.last_use if isinstance(entry, Manifest) else 0.0)


def format_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _named(root: Path, names: list[str]) -> list[tuple[Path, Manifest | str]]:
    caches = list_caches(root)
    unknown = set(names) - {path.name for path, _ in caches}
    if unknown:
        raise UserError(f"no cache {', '.join(sorted(unknown))} in {root}", "see ./launch.sh cache ls")
    return [cache for cache in caches if not names or cache[0].name in names]


def _usage(folder: Path) -> tuple[int, int]:
    sizes = [found.st_size for _, found in cache_files(folder)]
    return sum(sizes), len(sizes)


def _builder(entry: Manifest | str) -> str:
    if isinstance(entry, str):
        return entry
    made = time.strftime("%Y-%m-%d", time.localtime(entry.created))
    machine = entry.fingerprint.get("gpu") or entry.fingerprint.get("cpu")
    return f"built {made} by {entry.built_by} with torch {entry.fingerprint.get('torch')} on {machine}"
