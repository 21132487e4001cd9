"""Options of OpenAI's and vLLM's API that this server does not offer: accepted where they ask for nothing.

Load generators and client libraries send many options with the value that leaves the answer as it is. Such a value
is accepted and dropped. Any other value of the option would change the answer, and is refused with its name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        # OpenAI
        "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0,),
        "function_call": ("none", "auto"), "functions": ([],), "logit_bias": ({},), "logprobs": (False,),
        "modalities": (["text"],), "n": (1,), "prediction": (), "presence_penalty": (0,),
        "response_format": ({"type": "text"},), "store": (False,), "suffix": ("",),
        "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "verbosity": ("medium",),
        "web_search_options": (),
        # vLLM and SGLang
        "add_generation_prompt": (True,), "allowed_token_ids": (), "bad_words": ([],), "cache_salt": (),
        "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,), "documents": ([],),
        "include_stop_str_in_output": (False,), "kv_transfer_params": (), "length_penalty": (1,),
        "logits_processors": ([],), "min_p": (0,), "mm_processor_kwargs": ({},), "priority": (0,),
        "prompt_logprobs": (), "repetition_penalty": (1,), "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "stop_token_ids": ([],),
        "structured_outputs": (), "truncate_prompt_tokens": (), "use_beam_search": (False,),
    }
)  # fmt: skip
"""Values that change nothing, by option; `null` is one of every option."""

HINTS: Final = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
        "request_id", "safety_identifier", "service_tier", "user",
    }
)  # fmt: skip
"""Options that are accepted with any value, and ignored: none of them changes what this server's models answer."""


def is_neutral(name: str, value: object) -> bool:
    """Whether this value of an option of `NEUTRAL` asks for nothing."""
    # 0 == False and 1 == True in Python, but `logprobs: 0` asks for something that `logprobs: false` does not
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL[name])


def allowed(name: str) -> str:
    """The values of an option of `NEUTRAL` that are accepted, for an error message."""
    return " or ".join([*(msgspec.json.encode(one).decode() for one in NEUTRAL[name]), "null"])
