"""Turn validation errors into one line each: what, where, and what was probably meant. No torch."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo


def walk_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All leaf options of a config class as (dotted key, field)."""
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from walk_fields(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def admits_none(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' with the nearest known words, or nothing.

    A dotted key is compared whole, then by its last part: `trian.lr` and `train.learning_rate` both find theirs.
    """
    known = list(known)
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.6)
    if not near:
        leaves = {key.rsplit(".", 1)[-1]: key for key in known}
        near = [leaves[leaf] for leaf in difflib.get_close_matches(word.rsplit(".", 1)[-1], leaves, n=2, cutoff=0.6)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def describe_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per problem of a pydantic error."""
    known = [key for key, _ in walk_fields(model)]
    sections = [name for name, field in model.model_fields.items() if name not in known]
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            names = known if "." in key else sections
            lines.append(f"{key}: unknown option{did_you_mean(key, names)}")
        elif not problem["loc"]:
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message[0].lower()}{message[1:]} (got {problem['input']!r})")
    return list(dict.fromkeys(lines))
