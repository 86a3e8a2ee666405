#!/usr/bin/env bash
# slime with its rollouts from ROSE: the front is its engine and its router.
#
#   examples/slime.sh python3 train.py --hf-checkpoint models/policy …      all else as you have it
#
# Weights and turns go through the front; run it where the trainer's disk is.
set -euo pipefail

front=127.0.0.1:8100
weights=run/slime-weights # every node of the trainer sees it
mkdir -p "$weights"

rose front \
  --port "${front#*:}" \
  --weights-root "$weights" \
  --tp-size 1 &
served=$!
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

# It is healthy once a replica has been leased to the job.
until curl --silent --fail --output /dev/null "http://$front/health"; do
  kill -0 "$served"
  sleep 1
done

"$@" \
  --rollout-external-engine-addrs "$front" \
  --sglang-router-ip "${front%:*}" \
  --sglang-router-port "${front#*:}" \
  --update-weight-mode full \
  --update-weight-transport disk \
  --update-weight-disk-dir "$PWD/$weights"
