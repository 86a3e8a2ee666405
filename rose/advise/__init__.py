"""Advice to an operator before anything of ROSE is installed: what lending would bring, and cost.

Prometheus, or /metrics for a while ──► Usage of each deployment, as its engines report it
a trace of requests ─────────────────────────┐
Usage ──► requests as dense as those were ──► what-if of the simulator, hosts alone and lending
                                             ▼
                             Advice: idle GPU-hours, tokens, p99, money, and how sure each is
"""

from rose.advise.advice import Advice, Assumed, DeploymentAdvice, advice_of
from rose.advise.usage import Usage

__all__ = ["Advice", "Assumed", "DeploymentAdvice", "Usage", "advice_of"]
