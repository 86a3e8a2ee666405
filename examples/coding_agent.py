"""A coding agent as a rollout: its command runs on the policy, and its turns come back as tokens.

    python examples/coding_agent.py http://127.0.0.1:7450 claude -p "what does note.txt say?"

Claude Code finds the gateway in its environment; Codex and others have it in their configuration
(docs/gateway.md#agents), with the header `X-Session-ID` that is printed first.
"""

import os
import subprocess
import sys
import uuid

import httpx

from rose.client import BlockingRolloutClient

SHOWN = 12


def main() -> None:
    """Run the agent, then print each of its trajectories as tokens with masks."""
    gateway, *command = sys.argv[1:]
    session = f"agent-{uuid.uuid4().hex[:8]}"
    print("X-Session-ID:", session, flush=True)  # noqa: T201
    environment = {
        **os.environ,
        "ANTHROPIC_BASE_URL": gateway,
        "ANTHROPIC_AUTH_TOKEN": os.environ.get("ROSE_TOKEN", "none"),
        "ANTHROPIC_CUSTOM_HEADERS": f"X-Session-ID: {session}",
    }
    subprocess.run(command, env=environment, check=True)  # noqa: S603 - the caller's own
    with BlockingRolloutClient(gateway) as client:
        for number, one in enumerate(client.trajectories(session)):
            print(f"trajectory {number}: {sum(one.loss_mask)} sampled of {len(one.token_ids)}")  # noqa: T201
            for turn in one.turns:
                for at in range(max(0, turn.start - 2), min(turn.end, turn.start + SHOWN)):
                    token, mask = one.token_ids[at], one.loss_mask[at]
                    print(f"{at}: {token} mask {mask} logprob {one.logprobs[at]:.3f}")  # noqa: T201
    httpx.post(f"{gateway}/finish_session", json={"session_id": session}).raise_for_status()


if __name__ == "__main__":
    main()
