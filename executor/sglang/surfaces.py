"""Names of SGLang that its adapters use, by part, in the form of `executor.engine_surfaces`."""

from typing import Final

PLUGINS: Final = (
    "srt.plugins.hook_registry:HookRegistry.register",
    "srt.plugins.hook_registry:HookRegistry.apply_hooks",
    "srt.plugins.hook_registry:HookRegistry[_patched]",
    "srt.plugins.hook_registry:HookType[AROUND]",
)
"""Names by which hooks are set."""

SCHEDULER: Final = (
    *PLUGINS,
    "srt.managers.scheduler:Scheduler.run_batch(batch)",
    "srt.managers.scheduler:Scheduler.process_batch_result(batch, result)",
    "srt.managers.scheduler:Scheduler.run_event_loop",
    "srt.managers.scheduler:Scheduler._add_request_to_queue(req, is_retracted)",
    "srt.managers.scheduler:Scheduler[waiting_queue, running_batch, server_args,"
    " token_to_kv_pool_allocator, tree_cache, max_total_num_tokens, req_to_token_pool,"
    " chunked_req, grammar_manager]",
    "srt.managers.schedule_batch:ScheduleBatch[reqs, forward_mode, extend_num_tokens]",
    "srt.managers.schedule_batch:Req[rid, output_ids, origin_input_ids, finished_reason,"
    " time_stats, seqlen]",
)
"""Names that both schedulers use."""

RANKS: Final = (
    "srt.managers.scheduler:Scheduler[tp_group]",
    "srt.distributed.parallel_state:GroupCoordinator[ranks, rank_in_group, cpu_group]",
)
"""Names by which the ranks of an engine agree."""

HOST: Final = (
    *SCHEDULER,
    *RANKS,
    "srt.managers.scheduler:Scheduler.get_next_batch_to_run",
    "srt.managers.scheduler:Scheduler.abort_request",
    "srt.managers.scheduler:Scheduler.on_idle",
    "srt.managers.scheduler:Scheduler.maybe_sleep_on_idle",
    "srt.managers.tokenizer_manager:TokenizerManager._handle_batch_output",
    "srt.managers.tokenizer_manager:TokenizerManager[rid_to_state]",
)
"""Names that a host's state and latencies use."""

POOL: Final = (
    "srt.mem_cache.allocator.token:TokenToKVPoolAllocator[clear, alloc, available_size,"
    " get_kvcache, page_size, size, need_sort, free_pages]",
    "srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator[clear, alloc, alloc_extend,"
    " alloc_decode, available_size, get_all_free_pages]",
    "srt.mem_cache.memory_pool:KVCache.get_key_buffer(layer_id)",
    "srt.mem_cache.memory_pool:KVCache.get_value_buffer(layer_id)",
    "srt.mem_cache.memory_pool:KVCache[start_layer, layer_num]",
)
"""Names that a KV pool with granules uses."""

RESERVED: Final = (
    "srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers",
    "srt.mem_cache.memory_pool:MHATokenToKVPool[k_buffer, v_buffer, page_size, device]",
    "srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers",
    "srt.mem_cache.memory_pool:MLATokenToKVPool[kv_buffer]",
    "srt.runtime_context:get_parallel",
)
"""Names by which KV buffers come to lie in memory that ROSE reserved on a GPU."""

LENDING: Final = (
    *HOST,
    *POOL,
    "srt.managers.scheduler:Scheduler.update_running_batch(batch)",
    "srt.managers.scheduler:Scheduler[invariant_checker]",
    "srt.managers.schedule_batch:ScheduleBatch.check_decode_mem",
    "srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
    "._broadcast_reqs_across_ranks(recv_reqs)",
)
"""Names that a host which lends KV memory uses."""

GUEST: Final = (
    *SCHEDULER,
    *POOL,
    *RANKS,
    "srt.managers.scheduler:Scheduler._get_new_batch_prefill_raw",
    "srt.managers.scheduler:Scheduler.get_num_allocatable_reqs(running_bs)",
    "srt.managers.scheduler:Scheduler.update_running_batch(batch)",
    "srt.managers.scheduler:Scheduler._should_defer_prefill(running_batch)",
    "srt.managers.scheduler:Scheduler._release_aborted_request",
    "srt.managers.scheduler:Scheduler.send_abort_output",
    "srt.managers.scheduler:Scheduler[chunked_prefill_size, max_prefill_tokens, invariant_checker]",
    "srt.managers.scheduler:_make_abort_req(req, finished_reason)",
    "srt.managers.scheduler_components.idle_sleeper:IdleSleeper.maybe_sleep",
    "srt.managers.schedule_batch:ScheduleBatch.filter_batch(keep_indices)",
    "srt.managers.schedule_batch:ScheduleBatch[batch_is_full]",
    "srt.managers.schedule_batch:Req.reset_for_retract",
    "srt.managers.schedule_batch:Req[to_finish, kv]",
    "srt.mem_cache.common:release_kv_cache(req, tree_cache, checkpoint)",
    "srt.mem_cache.base_prefix_cache:EvictParams(num_tokens)",
    "srt.model_executor.model_runner:ModelRunner.forward",
)
"""Names that a guest's scheduler uses."""

REPLICA: Final = (
    *PLUGINS,
    "srt.server_args:ServerArgs.resolve_once",
    "srt.entrypoints.http_server:_setup_and_run_http_server",
    "srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",
    "srt.managers.schedule_batch:Req._check_token_based_finish",
    "srt.managers.mm_schedule:init_mm_embedding_cache",
    "srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear",
)
"""Names that turns of a replica use."""
