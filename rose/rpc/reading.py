"""Reader of protobuf messages into dataclasses, field by field of the same name.

A field's type may name checks, `Annotated[str, check]`: each is called with the value and with the
field's name for messages ("RegisterJob.job"), and returns the value or raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

T = TypeVar("T")


def read(kind: type[T], message: Message, /, **given: object) -> T:
    """Return a dataclass of type `kind`, filled from the message's fields of the same names.

    given: values of fields that are not in the message. A nested message becomes a dataclass, a
    repeated field a tuple, an absent optional field None. Raises what the fields' checks raise.
    """
    plan = _plan(kind, type(message), *given)  # type: ignore[arg-type]  # classes are hashable
    values: dict[str, Any] = {**given, **{name: getattr(message, name) for name in plan.copied}}
    for field in plan.converted:
        value = getattr(message, field.name)
        if field.is_optional and not message.HasField(field.name):
            value = None
        elif field.inner is not None:
            value = read(field.inner, value)
        elif field.is_repeated:
            value = tuple(value)
        else:
            for check in field.checks:
                value = check(value, field.label)
        values[field.name] = value
    return kind(**values)


@dataclass(frozen=True, slots=True)
class _Field:
    """Field that a dataclass and its message share, and whose value is checked or converted.

    label: its name for messages. checks: called with each value. inner: dataclass of a nested
    message.
    """

    name: str
    label: str
    checks: tuple[Callable[[Any, str], Any], ...]
    inner: type[Any] | None
    is_optional: bool
    is_repeated: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fields that a dataclass and its message share: those whose values are copied as they stand,
    and all others.
    """

    copied: tuple[str, ...]
    converted: tuple[_Field, ...]


@cache
def _plan(kind: type[Any], message: type[Message], *given: str) -> _Plan:
    """Return the plan by which messages of a type are read, but for the fields that are given."""
    hints = get_type_hints(kind, include_extras=True)
    own, empty = message.DESCRIPTOR.fields_by_name, message()
    label = message.__name__.removesuffix("Request")
    copied, converted = [], []
    for name in kind.__dataclass_fields__:
        if name in given or name not in own:
            continue
        hint = hints[name]
        inner = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
        checks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        # A message that has to be there is read as an empty one, which its checks refuse.
        is_optional = own[name].has_presence and inner is not hint
        absent = getattr(empty, name)
        is_repeated = isinstance(absent, Sequence) and not isinstance(absent, str)
        if checks or inner or is_optional or is_repeated:
            inner = cast("type[Any] | None", inner)
            where = f"{label}.{name}"
            converted.append(_Field(name, where, checks, inner, is_optional, is_repeated))
        else:
            copied.append(name)
    return _Plan(tuple(copied), tuple(converted))
