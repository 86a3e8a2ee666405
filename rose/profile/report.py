"""What a person reads of a profile: the fit, and predictions beside measurements."""

from collections.abc import Iterator, Sequence

from slo import StepProfile, StepSample

ROWS = 14
# Above this share the steps' times are those of the machine, not of the engine.
MAX_WAITED = 0.1


def report(profile: StepProfile, samples: Sequence[StepSample], waited: float) -> Iterator[str]:
    """Lines; `waited`: share of all steps' time in which the engine did not have its core."""
    yield (
        f"a step takes {profile.base_s * 1e3:.3f} ms + {profile.per_token_s * 1e6:.2f} us a token"
        f" + {profile.per_sequence_s * 1e6:.2f} us a sequence"
        f" + {profile.per_context_token_s * 1e9:.1f} ns a token of context"
    )
    yield f"{profile.samples} sizes of step, off by {profile.fit_error:.1%} on the average"
    yield ""
    yield "  tokens  sequences  context  measured ms  predicted ms    off"
    for sample in _spread(samples):
        predicted_s = profile.seconds(sample.tokens, sample.sequences, sample.context_tokens)
        yield (
            f"{sample.tokens:8}  {sample.sequences:9}  {sample.context_tokens:7}"
            f"  {sample.seconds * 1e3:11.2f}  {predicted_s * 1e3:12.2f}"
            f"  {predicted_s / sample.seconds - 1:+5.0%}"
        )
    if waited > MAX_WAITED:
        yield ""
        yield (
            f"the engine waited for its core for {waited:.0%} of that time: these are the times of"
            " a busy machine; profile again when it is quiet"
        )


def _spread(samples: Sequence[StepSample]) -> list[StepSample]:
    """A few of them, from the shortest to the longest."""
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    if len(ordered) <= ROWS:
        return ordered
    return [ordered[round(at * (len(ordered) - 1) / (ROWS - 1))] for at in range(ROWS)]
