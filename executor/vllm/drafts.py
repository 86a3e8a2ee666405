"""Drafts of a replica on vLLM: n-gram, suffix, or of layers of the policy's own (MTP).

    drafted tokens ──► one forward pass of the policy ──► accepted, or sampled anew from the policy

A draft is a proposal only, whichever policy version it is of: each token is sampled from the
distribution of the step's own version. A step's drafts count against its token budget.

vLLM 0.32 breaks that on a CPU: temperatures and top_p of drafted positions never reach its sampler,
and drafts that fill up a step (-1) are accepted. So a replica computes the first here, schedules
without the second, and a probe of the sampler decides if it starts.
"""

import math
from types import SimpleNamespace
from typing import Any, Final

from executor.errors import ExecutorError
from executor.vllm.compat import check_features, check_version
from executor.vllm.scheduler_base import ConfiguredScheduler
from executor.vllm.surfaces import DRAFT_SAMPLER

# Odds of a correct sampler to fail the probe, were its seed not fixed.
_FAILS: Final = 1e-9
_SAMPLES: Final = 4096
_TEMPERATURE: Final = 2.0
_POLICY: Final = (0.5, 0.3, 0.2)


class DraftScheduler(ConfiguredScheduler):
    """Scheduler of a replica that may have drafts; without them it is vLLM's own.

    Raises ExecutorError for drafts that a replica does not have, or that would change what is
    sampled.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        if not self.num_spec_tokens:
            return
        check_version(DRAFT_SAMPLER)
        check_features(config, "a replica")
        if getattr(self, "dynamic_sd_lookup", ()) is None:
            # With a table of numbers of drafts vLLM puts no placeholders into a step.
            most = config.scheduler_config.max_num_seqs
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (most + 1)
        from vllm.platforms import current_platform  # a replica without drafts has no use for it

        if current_platform.is_cpu():
            if config.parallel_config.world_size > 1:
                raise ExecutorError("a replica of several ranks on a CPU does not have drafts")
            make_exact()

    @property
    def draft_tokens(self) -> int:
        """Most drafted tokens of a request in one step."""
        return int(self.num_spec_tokens)


def make_exact() -> None:
    """Have this process's sampler apply each request's temperature and top_p to its drafts.

    Raises ExecutorError if the sampler is not exact then.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expanded
    check_sampler(rejection_sampler)


def _expanded(
    values: Any,  # noqa: ANN401 -- torch's tensors
    ends: Any,  # noqa: ANN401
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> Any:  # noqa: ANN401
    """Return each request's value once for each of its drafted tokens, which end at `ends`."""
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    replaced = values.masked_fill(values == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def check_sampler(sampler: Any) -> None:  # noqa: ANN401 -- the module of vLLM's sampler of drafts
    """Raise ExecutorError unless requests with a draft each sample from the policy's distribution.

    The seed is fixed: an engine passes always or never.
    """
    import torch

    ends = torch.arange(1, _SAMPLES + 1, dtype=torch.int32)
    temperature = torch.full((_SAMPLES,), _TEMPERATURE)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=temperature,
        top_k=None,
        top_p=None,
        generators={},
    )
    drafts = torch.arange(_SAMPLES, dtype=torch.int32) % len(_POLICY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        logits = (_TEMPERATURE * torch.tensor(_POLICY).log()).repeat(_SAMPLES, 1)
        logits = sampler.apply_sampling_constraints(logits, ends, metadata)
        bonus = torch.zeros((_SAMPLES, 1), dtype=torch.int32)
        sampled = sampler.rejection_sample(
            drafts, [1] * _SAMPLES, 1, ends, None, logits, bonus, metadata
        )
    for draft in range(len(_POLICY)):
        tokens = sampled[drafts == draft, 0].long()
        bound = math.sqrt(math.log(2 * len(_POLICY) ** 2 / _FAILS) / (2 * len(tokens)))
        for token, expected in enumerate(_POLICY):
            found = float((tokens == token).double().mean())
            if abs(found - expected) > bound:
                raise ExecutorError(
                    f"this vLLM's drafts change what is sampled: a token of probability {expected}"
                    f" came with {found:.2f}; leave out --speculative-config"
                )
