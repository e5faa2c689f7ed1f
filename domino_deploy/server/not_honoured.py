"""Fields of other servers that this one knows and does not honour: a client that sends one would get another answer than it asked for.

Each with the values that ask for nothing (null always does).  Fields that change no answer, such as `cache_prompt`, are not here: they
are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_OPENAI: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_VLLM: Neutral = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "cache_salt": (),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "request_id": (),
}
# Without these, the other fields of the same sampler (mirostat_tau, dry_base and so on) ask for nothing.
_LLAMA_SERVER: Neutral = {
    "n_predict": (),
    "grammar": ("",),
    "json_schema": (),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "samplers": (),
    "min_keep": (0, 1),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "n_probs": (0,),
    "lora": ([],),
}
_SGLANG: Neutral = {
    "regex": ("",),
    "ebnf": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "lora_path": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
}
_TGI: Neutral = {
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "do_sample": (True,),
    "stop_sequences": ([],),
    "truncate": (),
    "watermark": (False,),
    "return_full_text": (False,),
    "decoder_input_details": (False,),
    "top_n_tokens": (0,),
    "adapter_id": (),
}
_OLLAMA: Neutral = {
    "options": ({},),
    "num_predict": (),
    "format": ("",),
    "template": (),
}
# Samplers that several local servers take.
_SAMPLERS: Neutral = {
    "top_a": (0,),
    "no_repeat_ngram_size": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "num_beams": (1,),
    "guidance_scale": (1,),
}
NOT_HONOURED: Neutral = {**_OPENAI, **_VLLM, **_LLAMA_SERVER, **_SGLANG, **_TGI, **_OLLAMA, **_SAMPLERS}
CHAT_NOT_HONOURED: Neutral = {
    **NOT_HONOURED,
    "n_predict": (-1,),  # as many tokens as the model's length allows: what chat does by itself
    "num_predict": (-1,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "echo": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "reasoning_format": ("none", "auto"),
    "enable_thinking": (),
    "think": (),
    "tool_prompt": (),
}
COMPLETION_NOT_HONOURED: Neutral = {**NOT_HONOURED, "suffix": ("",)}

# The field of ours that does the work of another server's.
_CONSTRAINTS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "regex", "ebnf")
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(_CONSTRAINTS, "response_format"),
    "json_schema": "response_format",
    "format": "response_format",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_regex": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "n_probs": "logprobs",
    "top_n_tokens": "logprobs",
    "do_sample": "temperature",
    "options": "temperature, max_tokens and their like at the top of the body",
}
COMPLETION_INSTEAD: Mapping[str, str] = {
    **INSTEAD,
    "return_full_text": "echo",
    "decoder_input_details": "echo and logprobs",
    "prompt_logprobs": "echo and logprobs",
}
CHAT_INSTEAD: Mapping[str, str] = {
    **INSTEAD,
    **dict.fromkeys(_CONSTRAINTS, "response_format or tools"),
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning_effort": "chat_template_kwargs",
    "enable_thinking": "chat_template_kwargs",
    "think": "chat_template_kwargs",
}
