#!/usr/bin/env bash
# GRPO by verl as it is released, its rollouts through ROSE: verl_grpo.sh MODEL [MORE OF VERL'S SETTINGS]
# Wants a fleet (README), the job's settings as ROSE_* (docs/trainers/verl.md), and in this environment:
#   pip install 'rose-rollout[verl]' reasoning-gym
# Rollouts that go on while it trains: MODE=async verl_grpo.sh MODEL
set -euo pipefail
model=$1; shift
here=$(cd "$(dirname "$0")" && pwd)
data=${DATA:-run/verl}
steps=${STEPS:-12} batch=${BATCH:-8} seed=${SEED:-0}

python -m rose.integrations.verl            # what verl would swallow is said here
python "$here/verl_reasoning_gym.py" "$data"

mode=(trainer.v1.trainer_mode=sync data.train_batch_size="$batch")
if [ "${MODE:-sync}" = async ]; then
  mode=(
    trainer.v1.trainer_mode=separate_async data.train_batch_size=$((2 * batch))
    trainer.v1.separate_async.parameter_sync_step=2
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.checkpoint_engine.backend=rose
  )
  export VERL_LOGGING_LEVEL=WARN            # verl 0.9.1 stops at INFO in this mode
fi

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/sums.parquet" data.val_files="$data/sums.parquet" \
  data.max_prompt_length=192 data.max_response_length=16 data.dataloader_num_workers=0 data.seed="$seed" \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.ppo_mini_batch_size="$batch" actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.rollout.name=rose actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.load_format=auto \
  actor_rollout_ref.rollout.free_cache_engine=False actor_rollout_ref.rollout.max_model_len=512 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.agent.num_workers=1 \
  reward.num_workers=1 reward.custom_reward_function.path="$here/verl_reasoning_gym.py" \
  reward.custom_reward_function.name=compute_score \
  trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger='["console"]' \
  trainer.val_before_train=False trainer.save_freq=-1 trainer.test_freq=-1 \
  trainer.total_training_steps="$steps" \
  "${mode[@]}" "$@"
