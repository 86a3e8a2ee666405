"""Capacity policies: what may be lent, where, under which conditions, and who decided it."""

from elastic_scheduler.capacity.advice import Advice, AdviceBook, Lendable
from elastic_scheduler.capacity.crd import PolicyStatus, crd
from elastic_scheduler.capacity.effective import EffectivePolicy, effective, in_canary
from elastic_scheduler.capacity.gate import (
    CLI,
    CapacityGate,
    Halt,
    Limit,
    LimitKind,
    NodeFacts,
    Note,
    Verdict,
    cli_policy,
)
from elastic_scheduler.capacity.policy import (
    CapacityPolicy,
    PolicyMode,
    StopPolicy,
    parse_policy,
    policy_of,
    read_policies,
)
from elastic_scheduler.capacity.schema import crd_schema, docs_table

__all__ = [
    "CLI",
    "Advice",
    "AdviceBook",
    "CapacityGate",
    "CapacityPolicy",
    "EffectivePolicy",
    "Halt",
    "Lendable",
    "Limit",
    "LimitKind",
    "NodeFacts",
    "Note",
    "PolicyMode",
    "PolicyStatus",
    "StopPolicy",
    "Verdict",
    "cli_policy",
    "crd",
    "crd_schema",
    "docs_table",
    "effective",
    "in_canary",
    "parse_policy",
    "policy_of",
    "read_policies",
]
