"""Names of vLLM that its adapters here use, by part, in the form of `executor.engine_surfaces`."""

from typing import Final

SCHEDULER: Final = (
    "v1.core.sched.async_scheduler:AsyncScheduler",
    "v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
    "v1.core.sched.scheduler:Scheduler._update_request_with_output",
    "v1.core.sched.scheduler:Scheduler.schedule",
    "v1.core.sched.scheduler:Scheduler.update_from_output(scheduler_output, model_runner_output)",
    "v1.core.sched.scheduler:Scheduler.finish_requests(request_ids, finished_status)",
    "v1.core.sched.scheduler:Scheduler.has_requests",
    "v1.core.sched.scheduler:Scheduler.get_request_counts",
    "v1.core.sched.scheduler:Scheduler"
    "[running, waiting, requests, finished_req_ids, kv_cache_manager, vllm_config, block_size]",
    "v1.core.sched.output:SchedulerOutput"
    "[scheduled_new_reqs, total_num_scheduled_tokens, num_scheduled_tokens]",
    "v1.core.sched.output:NewRequestData[req_id]",
    "v1.core.kv_cache_manager:KVCacheManager[block_pool]",
    "v1.core.block_pool:BlockPool[num_gpu_blocks, blocks, free_block_queue]",
    "v1.core.block_pool:BlockPool.get_num_free_blocks",
    "v1.request:Request[request_id, num_prompt_tokens, num_computed_tokens, num_tokens,"
    " num_output_tokens, num_tokens_with_spec, num_output_placeholders]",
)
"""Names that both schedulers use."""

HOST: Final = (
    *SCHEDULER,
    "config.scheduler:SchedulerConfig.get_scheduler_cls",
    "v1.engine.utils:CoreEngineProcManager.__init__(local_engine_count, vllm_config)",
    "v1.core.sched.scheduler:Scheduler.add_request(request)",
    "v1.core.sched.scheduler:Scheduler.shutdown",
    "v1.core.sched.scheduler:Scheduler[_pause_state]",
    "v1.core.sched.interface:PauseState[PAUSED_NEW]",
    "v1.request:Request[arrival_time]",
    "v1.metrics.loggers:StatLoggerBase.record"
    "(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    "v1.metrics.loggers:StatLoggerBase.__init__(vllm_config, engine_index)",
    "v1.metrics.stats:IterationStats[finished_requests]",
    "v1.metrics.stats:FinishedRequestStats[request_id, finish_reason, e2e_latency,"
    " decode_time, mean_time_per_output_token, num_prompt_tokens, num_generation_tokens]",
    "v1.engine:FinishReason[STOP]",
    "config.kv_transfer:KVTransferConfig[kv_role]",
)
"""Names that a host's state and latencies use."""

POOL: Final = (
    "v1.core.block_pool:BlockPool.evict_blocks(block_ids)",
    "v1.core.kv_cache_utils:FreeKVCacheBlockQueue[num_free_blocks]",
    "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.get_all_free_blocks",
    "v1.core.kv_cache_utils:KVCacheBlock[block_id, ref_cnt, is_null, block_hash]",
    "v1.kv_cache_interface:KVCacheTensor[size, shared_by|layers]",
    "v1.kv_cache_interface:KVCacheConfig[num_blocks, kv_cache_tensors, kv_cache_groups]",
)
"""Names that a KV pool with granules uses."""

LENDING: Final = (
    *HOST,
    *POOL,
    "v1.core.sched.scheduler:Scheduler[connector, kv_cache_config, num_lookahead_tokens,"
    " max_num_scheduled_tokens]",
)
"""Names that a host which lends KV memory uses."""

GUEST: Final = (
    *SCHEDULER,
    *POOL,
    "v1.core.sched.scheduler:Scheduler._preempt_request(request, timestamp)",
    "v1.core.sched.scheduler:Scheduler[kv_cache_config, num_lookahead_tokens, num_spec_tokens,"
    " deferred_frees,"
    " prev_step_scheduled_req_ids, max_num_scheduled_tokens,"
    " max_num_active_reqs|max_num_running_reqs, kv_holding_waiting|skipped_waiting]",
    "v1.core.kv_cache_manager:KVCacheManager.get_block_ids(request_id)",
    "v1.outputs:ModelRunnerOutput[req_ids, sampled_token_ids]",
    "v1.request:RequestStatus[FINISHED_ABORTED]",
    "v1.engine:EngineCoreOutput[request_id, new_token_ids, finish_reason]",
    "v1.engine:EngineCoreOutputs[outputs]",
    "v1.engine:FinishReason[ABORT]",
)
"""Names that a guest's scheduler uses."""

DRAFT_SAMPLER: Final = (
    "v1.sample.rejection_sampler:apply_sampling_constraints",
    "v1.sample.rejection_sampler:expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from,"
    " replace_to)",
    "v1.sample.rejection_sampler:rejection_sample",
)
"""Names that a replica with drafts uses besides."""

WORKER: Final = (
    "v1.worker.gpu_worker:Worker.load_model",
    "v1.worker.gpu_worker:Worker.initialize_from_config(kv_cache_config)",
    "v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    "v1.worker.gpu_worker:Worker.execute_model(scheduler_output)",
    "v1.kv_cache_interface:KVCacheTensor[size, shared_by|layers]",
    "v1.kv_cache_interface:KVCacheConfig[kv_cache_tensors, kv_cache_groups]",
)
"""Names that a GPU worker with reserved KV memory uses."""
