#!/usr/bin/env bash
# The scheduler, which leases guests to your job, and the gateway, which takes its turns.
#
#   examples/gateway.sh                          ends with both when it is interrupted
#
# Both listen on loopback: see docs/security.md before you give them an address of the network.
set -euo pipefail

mkdir -p run/logs

# Nothing is lent before a policy says `mode: Active`: rose policy set --create everywhere mode=Active
# `rose stop-all` takes everything back.
rose scheduler \
  --port 7400 \
  --store run/scheduler.sqlite \
  --log-dir run/logs \
  --dashboard-port 7480 &
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 0' INT TERM

# Add --tokenizer models/policy to accept text prompts.
# A guest takes minutes to start, on a busy machine: turns wait for it, and for each version.
rose gateway \
  --port 7450 \
  --scheduler 127.0.0.1:7400 \
  --queue-wait-s 600 --version-wait-s 600 \
  --log-dir run/logs &
wait -n
