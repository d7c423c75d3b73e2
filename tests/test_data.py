"""Chats become rows: the formats, all problems at once, the cache, the row order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.chats import parse_chat
from launcher.cli import parse
from launcher.config_sections import PRESETS, DataConfig
from launcher.data import eval_prompts, prepare_rows, row_order, spread
from launcher.errors import UserError
from launcher.target_role import held_out_prompts
from tests.small_tokenizer import MARKED, TRIMMED, small_tokenizer


def test_formats_of_a_chat() -> None:
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert parse_chat(json.dumps(shared), "here").messages == expected
    assert parse_chat({"messages": expected}, "here").messages == expected
    assert parse_chat('{"prompt": "Hi"}', "here").messages == expected[:1]


def write_chats(path: Path, count: int = 40) -> Path:
    with path.open("w") as file:
        for index in range(count):
            turns = [
                {"role": "user", "content": f"Q{index}"},
                {"role": "assistant", "content": f"A{index}" * (1 + index % 5)},
            ]
            file.write(json.dumps({"messages": turns}) + "\n\n")
    return path


def options(file: Path, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(file), "row_length": 256, "holdout": 4} | changes)


def test_rows_hold_every_chat_but_the_held_out_ones(tmp_path: Path) -> None:
    data, tokenizer = options(write_chats(tmp_path / "chats.jsonl")), small_tokenizer()
    rows = prepare_rows(data, tokenizer, tmp_path / "cache")
    texts = []
    for index in range(len(rows)):
        row = rows.row(index)
        assert row.ids.dtype == row.doc.dtype == row.positions.dtype == np.int32 and row.loss_mask.dtype == np.bool_
        assert len(row.ids) == 256 and len(rows.chats(index)) == row.doc.max() + 1
        texts += [tokenizer.decode(row.ids[row.doc == number]) for number in range(row.doc.max() + 1)]
        for number, where in enumerate(rows.chats(index)):  # every other line of the file is blank
            assert f"Q{(int(where.removeprefix('chats.jsonl:')) - 1) // 2}<" in texts[number - row.doc.max() - 1]
    prompts = [tokenizer.decode(ids) for ids in eval_prompts(data, tokenizer, 10)]
    assert len(texts) == 36 == rows.stats.chats and len(prompts) == 4
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in prompts)
    asked = Counter(text.split("user\n")[1].split("<")[0] for text in texts + prompts)
    assert asked == Counter(f"Q{index}" for index in range(40))
    assert rows.stats.rows == len(rows) and 0.8 < rows.stats.fill <= 1 and 0 < rows.stats.supervised < 0.3


def test_long_chats_are_cut_and_chats_without_room_for_a_block_dropped(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    contents = [("Hi", "x" * 300), ("y" * 300, "never seen"), ("Hi", "Yo")]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in contents]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    rows = prepare_rows(options(path, holdout=0), small_tokenizer(), tmp_path / "cache")
    assert (rows.stats.truncated, rows.stats.dropped, rows.stats.chats, len(rows)) == (1, 1, 2, 2)
    assert rows.chats(0) == ["chats.jsonl:1"] and rows.row(0).loss_mask[-1]


def test_the_cache_is_used_again_and_only_for_the_same_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_chats(tmp_path / "chats.jsonl"), tmp_path / "cache"

    def folders() -> int:
        return sum(entry.is_dir() for entry in (cache / "data").iterdir())

    prepare_rows(options(path), small_tokenizer(), cache)
    with monkeypatch.context() as patch:
        patch.setattr("launcher.data.build_rows", lambda *_: pytest.fail("built again"))
        prepare_rows(options(path), small_tokenizer(), cache)
    changes: list[dict[str, Any]] = [{"row_length": 128}, {"train_on": "last"}, {"holdout": 3}, {"max_chats": 9}]
    for number, change in enumerate(changes, start=2):
        prepare_rows(options(path, **change), small_tokenizer(), cache)
        assert folders() == number
    prepare_rows(options(path), small_tokenizer(MARKED), cache)
    prepare_rows(options(write_chats(path, 41)), small_tokenizer(), cache)
    assert folders() == 7
    assert not [left for left in cache.rglob("*") if left.suffix == ".tmp" or left.name == "scratch"]


def test_the_content_of_rows_tells_the_same_chats_from_others(tmp_path: Path) -> None:
    def content(name: str, change: Callable[[list[str]], list[str]] = list) -> str:
        path = tmp_path / name
        path.write_text("\n".join(change(lines)))
        return prepare_rows(options(path, holdout=0), small_tokenizer(), tmp_path / "cache").stats.content

    lines = write_chats(tmp_path / "chats.jsonl").read_text().splitlines()
    assert content("one.jsonl") == content("other.jsonl", lambda chats: [*chats, ""])
    assert len({content(f"{n}.jsonl", lambda chats, n=n: chats[n:] + chats[:n]) for n in (0, 2, 4)}) == 3


def test_all_problems_are_reported_by_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
    lines = [
        json.dumps({"messages": [user, answer]}),
        '{"messages": [',
        "[1]",
        '{"text": "Hi"}',
        '{"messages": []}',
        json.dumps({"messages": [user]}),
        json.dumps({"messages": [user, {"role": "assistant", "content": None}]}),
        json.dumps({"messages": [user, {"content": "Yo"}]}),
        json.dumps({"messages": [answer, user]}),
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError) as caught:
        prepare_rows(options(path, holdout=0), small_tokenizer(TRIMMED), tmp_path / "cache")
    assert caught.value.what.splitlines() == [
        "chats.jsonl:2: not valid JSON: Expecting value at column 15",
        "chats.jsonl:3: not a JSON object",
        "chats.jsonl:4: no list `messages` or `conversations`, only text",
        "chats.jsonl:5: the list of messages is empty",
        "chats.jsonl:6: no assistant turn",
        "chats.jsonl:7: message 2 (assistant) has no text",
        "chats.jsonl:8: message 2 has no role",
        "chats.jsonl:9: the chat template of small cannot render it: roles must alternate",
        "chats.jsonl:10: the prompt is not valid Unicode",
    ]
    assert not list((tmp_path / "cache/data").glob("*.tmp"))


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("{\n" * 50)
    with pytest.raises(UserError) as caught:
        prepare_rows(options(path, holdout=0), small_tokenizer(), tmp_path / "cache")
    lines = caught.value.what.splitlines()
    assert len(lines) == 21 and lines[-1] == "... and 30 more"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "none.jsonl"}, "data.path: no file none.jsonl"),
        ({"path": "."}, r"data.path: no file \."),
        ({"path": "nobody/nothing"}, "neither a file nor to be had from the hub"),
        ({"holdout": 40}, "has 40 chats, and data.holdout keeps 40"),
        ({"row_length": 32}, "two assistant tokens within 32 tokens"),
    ],
)
def test_data_that_cannot_be_used(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    path = write_chats(tmp_path / "chats.jsonl")
    with pytest.raises(UserError, match=message):
        prepare_rows(options(path, **changes), small_tokenizer(), tmp_path / "cache")


def test_eval_path_leaves_all_chats_to_training(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One?"}\n{"messages": [{"role": "user", "content": "Two?"}]}\nnot read\n')
    data = options(write_chats(tmp_path / "chats.jsonl"), eval_path=str(prompts))
    tokenizer = small_tokenizer()
    assert prepare_rows(data, tokenizer, tmp_path / "cache").stats.chats == 40
    (text,) = (tokenizer.decode(ids) for ids in eval_prompts(data, tokenizer, 1))
    assert "Two?" in text
    with pytest.raises(UserError, match="prompts.jsonl:3: not valid JSON"):
        eval_prompts(data, tokenizer, 9)
    prompts.write_text("")
    assert eval_prompts(data, tokenizer, 9) == []


@pytest.mark.parametrize("from_file", [True, False])
def test_prompts_are_spread_over_all_held_out_chats(from_file: bool, tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl")
    data = options(file, eval_path=str(file)) if from_file else options(file, holdout=20)
    tokenizer = small_tokenizer()
    texts = [tokenizer.decode(ids) for ids in eval_prompts(data, tokenizer, 4)]
    asked = [int(text.split("Q")[1].split("<")[0]) for text in texts]
    assert [number // 10 for number in asked] == [0, 1, 2, 3], "one of each quarter of the file"


@pytest.mark.parametrize(("wanted", "said"), [(4, 0), (5, 1)])
def test_fewer_prompts_than_asked_for_are_said_once_a_node(wanted: int, said: int, tmp_path: Path) -> None:
    data, console = options(write_chats(tmp_path / "chats.jsonl")), []
    config = SimpleNamespace(data=data, eval=SimpleNamespace(prompts=wanted))
    journal = SimpleNamespace(announce=lambda line, every_rank: console.extend([line] * every_rank))
    for leads in (True, False):
        rank = SimpleNamespace(config=config, journal=journal, leads_node=leads)
        assert len(held_out_prompts(cast(Any, rank), cast(Any, SimpleNamespace(tokenizer=small_tokenizer())))) == 4
    assert console == ["eval.prompts asks for 5 held-out prompts, data.holdout gives 4"] * said


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.toml")))
def test_presets_hold_out_as_many_chats_as_they_decode(preset: str) -> None:
    config = parse([f"--preset={preset}"]).config
    assert config.eval.prompts <= config.data.holdout


def test_row_order_is_a_permutation_per_epoch_and_stateless() -> None:
    order = [row_order(7, 3, micro_batch) for micro_batch in range(21)]
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order != [row_order(7, 4, micro_batch) for micro_batch in range(21)]
    assert [row_order(7, 3, micro_batch) for micro_batch in reversed(range(21))] == order[::-1]
    assert order[:7] == [1, 4, 2, 0, 3, 5, 6], "the order of runs that may be resumed has changed"


@given(num_chats=st.integers(1, 500), share=st.floats(0, 1))
def test_held_out_chats_are_as_many_as_asked_for(num_chats: int, share: float) -> None:
    holdout = int(share * num_chats)
    chosen = spread(num_chats, holdout)
    assert len(chosen) == holdout and all(0 <= index < num_chats for index in chosen)
