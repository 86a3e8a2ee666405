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
    label = type(message).__name__.removesuffix("Request")
    values = dict(given)
    for field in _fields(kind, type(message)):  # type: ignore[arg-type]  # classes are hashable
        if field.name in given:
            continue
        value = getattr(message, field.name)
        if field.is_optional and not message.HasField(field.name):
            value = None
        elif field.inner is not None:
            value = read(field.inner, value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
        else:
            for check in field.checks:
                value = check(value, f"{label}.{field.name}")
        values[field.name] = value
    return kind(**values)


@dataclass(frozen=True, slots=True)
class _Field:
    """Field that a dataclass and its message share.

    checks: called with each value. inner: dataclass of a nested message.
    """

    name: str
    checks: tuple[Callable[[Any, str], Any], ...]
    inner: type[Any] | None
    is_optional: bool


@cache
def _fields(kind: type[Any], message: type[Message]) -> list[_Field]:
    hints = get_type_hints(kind, include_extras=True)
    own = message.DESCRIPTOR.fields_by_name
    found = []
    for name in kind.__dataclass_fields__:
        if name in own:
            hint = hints[name]
            inner = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
            checks = hint.__metadata__ if get_origin(hint) is Annotated else ()
            # A message that has to be there is read as an empty one, which its checks refuse.
            is_optional = own[name].has_presence and inner is not hint
            found.append(_Field(name, checks, cast("type[Any] | None", inner), is_optional))
    return found
