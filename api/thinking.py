"""How long a model may think: what requests say of it, in tokens."""

from .fields import number

UNLIMITED = 2**31 - 1

# The most tokens of thoughts for each word of reasoning_effort; without any, thoughts are switched off.
EFFORTS = {"none": 0, "minimal": 0, "low": 1024, "medium": 4096, "high": 16_384, "xhigh": 32_768, "max": UNLIMITED}

# Names of other servers for thinking_budget: vLLM's and, old and new, llama.cpp's. -1: no limit.
OTHER_NAMES = "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"
BUDGETS = dict.fromkeys(OTHER_NAMES, number("thinking_budget") | {"minimum": -1})


def thinks(effort: str | None) -> bool | None:
    """Whether the model is to think; None: the request does not say."""
    return None if effort is None else EFFORTS[effort] > 0


def read_budget(body: dict, effort: str | None) -> dict:
    """Arguments of Conversation: the most tokens of thoughts, and the field that says so. A number goes before the
    effort, which is only a hint: no field is named then."""
    for field in ("thinking_budget", *OTHER_NAMES):
        if field in body:
            return {"thinking_budget": body[field] if body[field] >= 0 else UNLIMITED, "budget_field": field}
    return {} if effort is None else {"thinking_budget": EFFORTS[effort]}
