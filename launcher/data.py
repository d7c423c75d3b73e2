"""Packed rows for training and prompts for evaluation, from chats. Built once per node, then memory-mapped.

The chats, the tokenizer and the options name a folder of the cache; where it exists, nothing is read again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.chat_mask import ChatRenderer
from launcher.chats import ChatSource, Problem, parse_chat, report
from launcher.config_sections import DataConfig
from launcher.errors import RetryableError, UserError
from launcher.packing import Row, layout_row
from launcher.row_builder import PackStats, RowOptions, build_rows
from models.target_files import LOCK_TIMEOUT, build_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 2
"""Part of a folder's name; raise it whenever the same chats would give other rows or statistics."""


class PackedRows:
    """Rows of one length, read from memory-mapped Arrow files as they are asked for."""

    def __init__(self, folder: Path) -> None:
        import pyarrow

        # Written by datasets, which would import pandas to read them: a second of every start.
        parts = json.loads((folder / "rows" / "state.json").read_text())["_data_files"]
        maps = [pyarrow.memory_map(str(folder / "rows" / part["filename"])) for part in parts]
        self._rows: Any = pyarrow.concat_tables([pyarrow.ipc.open_stream(file).read_all() for file in maps])
        self.stats = PackStats(**json.loads((folder / "stats.json").read_text()))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """One row: ids, doc and positions int32 [S], loss_mask bool [S]."""
        tokens, mask = self._stored("ids", index), self._stored("loss_mask", index)
        ids = tokens.to_numpy(zero_copy_only=False, writable=True)
        loss_mask = mask.to_numpy(zero_copy_only=False, writable=True)
        return layout_row(ids, loss_mask, self._stored("lengths", index).to_pylist())

    def chats(self, index: int) -> list[str]:
        """`file:line` of each document of a row, for error messages."""
        return self._stored("where", index).to_pylist()

    def _stored(self, name: str, index: int) -> Any:
        return self._rows[name][index].values


def prepare_rows(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, cache_root: Path, patience: float = LOCK_TIMEOUT
) -> PackedRows:
    """The packed rows of these chats, built first if they are not in the cache.

    Raises:
        UserError: no file, or chats that cannot be used; all of them at once, by file and line.
        RetryableError: another process has been packing the same rows for `patience` seconds.
    """
    source = ChatSource(data.path, "data.path", data.max_chats)
    renderer = ChatRenderer(tokenizer)
    options = RowOptions(data.row_length, data.train_on == "last", _held_out_of(data, source))

    def build(folder: Path) -> None:
        logger.info("tokenising and packing %s, once, into %s", source.name, folder.parent)
        with _quiet_datasets():
            build_rows(source, renderer, options, folder)

    folder = cache_root / "data" / _digest(data, source, tokenizer)
    try:
        rows = PackedRows(build_once(folder, build, patience))
    except TimeoutError as error:
        raise RetryableError(*str(error).split(" -> ", 1)) from error
    logger.info("%s: %s", source.name, rows.stats)
    return rows


def eval_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[list[int]]:
    """Token ids of held-out prompts, ready for the assistant's answer; fewer than asked for if there are no more.

    They come from `data.eval_path`, or are the chats of `data.path` that `prepare_rows` leaves out; evenly spread.

    Raises:
        UserError: as for `prepare_rows`.
    """
    renderer = ChatRenderer(tokenizer)
    if data.eval_path is None:
        source = ChatSource(data.path, "data.path", data.max_chats)
        held = sorted(_held_out_of(data, source))
    else:
        source = ChatSource(data.eval_path, "data.eval_path")
        held = range(source.count())
    chosen = {held[place] for place in spread(len(held), min(num_prompts, len(held)))}
    prompts, problems = [], []
    for index, (where, content) in enumerate(source.records()):
        try:
            if index in chosen:
                prompts.append(renderer.prompt_ids(parse_chat(content, where)))
        except Problem as problem:
            problems.append(f"{where}: {problem}")
    report(problems, source.name)
    return prompts


def row_order(num_rows: int, seed: int, micro_batch: int) -> int:
    """The row of a micro-batch: each epoch is a permutation of all rows, so the index alone is the data position."""
    epoch, place = divmod(micro_batch, num_rows)
    return int(_permutation(num_rows, seed, epoch)[place])


def spread(num_chats: int, wanted: int) -> frozenset[int]:
    """Indices of `wanted` chats, evenly spread, as files are often sorted: the chats kept for evaluation, or some."""
    return frozenset((2 * i + 1) * num_chats // (2 * wanted) for i in range(wanted))


@functools.lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # RandomState's streams are frozen for good, so a resumed run finds the same order under another numpy.
    return np.random.RandomState([seed % 2**32, epoch]).permutation(num_rows)


def _held_out_of(data: DataConfig, source: ChatSource) -> frozenset[int]:
    if data.eval_path is not None:
        return frozenset()
    num_chats = source.count()
    if num_chats <= data.holdout:
        raise UserError(
            f"data.path: {source.name} has {num_chats} chats, and data.holdout keeps {data.holdout} for evaluation",
            "lower data.holdout or add chats",
        )
    return spread(num_chats, data.holdout)


def _digest(data: DataConfig, source: ChatSource, tokenizer: Any) -> str:
    holdout = data.holdout if data.eval_path is None else 0
    vocabulary = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    options = [data.row_length, data.max_chats, data.train_on, holdout]
    parts = [FORMAT, source.identity(), options, vocabulary, str(tokenizer.chat_template), tokenizer.pad_token_id]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _quiet_datasets() -> Generator[None]:
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
