"""What follows from who called before torchrun starts on several nodes, and how they were started."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from launcher.config import validate
from launcher.errors import ExitCode
from launcher.roll_call_desk import read_call
from launcher.roll_call_verdict import Call, Verdict, find_obstacle, judge, shared_options
from tests.node_calls import BUILD, call

MASTER = "10.0.0.1:29500"


def test_all_there_start_and_say_nothing() -> None:
    assert judge([call(0), call(1)], MASTER, 180) == Verdict(code=ExitCode.FINISHED, line="")


@pytest.mark.parametrize(
    ("calls", "code", "line"),
    [
        (
            [call(0)],
            75,
            "node 1 did not call at 10.0.0.1:29500 within 180 s (runtime.init_timeout)"
            " -> start the same command there with --node-rank 1",
        ),
        ([call(0, 4), call(2, 4)], 75, "nodes 1, 3 did not call at 10.0.0.1:29500 within 180 s"),
        (
            [call(0), call(1, refusal="no GPU -> doctor", code=78)],
            78,
            "node 1 (host1) refused to start: no GPU -> doctor",
        ),
        (
            [call(0, refusal="GPUs are in use", code=75), call(1)],
            75,
            "node 0 (host0) refused to start: GPUs are in use",
        ),
        ([call(0), call(1, refusal="odd", code=0)], 1, "node 1 (host1) refused to start: odd"),
        (
            [call(0, 3), call(1, 3), call(1, 3, host="other", pid=7)],
            78,
            "--node-rank 1 was given on host1 (pid 1) and on other (pid 7) -> every node needs its own, from 0",
        ),
        ([call(0), call(1, 3)], 78, "node 1 (host1) was started with --nnodes 3, node 0 (host0) with 2 -> start every"),
        ([call(0), call(1, ranks=4)], 78, "node 1 (host1) has 4 ranks, node 0 (host0) has 8 -> start every node"),
        (
            [call(0, options={"train": {"lr": 1.0, "seed": 0}}), call(1, options={"train": {"lr": 2.0, "seed": 0}})],
            78,
            "node 1 (host1) was started with other options than node 0 (host0): train.lr 2.0, not 1.0 -> start every",
        ),
        (
            [call(0), call(1, protocol=2)],
            78,
            "node 1 (host1) runs another version of this launcher than node 0 (host0)",
        ),
        (
            [call(0), call(1, build=BUILD | {"torch.git": "c" * 40}, strict=True)],
            78,
            "node 1 (host1) has another build of torch 2.12.0 than node 0 (host0) (git aaaaaaaaaa -> cccccccccc)\n-> ",
        ),
    ],
)
def test_what_keeps_nodes_from_starting(calls: list[Call], code: int, line: str) -> None:
    verdict = judge(calls, MASTER, 180)
    assert (verdict.code, verdict.notices) == (code, []) and verdict.line.startswith(line), verdict.line
    assert (find_obstacle(calls) is None) == ("did not call" in line), "only a missing node may still come"


def test_other_builds_are_listed_and_do_not_keep_nodes_from_starting() -> None:
    other = {"torch": "2.11.0", "kernels": "d" * 64}
    verdict = judge([call(0, 3), call(1, 3, build=other), call(2, 3)], MASTER, 180)
    assert verdict.code == 0 and verdict.notices == [
        "node 1 (host1) has torch 2.11.0, node 0 (host0) 2.12.0+cu130",
        f"node 1 (host1) has kernels {'d' * 24}, node 0 (host0) none",
    ]


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ({"runtime": {"run_dir": "elsewhere"}, "compile": {"cache_dir": "cache"}, "log": {"every": 3}}, True),
        ({"data": {"path": "/disk/chats.jsonl"}}, True),
        ({"data": {"path": "/disk/others.jsonl"}}, False),
        ({"train": {"lr": 1e-5}}, False),
        ({"runtime": {"share_gpus": True}}, False),
        ({"dry_run": True}, False),
    ],
)
def test_options_that_must_be_the_same(flags: dict[str, Any], same: bool) -> None:
    usual, other = validate({"data": {"path": "chats.jsonl"}}), validate({"data": {"path": "chats.jsonl"}} | flags)
    assert (shared_options(usual, True) == shared_options(other, True)) is same
    assert shared_options(usual, True) != shared_options(usual, False)


@pytest.mark.parametrize(
    "line",
    [b"", b"GET / HTTP/1.1\r\n", b"\xff\xfe\n", b"[]\n", b"{}\n", b"[" * 9999, call(0).model_dump_json().encode()],
)
def test_anything_else_is_no_call(line: bytes) -> None:
    assert read_call(line) is None
    with pytest.raises(ValidationError):
        Verdict.model_validate_json(line)  # a port that sends back what it gets lets nobody start
