"""Capacity policies: what may be lent, where, under which conditions, and who decided it."""

from elastic_scheduler.capacity.crd import PolicyStatus, crd, crd_schema, docs_table
from elastic_scheduler.capacity.effective import (
    Advice,
    AdviceBook,
    EffectivePolicy,
    Lendable,
    effective,
    in_canary,
)
from elastic_scheduler.capacity.gate import (
    CLI,
    CapacityGate,
    CapacityNote,
    Halt,
    Limit,
    LimitKind,
    NodeFacts,
    NodeVerdict,
    cli_policy,
)
from elastic_scheduler.capacity.policy import CapacityPolicy, PolicyMode, StopPolicy
from elastic_scheduler.capacity.policy_file import parse_policy, policies_of, policy_of

__all__ = [
    "CLI",
    "Advice",
    "AdviceBook",
    "CapacityGate",
    "CapacityNote",
    "CapacityPolicy",
    "EffectivePolicy",
    "Halt",
    "Lendable",
    "Limit",
    "LimitKind",
    "NodeFacts",
    "NodeVerdict",
    "PolicyMode",
    "PolicyStatus",
    "StopPolicy",
    "cli_policy",
    "crd",
    "crd_schema",
    "docs_table",
    "effective",
    "in_canary",
    "parse_policy",
    "policies_of",
    "policy_of",
]
