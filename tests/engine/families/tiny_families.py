"""Tiny random checkpoints of the model families that the weight proof is tested on.

`FAMILIES` has a transformers configuration for each; `make_family` writes one in about a second.
"""

import json
from pathlib import Path
from typing import Any

from tests.harness.vision_model import save_vision_model

VOCABULARY = 512
_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.08,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_SLIDING = {"sliding_window": 64}
_SSM = {"mamba_n_groups": 1, "mamba_d_state": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-draft": ("LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 1}),
    "qwen2.5": ("Qwen2Config", {"head_dim": None}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "olmo2": ("Olmo2Config", {"head_dim": None}),
    "phi": ("PhiConfig", {"head_dim": None, "num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"head_dim": None, "original_max_position_embeddings": 512}),
    "gemma2": ("Gemma2Config", {**_SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_SLIDING, "query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    ),
    "gemma4": ("Gemma4TextConfig", {**_SLIDING, "num_hidden_layers": 4}),
    "olmo3": ("Olmo3Config", {**_SLIDING, "head_dim": None, "num_hidden_layers": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8}),
    "olmoe": ("OlmoeConfig", {"head_dim": None, "num_experts": 8, "num_experts_per_tok": 2}),
    "glm4-moe": ("Glm4MoeConfig", {**_EXPERTS, **_DEEPSEEK, "n_group": 1}),
    "glm4-moe-mtp": (
        "Glm4MoeConfig",
        {**_EXPERTS, **_DEEPSEEK, "n_group": 1, "num_nextn_predict_layers": 1},
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 128,
            "intermediate_size_mlp": 256,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 1,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_SLIDING,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**_EXPERTS, **_LATENT, **_DEEPSEEK, "n_group": 1}),
    "deepseek-v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, **_DEEPSEEK, "n_group": 2}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            **_DELTA_NET,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {**_SSM, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 16,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SSM,
            "head_dim": None,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_expand": 2,
        },
    ),
    "idefics3": ("Idefics3Config", {}),
    "reward": ("Qwen2Config", {"head_dim": None, "num_labels": 1, "pad_token_id": 0}),
    # The kernel that CPUs without AMX have for all sizes has it for rows of 240 everywhere.
    "int8-channel": ("LlamaConfig", {"tie_word_embeddings": False, "intermediate_size": 240}),
    "fp8-channel": ("LlamaConfig", {"tie_word_embeddings": False}),
    "fp8-block": ("LlamaConfig", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
}
AT_LOAD = (
    "llama+fp8_per_channel",
    "llama+fp8_per_block",
    "qwen3-moe+int8_per_channel_weight_only",
)
"""Families with a name of how vLLM quantises their bfloat16 weights at load."""
ON_SGLANG = (
    "llama",
    "llama-tied",
    "qwen2.5",
    "qwen3",
    "mistral",
    "olmo2",
    "phi3",
    "gemma3",
    "olmo3",
    "qwen3-moe",
    "mixtral",
    "glm4-moe",
)
"""Families that stock SGLang loads on a CPU without AMX."""
VISION = "idefics3"
"""Family whose prompts have an image; the others' are tokens alone."""
MATRIX_EXTENSION = {"fp8-block", *AT_LOAD[1:]}
"""Families whose kernels take a CPU with AMX."""


def make_family(name: str, folder: Path, dtype: str = "bfloat16") -> Path:
    """Write the checkpoint of a family into `folder`, and return `folder`."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    if name == VISION:
        save_vision_model(folder, "bfloat16")
        return folder
    torch.manual_seed(0)
    kind, more = FAMILIES[name]
    settings = {key: value for key, value in (_SIZE | more).items() if key != "head_dim" or value}
    config = getattr(transformers, kind)(**settings)
    auto = "AutoModelForSequenceClassification" if name == "reward" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        # Norms of ones and biases of zeros would hide a weight in the place of another.
        for key, weight in [*model.named_parameters(), *model.named_buffers()]:
            if weight.is_floating_point() and "rotary" not in key and "inv_freq" not in key:
                weight.add_(0.03 * torch.randn(weight.shape).to(weight.dtype))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    changes: dict[str, Any] = {"dtype": dtype}
    if name.endswith("-mtp"):
        _add_predictor(folder, config.num_hidden_layers)
    if name == "deepseek-v3":
        changes |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if name.endswith("-channel"):
        changes["quantization_config"] = _quantise(name, folder)
    if name == "fp8-block":
        changes["quantization_config"] = _quantise_blocks(folder)
    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def _add_predictor(folder: Path, layer: int) -> None:
    """Add a layer that predicts the token after the next one, which transformers leaves out."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    last, own = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    block = {key: weight for key, weight in tensors.items() if key.startswith(last)}
    norm = tensors["model.norm.weight"]
    block |= {f"{last}{key}": norm for key in ("enorm.weight", "hnorm.weight")}
    block[f"{last}shared_head.norm.weight"] = norm
    block[f"{last}eh_proj.weight"] = 0.08 * torch.randn(norm.numel(), 2 * norm.numel())
    for key, weight in block.items():
        noise = 0.03 * torch.randn(weight.shape)
        tensors[key.replace(last, own)] = (weight.float() + noise).to(weight.dtype)
    save_file(
        {k: w.to(norm.dtype) if own in k else w for k, w in tensors.items()}, path, {"format": "pt"}
    )


def add_head(folder: Path) -> Path:
    """Write a head of EAGLE with random weights, for a family of Llama's shape, into its folder
    `draft`.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 1
    named = LlamaForCausalLM(config).state_dict().items()
    tensors = {
        n.removeprefix("model."): w.clone() for n, w in named if n.startswith("model.layers")
    }
    del tensors["layers.0.input_layernorm.weight"]
    tensors["fc.weight"] = 0.08 * torch.randn(config.hidden_size, 2 * config.hidden_size)
    head, dtype = folder / "draft", getattr(torch, str(config.dtype).removeprefix("torch."))
    config.save_pretrained(head)
    saved = {name: weight.to(dtype).contiguous() for name, weight in tensors.items()}
    save_file(saved, head / "model.safetensors", metadata={"format": "pt"})
    return head


def _quantise(name: str, folder: Path) -> dict[str, Any]:
    """Replace linear weights by quantised ones, a scale a row; return how, as vLLM reads it."""
    import torch
    from safetensors.torch import load_file, save_file

    integer = name.startswith("int8")
    dtype, largest = (torch.int8, 127) if integer else (torch.float8_e4m3fn, 448)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key in [k for k in tensors if k.endswith("proj.weight")]:
        weight = tensors.pop(key).float()
        scale = weight.abs().amax(1, keepdim=True) / largest
        levels = weight / scale
        tensors[key] = (levels.round() if integer else levels).to(dtype)
        tensors[f"{key}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int" if integer else "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if integer else "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }
        },
    }


def _quantise_blocks(folder: Path) -> dict[str, Any]:
    """Replace linear weights by FP8 ones, a power of two as the scale of 128 x 128; return how."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key in [k for k in tensors if k.endswith("proj.weight")]:
        weight = tensors.pop(key).float()
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = torch.exp2((blocks.abs().amax((1, 3), keepdim=True) / 448).log2().ceil())
        tensors[key] = (blocks / scale).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scale[:, 0, :, 0].to(torch.float8_e8m0fnu)
    save_file(tensors, path, metadata={"format": "pt"})
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
