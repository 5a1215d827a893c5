"""Whether and how long a model may think: what requests say of it, in tokens, or in words of the model's template."""

from engine import template

from .fields import BOOL, number, object_of

UNLIMITED = 2**31 - 1

# The most tokens of thoughts for each word of reasoning_effort where the chat template does not know the word; without
# any, thoughts are switched off.
EFFORTS = dict(zip(template.EFFORTS, (0, 0, 1024, 4096, 16_384, 32_768, UNLIMITED), strict=True))
VARIABLES = object_of({"enable_thinking": BOOL}, others=True)       # chat_template_kwargs

# Names of other servers for thinking_budget: vLLM's and, old and new, llama.cpp's. -1: no limit.
OTHER_NAMES = "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"
BUDGETS = dict.fromkeys(OTHER_NAMES, number("thinking_budget") | {"minimum": -1})


def thinks(effort: str | None) -> bool | None:
    """Whether the model is to think; None: the request does not say."""
    return None if effort is None else EFFORTS[effort] > 0


def read_thinking(body: dict, effort: str | None, thinking: bool | None) -> dict:
    """Arguments of Conversation: whether and how long the model may think, and what else the request has for its chat
    template. effort, thinking: as the protocol's own fields say it; `chat_template_kwargs` overrules both. A number of
    tokens goes before the effort, which is only a hint: no field is named then."""
    variables = dict(body.get("chat_template_kwargs", {}))
    said = variables.pop("enable_thinking", None)
    if said is not None and said != thinks(effort):
        effort = None
    found = {"thinking": thinking if said is None else said, "effort": effort, "template_kwargs": variables}
    for field in ("thinking_budget", *OTHER_NAMES):
        if field in body:
            return found | {"thinking_budget": body[field] if body[field] >= 0 else UNLIMITED, "budget_field": field}
    return found
