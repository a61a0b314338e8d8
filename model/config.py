"""Validated configuration. A mistake raises `UserError`: one sentence with what was wrong and the fix."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model.errors import RunFailed, UserError

__all__ = ["RunFailed", "UserError"]

CONF = Path(__file__).resolve().parent.parent / "conf"
LogitScale = Literal["none", "log_n", "yarn", "drope"]


def homes() -> list[str]:
    """The home directory, and where it really is: on many clusters it is a link. None where it is the root."""
    home = os.path.expanduser("~")
    return [path for path in dict.fromkeys([home.rstrip("/"), os.path.realpath(home).rstrip("/")]) if path]


def from_home(path: Path | str) -> str:
    """The path with ~ for the home directory, so that no record of a run tells whose it was."""
    given = re.sub("^/+", "/", str(path))
    for home in homes():
        if given == home or given.startswith(f"{home}/"):
            return f"~{given[len(home) :]}"
    return str(path)


def to_path(given: str) -> Path:
    """The path with ~ expanded; a user that does not exist is left for whoever opens it to miss."""
    return Path(os.path.expanduser(given))


def _place(given: str) -> str:
    if "\0" in given:
        raise PydanticCustomError("path", "Input should be a path without a null character")
    return from_home(given)


Place = Annotated[str, AfterValidator(_place)]  # of files; whoever opens one expands ~


class Strict(BaseModel):
    """Unknown keys, wrong types, NaN and infinity are refused; instances never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise PydanticCustomError("bool", "Input should be something other than true or false")
        return value


StrictModel = TypeVar("StrictModel", bound=Strict)


@dataclass(frozen=True)
class Dims:
    """The only things that a position encoding may know about the model."""

    n_embd: int
    n_head: int
    head_dim: int
    context_length: int
    original_length: int  # the window of the pretraining, where context_length is an extended one
    causal: bool  # whether keys after the query are hidden


class GPTConfig(Strict):
    """Shape of the decoder. `n_head` must divide `n_embd`; `context_length` is the trained length in tokens.

    `original_length` is that of the pretraining, where `context_length` was extended from it (init_from= sets it).
    `logit_scale` multiplies the attention logits past the original length: see model/logit_scale.py.
    """

    n_layer: Annotated[int, Field(ge=1, le=10_000)]
    n_head: Annotated[int, Field(ge=1, le=1_000_000)]
    n_embd: Annotated[int, Field(ge=1, le=1_000_000)]
    context_length: Annotated[int, Field(ge=1, le=1_000_000_000)]
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bias: bool = False
    causal: bool = True
    original_length: PositiveInt | None = None
    logit_scale: LogitScale = "none"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> GPTConfig:
        if self.n_embd % self.n_head:
            widths = [self.n_embd // self.n_head * self.n_head, -(-self.n_embd // self.n_head) * self.n_head]
            fits = " or ".join(str(width) for width in widths if width)
            raise ValueError(
                f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}; "
                f"give a head count that does, or n_embd={fits}"
            )
        return self

    @property
    def dims(self) -> Dims:
        original = self.original_length or self.context_length
        head_dim = self.n_embd // self.n_head
        return Dims(self.n_embd, self.n_head, head_dim, self.context_length, original, self.causal)


def nearest(wrong: str, valid: Iterable[str]) -> str:
    """The valid name closest to a mistyped one, as '; did you mean X?', else '; valid: ...'."""
    valid = sorted(valid)
    parent, _, leaf = wrong.rpartition(".")
    siblings = [name for name in valid if name.rpartition(".")[0] == parent]
    # by the last part, siblings first: a shared prefix would make any two names look alike
    for names in (siblings, valid):
        by_leaf = {name.rpartition(".")[2]: name for name in names}
        match = [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
        match = match or difflib.get_close_matches(wrong, names, 1, 0.8)
        if match:
            return f"; did you mean {match[0]}?"
    return f"; valid: {', '.join(valid)}"


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of every leaf of a nested mapping."""
    keys: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, Mapping) and value
        keys += flat_keys(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return keys


def validate(schema: type[StrictModel], values: Mapping[str, Any], prefix: str = "") -> StrictModel:
    """Turn a plain mapping into `schema`. `prefix` is put before key names in messages, e.g. 'position.'.

    Raises UserError with one sentence about the first thing that is wrong.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(" ".join(_sentence(schema, error, prefix).split())) from None


def _sentence(schema: type[BaseModel], error: ValidationError, prefix: str) -> str:
    first = error.errors(include_url=False)[0]
    key = prefix + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(key, _schema_keys(schema, prefix))}"
    if first["type"] == "missing":
        return f"{key}: missing; give {key}=<value>"
    if first["type"] == "value_error":  # our own validators already write whole sentences
        return str(first["ctx"]["error"])
    wanted = (
        first["msg"].removeprefix("Input should be ").removesuffix(", unable to parse string as a number")
    )
    given = first["input"]
    shown = given if isinstance(given, str | int | float | None) else f"<{type(given).__name__}>"
    return f"{key}={shown}: expected {wanted}"


def _schema_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in schema.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            keys += _schema_keys(nested, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
