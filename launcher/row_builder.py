"""Build packed rows from chats: tokenise, drop what cannot train, pack, write Arrow files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.chat_mask import ChatRenderer
from launcher.chats import Chat, ChatSource, Problem, parse_chat, report
from launcher.errors import UserError
from launcher.packing import Document, Row, build_row, has_anchor, plan_rows

if TYPE_CHECKING:
    from datasets import Dataset

PARALLEL_CHATS = 20_000
"""From this many chats on, tokenising is spread over processes."""


@dataclass(frozen=True)
class RowOptions:
    """All that decides how chats become rows, besides chats and tokenizer."""

    row_length: int
    train_on_last: bool
    holdout: frozenset[int]
    """Indices of the chats that are left out."""


@dataclass(frozen=True)
class PackStats:
    """What became of the chats."""

    chats: int
    """Chats in the rows."""
    rows: int
    truncated: int
    """Chats longer than a row, cut at its end."""
    dropped: int
    """Chats left out, since they have no two supervised tokens side by side within a row."""
    fill: float
    """Share of the rows' tokens that is not padding."""
    supervised: float
    """Share of the tokens that carries loss; padding is not counted."""
    content: str
    """SHA-256 of all rows: the same wherever and from whatever file the same rows were made."""

    def __str__(self) -> str:
        text = f"{self.chats} chats in {self.rows} rows, {self.fill:.1%} full, {self.supervised:.1%} supervised"
        extra = [f"{n} {what}" for n, what in ((self.truncated, "truncated"), (self.dropped, "dropped")) if n]
        return ", ".join([text, *extra])


def build_rows(source: ChatSource, renderer: ChatRenderer, options: RowOptions, folder: Path) -> None:
    """Write the Arrow files of `rows` and `stats.json` into `folder`.

    Raises:
        UserError: chats that cannot be used, all of them at once, or nothing to train on.
    """
    scratch = folder / "scratch"
    chats = _tokenise(source, renderer, options, scratch)
    columns = chats.select_columns(["length", "anchored"]).with_format("numpy")[:]
    usable = np.flatnonzero(columns["anchored"])
    if not len(usable):
        raise UserError(
            f"data.path: no chat of {source.name} has two assistant tokens within {options.row_length} tokens",
            "raise data.row_length or use other chats",
        )
    lengths = columns["length"][usable]
    plan = plan_rows(np.minimum(lengths, options.row_length).tolist(), options.row_length)
    written = _write_rows(chats, [usable[row] for row in plan], options.row_length, renderer.pad_id, folder)
    tokens = int(np.minimum(lengths, options.row_length).sum())
    stats = PackStats(
        chats=len(usable),
        rows=len(plan),
        truncated=int((lengths > options.row_length).sum()),
        dropped=len(chats) - len(usable),
        fill=tokens / (len(plan) * options.row_length),
        supervised=written.supervised / tokens,
        content=written.digest.hexdigest(),
    )
    (folder / "stats.json").write_text(json.dumps(asdict(stats)))
    del chats  # its files are memory-mapped
    shutil.rmtree(scratch)


def _tokenise(source: ChatSource, renderer: ChatRenderer, options: RowOptions, scratch: Path) -> Dataset:
    """One record per chat: ids and loss_mask cut to the row, its uncut length, and whether it can hold a block."""
    from datasets import Dataset

    def records() -> Iterator[dict[str, str]]:
        for index, (where, content) in enumerate(source.records()):
            if index not in options.holdout:
                try:
                    # As JSON, since messages may differ in their keys, which a table's columns may not.
                    yield {"where": where, "messages": json.dumps(parse_chat(content, where).messages), "problem": ""}
                except Problem as problem:
                    yield {"where": where, "messages": "", "problem": f"{where}: {problem}"}

    def encode(record: dict[str, str]) -> dict[str, Any]:
        chat, problem, where = Document.empty(), record["problem"], record["where"]
        try:
            if not problem:
                chat = renderer.encode(Chat(json.loads(record["messages"]), where), options.train_on_last)
        except Problem as error:
            problem = f"{where}: {error}"
        return _stored(chat, options.row_length) | {"problem": problem}

    # Fingerprints only name scratch files here; given, they spare datasets the hashing of closures.
    raw: Any = Dataset.from_generator(records, cache_dir=str(scratch), fingerprint="raw")
    processes = min(16, len(os.sched_getaffinity(0))) if len(raw) >= PARALLEL_CHATS else None
    chats = raw.map(encode, remove_columns=["messages"], num_proc=processes, new_fingerprint="tokenised")
    report([problem for problem in chats["problem"] if problem], source.name)
    return chats


def _stored(chat: Document, row_length: int) -> dict[str, Any]:
    mask = chat.loss_mask[:row_length]
    return {
        "ids": chat.ids[:row_length],
        "loss_mask": mask,
        "length": len(chat.ids),
        "anchored": has_anchor(mask),
    }


class _Written:
    """The rows written so far: their supervised tokens, and a digest of what they hold."""

    def __init__(self) -> None:
        self.supervised, self.digest = 0, hashlib.sha256()

    def add(self, row: Row, lengths: list[int]) -> None:
        self.supervised += int(row.loss_mask.sum())
        for part in (row.ids.astype("<i4"), np.packbits(row.loss_mask), np.array(lengths, "<i4")):
            self.digest.update(part.tobytes())


def _write_rows(chats: Dataset, plan: Sequence[Any], row_length: int, pad_id: int, folder: Path) -> _Written:
    """Write the planned rows, and say what they hold."""
    from datasets import Dataset, Features, List, Value

    features = Features(
        {
            "ids": List(Value("int32"), length=row_length),
            "loss_mask": List(Value("bool"), length=row_length),
            "lengths": List(Value("int32")),
            "where": List(Value("string")),
        }
    )
    arrays = chats.with_format("numpy", columns=["ids", "loss_mask"])
    written = _Written()

    def rows() -> Iterator[dict[str, Any]]:
        for members in plan:
            stored = [arrays[int(index)] for index in members]
            documents = [Document(ids=chat["ids"], loss_mask=chat["loss_mask"]) for chat in stored]
            row = build_row(documents, row_length, pad_id)
            lengths = [len(document.ids) for document in documents]
            written.add(row, lengths)
            yield {
                "ids": row.ids,
                "loss_mask": row.loss_mask,
                "lengths": lengths,
                "where": [chats[int(index)]["where"] for index in members],
            }

    packed: Any = Dataset.from_generator(rows, features=features, cache_dir=str(folder / "scratch"), fingerprint="rows")
    packed.save_to_disk(str(folder / "rows"))
    return written
