"""What the nodes of a run tell the first one before any torchrun starts, and what follows from it. Pure, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from launcher.config import Config
from launcher.config_changes import changed_keys
from launcher.errors import ExitCode, LauncherError
from launcher.fingerprint import Fingerprint, diff, public_version

PROTOCOL = 1
# What ranks of different nodes exchange passes through these.
BUILD = ("torch", "triton", "transformers", "nvidia-nccl", "kernels", "launcher")
# Of `topology` the ranks agree by themselves; folders, logs and deadlines are each node's own.
SHARED = {"target", "drafter", "data", "train", "compile", "checkpoint", "eval", "dry_run"}
PATHS = (("target", "model"), ("drafter", "init_from"), ("data", "path"), ("data", "eval_path"))
REFUSAL_CHARACTERS = 4000


class Call(BaseModel):
    """One node and how it was started; the same keys go over the wire."""

    protocol: int
    node: int = Field(ge=0)
    host: str
    pid: int
    nodes: int = Field(ge=1)
    ranks: int | None = None
    """Ranks of the node; None where it refused before it knew."""
    strict: bool = False
    build: Fingerprint = {}
    options: dict[str, Any] = {}
    refusal: str | None = None
    """Its own words, where it refused to start."""
    code: ExitCode = ExitCode.FINISHED

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


class Verdict(BaseModel):
    """What all nodes do: start, or end with `code` and `line`. A line of anything else is none."""

    model_config = ConfigDict(extra="forbid")

    code: ExitCode
    line: str
    notices: list[str] = []
    """What does not keep the nodes from starting."""


class RollCallError(LauncherError):
    """The nodes cannot start together; the code is that of the cause."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.line)
        self.code = verdict.code


def shared_options(config: Config, on_gpus: bool) -> dict[str, Any]:
    """The options that must be the same on all nodes, as JSON. Files may lie elsewhere on each: only names count."""
    values = config.model_dump(mode="json", include=SHARED, exclude={"compile": {"cache_dir"}})
    for section, name in PATHS:
        if values[section][name] is not None:
            values[section][name] = Path(values[section][name]).name
    devices = {"device": "cuda" if on_gpus else "cpu", "share_gpus": config.runtime.share_gpus}
    return values | {"runtime": devices}


def build_of(fingerprint: Fingerprint) -> Fingerprint:
    """The fields of a fingerprint that must be the same on all nodes."""
    return {field: value for field, value in fingerprint.items() if field.startswith(BUILD)}


def missing_nodes(calls: Sequence[Call]) -> list[int]:
    """The nodes that the first one, whose call comes first, still waits for."""
    return sorted(set(range(calls[0].nodes)) - {call.node for call in calls})


def find_obstacle(calls: Sequence[Call]) -> Verdict | None:
    """What keeps the nodes from starting, whoever is still to call; None if nothing does.

    Args:
        calls: the first node's own call, then the others in any order.
    """
    refused = [call for call in calls if call.refusal is not None]
    if refused:
        lines = [f"{call} refused to start: {call.refusal}" for call in refused]
        return Verdict(code=refused[0].code or ExitCode.UNCLASSIFIED, line="\n".join(lines))
    if lines := [*_same_numbers(calls), *(line for call in calls[1:] for line in _differences(calls[0], call))]:
        return Verdict(code=ExitCode.DO_NOT_RETRY, line="\n".join(lines))
    builds = compare_builds(calls)
    if builds and any(call.strict for call in calls):
        line = "\n".join([*builds, "-> install the same on every node, or leave out --strict-environment"])
        return Verdict(code=ExitCode.DO_NOT_RETRY, line=line)
    return None


def judge(calls: Sequence[Call], master: str, waited: float) -> Verdict:
    """What all nodes are told once all have called, or the time is over.

    Args:
        master: host:port where the first node was to be called.
        waited: seconds that it waited for calls at most.
    """
    if obstacle := find_obstacle(calls):
        return obstacle
    if missing := missing_nodes(calls):
        names, which = name_nodes(missing), "its own number" if missing[1:] else str(missing[0])
        line = f"{names} did not call at {master} within {waited:.0f} s (runtime.init_timeout)"
        return Verdict(code=ExitCode.RETRY, line=f"{line} -> start the same command there with --node-rank {which}")
    return Verdict(code=ExitCode.FINISHED, line="", notices=compare_builds(calls))


def name_nodes(nodes: Sequence[int]) -> str:
    """'node 1', 'nodes 1, 2'."""
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def compare_builds(calls: Sequence[Call]) -> list[str]:
    """One line per node and package that is not the first node's."""
    first, lines = calls[0], []
    for call in calls[1:]:
        for change in diff(first.build, call.build):
            if change.rebuilt:
                other = f"another build of {change.field} {public_version(change.now)} than {first} ({change.detail})"
                lines.append(f"{call} has {other}")
            else:
                was, now = (f"{value or 'none':.24}" for value in (change.was, change.now))
                lines.append(f"{call} has {change.field} {now}, {first} {was}")
    return lines


def _same_numbers(calls: Sequence[Call]) -> list[str]:
    twice = [node for node, count in Counter(call.node for call in calls).items() if count > 1]
    hosts = {node: [f"{call.host} (pid {call.pid})" for call in calls if call.node == node] for node in twice}
    return [
        f"--node-rank {node} was given on {' and on '.join(hosts[node])} -> every node needs its own, from 0"
        for node in twice
    ]


def _differences(first: Call, call: Call) -> list[str]:
    """What of a start does not fit the first node's."""
    same = "start every node with the same flags and --nproc"
    if call.protocol != first.protocol:
        return [f"{call} runs another version of this launcher than {first} -> install the same on every node"]
    if call.nodes != first.nodes:
        return [f"{call} was started with --nnodes {call.nodes}, {first} with {first.nodes} -> {same}"]
    if call.ranks != first.ranks:
        return [f"{call} has {call.ranks} ranks, {first} has {first.ranks} -> {same}"]
    changes = changed_keys(first.options, call.options)
    values = "; ".join(f"{key} {there}, not {here}" for key, (here, there) in changes.items())
    return [f"{call} was started with other options than {first}: {values} -> {same}"] if changes else []
