"""Read chats: JSONL files or hub datasets, in the formats `messages`, `conversations` and `prompt`.

Nothing here raises at the first bad line: a line becomes a chat or a problem, and all problems are reported together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from models.errors import first_line

MAX_PROBLEMS = 20
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "function": "tool"}
"""Role names of the `conversations` format; others are taken as they are."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """One conversation and where it came from."""

    messages: list[Message]
    where: str
    """`file:line`, for error messages."""


class Problem(ValueError):
    """What is wrong with one chat; never leaves this package as such, see `report`."""


def report(problems: Sequence[str], source: str) -> None:
    """Raise all problems as one UserError, the first 20 in words; does nothing without any."""
    if not problems:
        return
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > MAX_PROBLEMS:
        shown.append(f"... and {len(problems) - MAX_PROBLEMS} more")
    raise UserError("\n".join(shown), f"mend or remove these chats of {source}")


class ChatSource:
    """The lines of a JSONL file, or the rows of a hub dataset, that hold something. Cheap to make, read on demand."""

    def __init__(self, path: str, option: str, max_chats: int | None = None) -> None:
        self.name = path
        self._max_chats = max_chats
        self._rows: Any = None
        self._file = Path(path).expanduser()
        if not self._file.is_file():
            if self._file.exists() or self._file.suffix in {".jsonl", ".json"} or not HUB_NAME.fullmatch(path):
                raise UserError(f"{option}: no file {path}", "check the path")
            self._rows = _hub_rows(path, option)

    def identity(self) -> str:
        """Changes whenever the content may have changed."""
        if self._rows is not None:
            return f"{self.name} {self._rows._fingerprint}"
        stat = self._file.stat()
        return f"{self._file.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    def records(self) -> Iterator[tuple[str, str | Message]]:
        """Place (`file:line`) and content of each chat: a line of JSON, or the row of a dataset."""
        return islice(self._from_hub() if self._rows is not None else self._from_file(), self._max_chats)

    def count(self) -> int:
        return sum(1 for _ in self.records())

    def _from_hub(self) -> Iterator[tuple[str, Message]]:
        return ((f"{self.name} row {index}", row) for index, row in enumerate(self._rows))

    def _from_file(self) -> Iterator[tuple[str, str]]:
        with self._file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{self._file.name}:{number}", line


def parse_chat(content: str | Message, where: str) -> Chat:
    """A chat in any of the known formats.

    Raises:
        Problem: it is none; says what is missing, without the place.
    """
    record = _parse_json(content) if isinstance(content, str) else content
    if not isinstance(record, dict):
        raise Problem("not a JSON object")
    if "prompt" in record:
        _check_text(record["prompt"], "the prompt")
        return Chat([{"role": "user", "content": record["prompt"]}], where)
    turns = record.get("messages", record.get("conversations"))
    if not isinstance(turns, list):
        raise Problem(f"no list `messages` or `conversations`, only {', '.join(sorted(record)) or 'nothing'}")
    if not turns:
        raise Problem("the list of messages is empty")
    return Chat([_parse_message(turn, number) for number, turn in enumerate(turns, start=1)], where)


def _parse_json(line: str) -> Any:
    try:
        return json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise Problem(f"not valid JSON: {error.msg} at column {error.colno}") from None


def _parse_message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Problem(f"message {number} is not an object")
    message = dict(turn)
    if "from" in message and "role" not in message:
        source = message.pop("from")
        message |= {"role": ROLES.get(source, source), "content": message.pop("value", None)}
    if not isinstance(message.get("role"), str):
        raise Problem(f"message {number} has no role")
    _check_text(message.get("content"), f"message {number} ({message['role']})")
    return message


def _check_text(content: Any, name: str) -> None:
    if not isinstance(content, str):
        raise Problem(f"{name} has no text")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise Problem(f"{name} is not valid Unicode") from None


def _hub_rows(name: str, option: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, split="train")
    except Exception as error:  # the hub's client raises dozens of kinds; each means that there is no data
        raise UserError(
            f"{option}: {name} is neither a file nor to be had from the hub: {first_line(error)}",
            "check the name and the network",
        ) from error
