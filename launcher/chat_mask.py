"""Render a chat by the tokenizer's own template, and find which tokens are the assistant's.

Templates rarely mark what the assistant says, so it is found from outside: the chat is rendered again with a sentinel
beside the content of one turn, and where the two texts part is where that content lies. No template is parsed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from launcher.chats import Chat, Message, Problem
from launcher.errors import UserError
from launcher.packing import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "\u241fsentinel\u241f"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError)
"""What a template raises when a chat does not suit it."""

Span = tuple[int, int]
"""Characters [start, end) of a rendered chat."""


class ChatRenderer:
    """Turns chats into tokens with one tokenizer. Its methods raise Problem for a chat that cannot be rendered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise UserError(f"target.model: the tokenizer of {name} has no chat template", "choose an instruct model")
        if not tokenizer.is_fast:
            raise UserError(f"target.model: the tokenizer of {name} gives no offsets", "use its fast version")
        self.template_name = f"the chat template of {name}"
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.pad_id: int = 0 if pad is None else pad
        self._marked = bool(GENERATION.search(str(tokenizer.chat_template)))
        self._special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special |= set(tokenizer.all_special_ids)
        probe = [{"role": "user", "content": "x"}]
        try:
            self._announces_assistant = self.render(probe, prompt=True) != self.render(probe)
        except Problem as problem:
            raise UserError(f"target.model: {problem}", "choose a model with a working chat template") from problem

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The chat as text; with `prompt`, up to where the assistant's answer begins."""
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        except RENDER_ERRORS as error:
            raise Problem(f"{self.template_name} cannot render it: {error}") from error

    def prompt_ids(self, chat: Chat) -> list[int]:
        """Tokens of a prompt for the assistant's last turn, whose own text, if there, is left out."""
        messages = chat.messages[:-1] if chat.messages[-1]["role"] == "assistant" else chat.messages
        if not messages:
            raise Problem("nothing comes before the assistant's turn")
        return self.tokenizer(self.render(messages, prompt=True), add_special_tokens=False)["input_ids"]

    def encode(self, chat: Chat, last_only: bool) -> Document:
        """The whole chat, with the assistant's tokens marked: all of its turns, or only the last.

        Marked is what the model would generate: the content, what the template puts between the header and it, and the
        end-of-turn token, but not the line break behind.
        """
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not turns:
            raise Problem("no assistant turn")
        if self._marked:
            return self._encode_marked(chat, last_only)
        text = self.render(chat.messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = np.array(encoded["input_ids"], np.int32), np.array(encoded["offset_mapping"])
        mask = np.zeros(len(ids), np.bool_)
        for turn in turns[-1:] if last_only else turns:
            self._mark(mask, ids, offsets, text, self._span(chat.messages, turn, text))
        return Document(ids=ids, loss_mask=mask)

    def _encode_marked(self, chat: Chat, last_only: bool) -> Document:
        """A template with generation marks knows itself what is the assistant's."""
        try:
            encoded = self.tokenizer.apply_chat_template(
                chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except RENDER_ERRORS as error:
            raise Problem(f"{self.template_name} cannot render it: {error}") from error
        mask = np.array(encoded["assistant_masks"], np.bool_)
        if last_only:
            starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
            mask[: starts[-1] if len(starts) else 0] = False
        return Document(ids=np.array(encoded["input_ids"], np.int32), loss_mask=mask)

    def _span(self, messages: Sequence[Message], turn: int, text: str) -> Span:
        """Characters of one assistant turn: from the end of its header to the end of its content."""
        behind = self.render(_replaced(messages, turn, messages[turn]["content"] + SENTINEL))
        end = _common(text, behind)
        if not behind.endswith(text[end:]) or SENTINEL not in behind:
            raise Problem(f"{self.template_name} does not show the content of message {turn + 1} as it is")
        start = self._header_end(messages[:turn], text)
        if start is None or start > end:
            start = _common(text, self.render(_replaced(messages, turn, SENTINEL)))
        return start, end

    def _header_end(self, earlier: Sequence[Message], text: str) -> int | None:
        """Where the assistant's header ends, if the template's own generation prompt is found in the text."""
        if not earlier or not self._announces_assistant:
            return None
        prompt = self.render(earlier, prompt=True)
        return len(prompt) if text.startswith(prompt) else None

    def _mark(self, mask: np.ndarray, ids: np.ndarray, offsets: np.ndarray, text: str, span: Span) -> None:
        """Mark the tokens of a span, and the end-of-turn token if nothing but white space lies between."""
        start, end = span
        first, behind = np.searchsorted(offsets[:, 0], [start, end])
        mask[first:behind] = True
        for index in range(behind, len(ids)):
            if ids[index] in self._special:
                mask[behind : index + 1] = True
                return
            if text[offsets[index, 0] : offsets[index, 1]].strip():
                return


def _replaced(messages: Sequence[Message], turn: int, content: str) -> list[Message]:
    return [message | {"content": content} if i == turn else message for i, message in enumerate(messages)]


def _common(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    return len(os.path.commonprefix([one, other]))
