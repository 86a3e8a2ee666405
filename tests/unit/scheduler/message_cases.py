"""Any message that a peer of the scheduler can send: strategies over all fields of all of them."""

import math

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from rose.rpc import rose_pb2 as pb
from tests.fuzz.target_scheduler import UNARY

SENT: list[type[Message]] = [*UNARY, pb.NodeReport]
NAMES = ["good", "g0", "n7", "grpo", "", "http://h", "http://a..b", "x" * 300, "\n", "\u2028"]
ODD = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300, 3.0]
CPP = FieldDescriptor
UNSIGNED = {CPP.CPPTYPE_UINT32: 2**32 - 1, CPP.CPPTYPE_UINT64: 2**64 - 1}


def messages() -> st.SearchStrategy[Message]:
    """Return reports of nodes and requests of all others, with any values in any field."""
    return st.sampled_from(SENT).flatmap(filled)


def filled(kind: type[Message]) -> st.SearchStrategy[Message]:
    """A message of this kind with any values in any of its fields."""
    fields = {each.name: _values(each) for each in kind.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: _made(kind, values))


def _made(kind: type[Message], values: dict[str, object]) -> Message:
    # Only the last field of a oneof is set.
    return kind(**values)


def _values(field: FieldDescriptor) -> st.SearchStrategy[object]:
    one: st.SearchStrategy[object]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return st.dictionaries(st.sampled_from(NAMES), st.sampled_from(NAMES), max_size=3)
    if field.message_type is not None:
        one = filled(getattr(pb, field.message_type.name))
    elif field.enum_type is not None:
        one = st.integers(0, 6)
    elif field.cpp_type == CPP.CPPTYPE_STRING:
        one = st.sampled_from(NAMES)
    elif field.cpp_type == CPP.CPPTYPE_BOOL:
        one = st.booleans()
    elif field.cpp_type == CPP.CPPTYPE_DOUBLE:
        one = st.sampled_from(ODD)
    else:
        most = UNSIGNED[field.cpp_type]
        one = st.sampled_from([0, 1, 2, 5, 2**31, most]) | st.integers(0, most)
    return st.lists(one, max_size=3) if field.is_repeated else one
