"""The shipped chats are as promised, and the script that makes them keeps only finished, new answers."""

from __future__ import annotations

from launcher.chats import ChatSource, parse_chat
from launcher.config_sections import DEMO_CHATS
from launcher.demo_chats import usable
from launcher.demo_prompts import TEMPLATES, compose_prompts


def test_shipped_chats() -> None:
    chats = [parse_chat(content, where).messages for where, content in ChatSource(str(DEMO_CHATS), "x").records()]
    assert len(chats) >= 1000 and DEMO_CHATS.stat().st_size < 2_000_000
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chat in chats)
    prompts, answers = ([chat[turn]["content"] for chat in chats] for turn in (0, 1))
    assert len(set(prompts)) == len(set(answers)) == len(chats)
    assert set(prompts) <= set(compose_prompts(seed=0)), "the file no longer comes from this script"


def test_prompts_are_distinct_repeatable_and_from_every_template() -> None:
    prompts = compose_prompts(seed=0)
    assert prompts == compose_prompts(seed=0) != compose_prompts(seed=1)
    assert len(set(prompts)) == len(prompts) <= sum(TEMPLATES.values())
    assert not any("{" in prompt for prompt in prompts)


def test_only_finished_new_answers_are_kept() -> None:
    seen = {"An old answer here."}
    answers = [
        ("a", None),
        ("b", "Too short."),
        ("c", "An old answer here."),
        ("d", "A new answer."),
        ("e", "A new answer."),
    ]
    assert [chat["messages"][0]["content"] for chat in usable(answers, seen)] == ["d"]
    assert "A new answer." in seen
