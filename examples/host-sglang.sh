#!/usr/bin/env bash
# The host: your production SGLang, with ROSE's plugin, which publishes its load and changes nothing else.
#
#   examples/host-sglang.sh [SGLang's options]
#
# ROSE has to be importable in SGLang's environment: pip install --no-deps . (the plugin needs only numpy).
# SGLang finds the plugin by itself. The node's file says "engine": "sglang" for this host.
set -euo pipefail

# Who this engine is, and the file through which it tells its node how busy it is.
export ROSE_ROLE=host
# It lies in memory: a host must not wait for a disk.
export ROSE_CONTROL_PAGE=/dev/shm/rose-control-page
# What its users were promised: the time to the first token, and between two tokens.
export ROSE_SLO_TTFT_S=0.5 ROSE_SLO_TPOT_S=0.15
# To lend idle KV memory, too: docs/engines.md.
export ROSE_HOST_LEVEL=observe
export SGLANG_PLUGINS=rose_host
export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0

# SGLang takes most of a GPU unless told otherwise: leave room for the guest's weights and KV.
exec python -m sglang.launch_server \
  --model-path models/host \
  --served-model-name host \
  --host 127.0.0.1 \
  --port 8001 \
  --mem-fraction-static 0.5 \
  "$@"
