"""Control calls of vLLM and SGLang, and the answer to each.

Four kinds: updates, which publish a folder; questions; calls that an engine must obey and a fleet
need not (pause: versions change between steps of each replica; flush: caches are of one version);
and unsupported calls, refused by name with the setting that replaces them. The last two are the
tables here; docs/trainers/front.md says who calls what.
"""

from typing import Any, Final

import msgspec

BY_FOLDERS: Final = (
    'weights come as checkpoint folders here: in prime-rl weight_broadcast.type = "filesystem",'
    " in slime --update-weight-transport disk, in AReaL actor.weight_update_mode=disk"
)
NO_ADAPTERS: Final = "adapters are not published: merge them into the weights, and save those"
BY_PLUGIN: Final = (
    "this front takes no tensors over HTTP, NCCL or IPC: in TRL `import rose.integrations.trl`;"
    " others save checkpoint folders"
)

UPDATES: Final = frozenset(
    {"/update_weights", "/update_weights_from_disk", "/areal_update_weights"}
)
"""Paths of calls that publish a checkpoint folder: prime-rl's, SGLang's and AReaL's on vLLM."""

DONE: Final[dict[str, dict[str, object]]] = {
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/reset_prefix_cache": {"status": "ok"},
    "/sleep": {"status": "ok"},
    "/wake_up": {"status": "ok"},
    "/pause_generation": {"status": "ok", "message": "Generation paused successfully."},
    "/continue_generation": {"status": "ok", "message": "Generation continued successfully."},
    "/flush_cache": {"success": True, "message": "Cache flushed."},
    "/release_memory_occupation": {"success": True},
    "/resume_memory_occupation": {"success": True},
    "/post_process_weights": {"success": True, "message": "nothing to do"},
    "/areal_pause_generation": {"success": True, "message": "paused"},
    "/areal_continue_generation": {"success": True, "message": "continued"},
}
"""Answers by path to calls that an engine must obey and that change no weights and no turns
here.
"""

PAUSES: Final = frozenset({"/pause", "/pause_generation", "/areal_pause_generation"})
RESUMES: Final = frozenset({"/resume", "/continue_generation", "/areal_continue_generation"})

REFUSED: Final[dict[str, tuple[int, str]]] = {
    # prime-rl continues without it if there is no such route.
    "/init_broadcaster": (404, BY_FOLDERS),
    "/init_weights_update_group": (400, BY_FOLDERS),
    "/destroy_weights_update_group": (400, BY_FOLDERS),
    "/update_weights_from_distributed": (400, BY_FOLDERS),
    "/update_weights_from_tensor": (400, BY_FOLDERS),
    "/update_weights_from_ipc": (400, BY_FOLDERS),
    "/areal_init_weights_update_group": (400, BY_FOLDERS),
    "/areal_set_update_weight_meta": (400, BY_FOLDERS),
    "/areal_update_weights_xccl": (400, BY_FOLDERS),
    "/areal_set_update_weight_meta_lora": (400, NO_ADAPTERS),
    "/areal_update_weights_lora": (400, NO_ADAPTERS),
    "/areal_update_weights_lora_xccl": (400, NO_ADAPTERS),
    "/load_lora_adapter": (400, NO_ADAPTERS),
    "/unload_lora_adapter": (400, NO_ADAPTERS),
    "/v1/load_lora_adapter": (400, NO_ADAPTERS),
    "/v1/unload_lora_adapter": (400, NO_ADAPTERS),
    "/init_weight_transfer_engine": (400, BY_PLUGIN),
    "/start_weight_update": (400, BY_PLUGIN),
    "/finish_weight_update": (400, BY_PLUGIN),
    "/collective_rpc": (400, BY_PLUGIN),
}
"""HTTP status and error line by path, for unsupported calls; the line names the setting to use
instead.
"""

FORMATS: Final = frozenset({None, "auto", "safetensors"})


class UpdateBody(msgspec.Struct):
    """JSON body of an update call in any of the three dialects; other fields are ignored."""

    weight_dir: str | None = None
    model_path: str | None = None
    weight_version: str | int | None = None
    load_format: str | None = None

    @property
    def folder(self) -> str | None:
        """Checkpoint folder that the body names, under either of its two fields; None without
        one.
        """
        return self.weight_dir or self.model_path


class PullBody(msgspec.Struct):
    """JSON body of slime's and Miles' call to bring the engine's copy of the weights up to a
    version of a stream.
    """

    local_checkpoint_dir: str
    source_dir: str
    target_version: int


class AbortBody(msgspec.Struct):
    """JSON body of SGLang's abort call.

    abort_all: abort all requests; else the one that its `rid` names.
    """

    abort_all: bool = False


class WorkerBody(msgspec.Struct):
    """JSON body of the call that registers an engine at a router."""

    url: str = ""
    worker_type: str = "regular"


decode_update = msgspec.json.Decoder(UpdateBody)
decode_pull = msgspec.json.Decoder(PullBody)
decode_abort = msgspec.json.Decoder(AbortBody)
decode_worker = msgspec.json.Decoder(WorkerBody)


def server_info(model: str, label: str, tp_size: int, pp_size: int) -> dict[str, object]:
    """Return SGLang's server info with the fields that trainers read; the whole fleet is described
    as one engine.
    """
    return {
        "model_path": model,
        "tokenizer_path": model,
        "served_model_name": model,
        "weight_version": label,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "dp_size": 1,
        "ep_size": 1,
        "num_gpus": tp_size * pp_size,
        "disaggregation_mode": "null",
        "encoder_only": False,
        # slime insists on the options with which it would have started the engine.
        "enable_memory_saver": False,
    }


def aborted_turn(label: str) -> dict[str, Any]:
    """Return SGLang's JSON answer to a turn that was aborted before its first token.

    label: the trainer's name of the version.
    """
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "",
            "finish_reason": {"type": "abort", "message": "Abort before prefill: all were aborted"},
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "weight_version": label,
            "output_token_logprobs": [],
        },
    }
