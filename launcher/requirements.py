"""What pyproject.toml asks of an environment, checked in milliseconds with nothing but the standard library.

`launch.sh` runs this file with candidate Pythons:

    python launcher/requirements.py missing base demo    # prints what is missing, exits 1 if anything is
    python launcher/requirements.py list base test       # prints the requirements of these sets
    python launcher/requirements.py layers               # where a torch that is good enough lies, with its neighbours

Sets: `base`, an optional-dependency group by name, or a `[tool.launch]` list by name.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:(>=|==)([\d.]+))?$")


def requirements(sets: list[str]) -> list[str]:
    """The requirements of the named sets, in the order of the file."""
    content = tomllib.loads(PYPROJECT.read_text())
    project = content["project"]
    known = {"base": project["dependencies"], **project["optional-dependencies"], **content["tool"]["launch"]}
    return [requirement for name in sets for requirement in known[name]]


def missing(wanted: list[str]) -> list[str]:
    """Those of `wanted` (`name`, `name>=x.y` or `name==x.y`) that this Python does not satisfy."""
    return [requirement for requirement in wanted if not satisfied(requirement)]


def satisfied(requirement: str) -> bool:
    match = REQUIREMENT.match(requirement)
    if match is None:
        raise ValueError(f"{requirement!r}: pyproject.toml may only ask for name, name>=x.y or name==x.y")
    name, relation, wanted = match.groups()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    if not version or relation is None:  # no version: a half-removed package
        return bool(version)
    installed = release(version)
    length = max(len(installed), len(release(wanted)))
    have, want = (parts + (0,) * (length - len(parts)) for parts in (installed, release(wanted)))
    return have == want if relation == "==" else have >= want


def release(version: str) -> tuple[int, ...]:
    """(2, 11, 0) of "2.11.0+cu130" or "2.11.0rc1"; a pre-release counts as its release."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def layers() -> list[str]:
    """Package folders of this Python if its torch is good enough: a new environment builds on them, torch included."""
    torch = [requirement for requirement in requirements(["base"]) if requirement.startswith("torch>")]
    return [path for path in sys.path if path.endswith("-packages")] if not missing(torch) else []


def main(verb: str, *sets: str) -> int:
    if verb == "layers":
        print("\n".join(layers()))
        return 0
    wanted = requirements(list(sets))
    found = missing(wanted) if verb == "missing" else wanted
    print("\n".join(found))
    return int(verb == "missing" and bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
