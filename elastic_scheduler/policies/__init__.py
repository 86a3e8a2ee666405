"""Ways to lease capacity, comparable on the same traces."""

from elastic_scheduler.policies.types import Policy, make_policy, policy_names

__all__ = ["Policy", "make_policy", "policy_names"]
