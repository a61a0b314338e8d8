"""From a configuration to an object: `_target_` names a class, the other keys are its constructor's arguments."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

from pydantic import create_model

from model.config import Dims, Strict, UserError, validate

T = TypeVar("T")


def construct(base: type[T], values: Mapping[str, Any], dims: Dims, prefix: str) -> T:
    """The subclass of `base` that `values` describes. `prefix` is put before key names in messages.

    Only classes below `model.position` are accepted, because stored configs come from strangers too.
    Raises UserError for an unknown class, an unknown argument, or a value of the wrong type or range.
    """
    arguments = dict(values)
    target = str(arguments.pop("_target_", ""))
    module_name, _, class_name = target.rpartition(".")
    kind = None
    if module_name.startswith("model.position."):
        try:
            kind = getattr(import_module(module_name), class_name, None)
        except ModuleNotFoundError:
            kind = None
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(f"{prefix}_target_={target!r}: expected a {base.__name__} below model.position")
    # the constructor's own signature is the schema, so an encoding states its options in one place
    hints = typing.get_type_hints(kind.__init__, include_extras=True)
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.name != "dims"]
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters
    }
    schema = create_model(class_name, __base__=Strict, **fields)
    checked = validate(schema, arguments, prefix)
    make: Any = kind
    built: T = make(dims, **{name: getattr(checked, name) for name in fields})
    return built
