"""The assistant's tokens are found in the text of any chat template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.chat_mask import ChatRenderer
from launcher.chats import Chat, Problem
from launcher.errors import UserError
from tests.small_tokenizer import (
    CHATML,
    FORCED_THINKING,
    INSTRUCT,
    MARKED,
    ROLE_ENDS,
    SHOUTING,
    THINKING,
    TRIMMED,
    small_tokenizer,
)

TWO_TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello you"},
    {"role": "user", "content": "Hello you?"},
    {"role": "assistant", "content": "Bye"},
]
REASONED = [
    *TWO_TURNS[:1],
    {"role": "assistant", "content": "<think>hm</think>Hello you"},
    TWO_TURNS[2],
    {"role": "assistant", "content": "<think>well</think>Bye"},
]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def supervised(template: str, messages: list[dict[str, Any]], last_only: bool = False) -> list[str]:
    """The supervised stretches of a chat, as text."""
    tokenizer = small_tokenizer(template)
    document = ChatRenderer(tokenizer).encode(Chat(messages, "here"), last_only)
    pieces = np.split(document.ids, np.flatnonzero(np.diff(document.loss_mask)) + 1)
    masks = np.split(document.loss_mask, np.flatnonzero(np.diff(document.loss_mask)) + 1)
    return [tokenizer.decode(piece) for piece, mask in zip(pieces, masks, strict=True) if mask[0]]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, TWO_TURNS, ["Hello you<|im_end|>", "Bye<|im_end|>"]),
        (CHATML, [{"role": "system", "content": "Be kind."}, *TWO_TURNS[:2]], ["Hello you<|im_end|>"]),
        (MARKED, TWO_TURNS, ["Hello you<|im_end|>", "Bye<|im_end|>"]),
        (THINKING, TWO_TURNS, ["Hello you<|im_end|>", f"{EMPTY_THOUGHT}Bye<|im_end|>"]),
        (THINKING, REASONED, ["Hello you<|im_end|>", f"{EMPTY_THOUGHT}Bye<|im_end|>"]),
        (FORCED_THINKING, REASONED, ["Hello you</s>", "Bye</s>"]),
        (TRIMMED, [TWO_TURNS[0], {"role": "assistant", "content": " Hello \n"}], ["Hello<|eot|>"]),
        (INSTRUCT, TWO_TURNS, ["Hello you</s>", "Bye</s>"]),
        (ROLE_ENDS, TWO_TURNS, ["\nHello you<|user|>", "\nBye"]),
        (
            CHATML,
            [TWO_TURNS[0], {"role": "assistant", "content": "Zo\u00eb \U0001f600"}],
            ["Zo\u00eb \U0001f600<|im_end|>"],
        ),
        (CHATML, [TWO_TURNS[0], {"role": "assistant", "content": ""}], ["<|im_end|>"]),
    ],
    ids=[
        "chatml",
        "system",
        "marked",
        "thinking",
        "reasoned",
        "forced",
        "trimmed",
        "instruct",
        "role",
        "utf8",
        "empty",
    ],
)
def test_assistant_tokens_and_their_end(template: str, messages: list[dict[str, Any]], expected: list[str]) -> None:
    assert supervised(template, messages) == expected
    assert supervised(template, messages, last_only=True) == expected[-1:]


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=6))
def test_any_content_is_found_in_chatml(contents: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    expected = [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]
    assert supervised(CHATML, messages) == expected


def test_a_template_that_hides_the_answer_is_named() -> None:
    with pytest.raises(Problem, match="the chat template of small does not show the content of message 2"):
        supervised(SHOUTING, TWO_TURNS)


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "has no chat template"), ("{{ messages[0]['x']['y'] }}", "cannot render"), ("{% if %}", "cannot render")],
)
def test_unusable_templates(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatRenderer(small_tokenizer(template))
