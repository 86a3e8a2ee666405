#!/usr/bin/env bash
# The host: your production vLLM, with ROSE's plugin, which publishes its load and changes nothing else.
#
#   examples/host.sh [vLLM's options]
#
# ROSE has to be importable in vLLM's environment: pip install --no-deps . (the plugin needs only numpy).
set -euo pipefail

# Who this engine is, and the file through which it tells its node how busy it is.
export ROSE_ROLE=host
# It lies in memory: a host must not wait for a disk.
export ROSE_CONTROL_PAGE=/dev/shm/rose-control-page
# What its users were promised: the time to the first token, and between two tokens.
export ROSE_SLO_TTFT_S=0.5 ROSE_SLO_TPOT_S=0.15
# To lend idle KV memory, too: docs/gpu-memory.md.
export ROSE_HOST_LEVEL=observe
export VLLM_PLUGINS=rose_host
export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0

# vLLM takes most of a GPU unless told otherwise: leave room for the guest's weights and KV.
exec python -m vllm.entrypoints.openai.api_server \
  --model models/host \
  --served-model-name host \
  --host 127.0.0.1 \
  --port 8001 \
  --gpu-memory-utilization 0.5 \
  "$@"
