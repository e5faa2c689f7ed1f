"""Fields of other servers that this one knows and does not honour: a client that sends one would get another answer than it asked for.

Each with the values that ask for nothing, beside null and what is empty.  Fields that change no answer, such as `cache_prompt`, are not
here: they are ignored like unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_EMPTY: tuple[Any, ...] = (False, "", [], {})
# Where one of these does ask for something: text with its special tokens, greedy decoding, no filters at all, any JSON, a search
# of the web, an answer without its thoughts, JSON without blanks.
_EMPTY_IS_A_WISH = frozenset(
    {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "do_sample",
        "samplers",
        "json_schema",
        "format",
        "web_search_options",
        "include_reasoning",
        "guided_whitespace_pattern",
        "whitespace_pattern",
    }
)
# llama-server's own order, by names and by letters; the shorter ones are of its versions before top_n_sigma.
_SAMPLER_NAMES = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
_DEFAULT_SAMPLERS = (_SAMPLER_NAMES, [name for name in _SAMPLER_NAMES if name != "top_n_sigma"], "edskypmxt", "edkypmxt")

_OPENAI: Neutral = {
    "n": (1,),
    "best_of": (1,),
    "store": (),
    "service_tier": ("auto", "default"),
}
_VLLM: Neutral = {
    "use_beam_search": (),
    "length_penalty": (1,),
    "include_stop_str_in_output": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "repetition_detection": (),
    "prompt_embeds": (),
    "truncation_side": (),
    "media_io_kwargs": (),
    "speculative_config": (),
    "num_speculative_tokens": (),
    "logits_processors": (),
    "return_tokens_as_token_ids": (),
    "return_token_ids": (),
    "cache_salt": (),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "request_id": (),
}
# Without these, the other fields of the same sampler (mirostat_tau, dry_base and so on) ask for nothing.
_LLAMA_SERVER: Neutral = {
    "n_predict": (-1,),  # as many tokens as the model's length allows
    "grammar": (),
    "json_schema": (),
    "mirostat": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "samplers": _DEFAULT_SAMPLERS,
    "min_keep": (0, 1),
    "repeat_penalty": (1,),
    "repeat_last_n": (-1,),
    "n_probs": (0,),
    "lora": (),
}
_SGLANG: Neutral = {
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "no_stop_trim": (),
    "lora_path": (),
    "custom_logit_processor": (),
    "return_hidden_states": (),
}
_TGI: Neutral = {
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "do_sample": (True,),
    "stop_sequences": (),
    "truncate": (),
    "watermark": (),
    "return_full_text": (),
    "decoder_input_details": (),
    "top_n_tokens": (0,),
    "adapter_id": (),
}
_OLLAMA: Neutral = {
    "options": (),
    "num_predict": (-1,),
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
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "reasoning": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "functions": (),
    "function_call": ("none",),
    "echo": (),
    "chat_template": (),
    "continue_final_message": (),
    "documents": (),
    "mm_processor_kwargs": (),
    "include_reasoning": (True,),
    "thinking_token_budget": (),
    "reasoning_format": ("none", "auto"),
    "enable_thinking": (),
    "think": (),
    "tool_prompt": (),
}
COMPLETION_NOT_HONOURED: Neutral = {**NOT_HONOURED, "suffix": ()}

# The field of ours that does the work of another server's.
_FORMS = "structured_outputs (regex, json or choice)"
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf", "structural_tag"), _FORMS),
    "regex": "structured_outputs (regex)",
    "json_schema": "response_format",
    "format": "response_format",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_regex": "stop",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "speculative_config": "speculative (true or false)",
    "num_speculative_tokens": "speculative (true or false)",
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
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning_effort": "chat_template_kwargs",
    "enable_thinking": "chat_template_kwargs",
    "reasoning": "chat_template_kwargs",
    "think": "chat_template_kwargs",
    "thinking": "chat_template_kwargs",
}
# Of vLLM's `structured_outputs`.
STRUCTURED_NOT_HONOURED: Neutral = {
    "grammar": (),
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (),
    "disable_additional_properties": (),
}
STRUCTURED_INSTEAD: Mapping[str, str] = {
    "grammar": "regex, json or choice",
    "structural_tag": "regex, json or choice",
    "disable_additional_properties": "additionalProperties: false in the schema",
}

# Another server's name of a field of ours: equal to that one, it says nothing new.
_SAME_AS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), ("max_tokens", "max_completion_tokens")),
    "min_new_tokens": ("min_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "stop_sequences": ("stop",),
}
# What penalties are without effect: `repeat_last_n` says how far back they look.
_NO_PENALTY: Mapping[str, float] = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def asks_for_nothing(name: str, given: object, neutral: tuple[Any, ...], body: Mapping[str, object]) -> bool:
    """Whether a field that is not honoured would change no answer.

    Args:
        name: of the field.
        given: its value.
        neutral: the values of which that is known.
        body: the object that the field stands in.
    """
    if given is None or any(_is_same(given, allowed) for allowed in neutral):
        return True
    if name not in _EMPTY_IS_A_WISH and any(_is_same(given, empty) for empty in _EMPTY):
        return True
    if any(_is_same(given, body.get(other)) for other in _SAME_AS.get(name, ())):
        return True
    return name == "repeat_last_n" and all(body.get(other) in (None, value) for other, value in _NO_PENALTY.items())


def _is_same(given: object, allowed: object) -> bool:
    # For Python, true is 1.
    return isinstance(given, bool) == isinstance(allowed, bool) and given == allowed
