"""What the server does with each field that the documents of OpenAI, vLLM, llama.cpp, Anthropic, Cohere and Jina have:
one table.

A field is obeyed; or taken without effect, because it cannot change an answer; or refused, because it would. A refused
field may still be sent with a value that asks for nothing (its neutral values). A field of no document is refused as
unknown (fields.py).

The table makes what the endpoints check (`fields_of`), and api/FIELDS.md, the page for people:

    python -m api.field_table > api/FIELDS.md
"""

import json
from typing import NamedTuple

from engine.limits import MOST_DRAFTS, SAMPLING

from .fields import ANYTHING, refused

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
BOTH = CHAT, TEXT
OBEYED, WITHOUT_EFFECT, REFUSED = "obeyed", "without effect", "refused"


class Field(NamedTuple):
    """documents: whose the field is. paths: where it may be sent. effect: OBEYED, WITHOUT_EFFECT or REFUSED. says: what
    the server does with it, why it has no effect, or why it is refused. neutral: values that are not refused."""

    name: str
    documents: str
    paths: tuple[str, ...]
    effect: str
    says: str
    neutral: tuple = ()


def obeyed(documents: str, paths: tuple, /, **says: str) -> list[Field]:
    return [Field(name, documents, paths, OBEYED, text) for name, text in says.items()]


def without_effect(documents: str, paths: tuple, why: str, *names: str) -> list[Field]:
    return [Field(name, documents, paths, WITHOUT_EFFECT, why) for name in names]


def refusals(documents: str, paths: tuple, /, **says) -> list[Field]:
    """says: the reason, or a tuple of the reason and the neutral values."""
    pairs = {name: one if isinstance(one, tuple) else (one,) for name, one in says.items()}
    return [Field(name, documents, paths, REFUSED, why, tuple(neutral)) for name, (why, *neutral) in pairs.items()]


NO_ACCOUNTS = "the server knows no accounts, prices or regions"
NO_DRAFTS = "drafts never change an answer"
SPARE = "it belongs to a way of sampling that is refused"
CACHE = "a cache changes no answer, only its speed"
DEGREES = "and tell the chat template the nearest word that it has; without such words they limit thoughts"
VARIABLES = "further variables of the chat template, such as enable_thinking, reasoning_effort, preserve_thinking"
ANY_NAME = "any name is taken but that of a served model of another kind; several of one kind are told apart by it"
PICTURES = "the server decides how pictures are read (--image-tokens)"
ORDER = "requests take turns, a text each"
MEASURED = "the end of an answer has 'timings'; /metrics, /slots and the log say how fast requests run"

# Whose the numbers of SAMPLING are; all others are vLLM's and llama.cpp's.
SAMPLER = {"max_tokens": "OpenAI", "temperature": "OpenAI", "top_p": "OpenAI", "seed": "OpenAI",
           "frequency_penalty": "OpenAI", "presence_penalty": "OpenAI", "thinking_budget": "qengine"}
OFF = {"max_tokens": "; -1: no limit", "top_k": "; -1: off", "seed": "; -1: another one each time"}

SHAPES = [
    *obeyed("OpenAI", BOTH, response_format="the form of the text: json_object (with a schema, too), json_schema"),
    *obeyed("vLLM", BOTH, guided_json="the text fits this JSON schema",
            guided_regex="the text fits this regular expression", guided_choice="the text is one of these",
            guided_grammar="the text obeys this grammar: GBNF if it has '::=', or else Lark",
            structured_outputs="the form of the text: json, json_object, regex, choice or grammar"),
    *obeyed("llama.cpp", BOTH, grammar="the text obeys this grammar in GBNF", json_schema="the text fits this schema")]

OPENAI = [
    *without_effect("OpenAI", BOTH, ANY_NAME, "model"),
    *(Field(name, SAMPLER.get(name, "vLLM, llama.cpp"), BOTH, OBEYED, SAMPLING[name][3] + OFF.get(name, ""))
      for name in SAMPLING),
    *obeyed("OpenAI", BOTH, stream="the answer comes in pieces", stream_options="include_usage: the last piece counts",
            n="so many answers", stop="texts that end the answer", logit_bias="added to the logits of tokens"),
    *obeyed("OpenAI", (CHAT,), messages="the conversation, with texts and images; one that ends with the assistant's "
            "message is continued",
            max_completion_tokens="the same as max_tokens", tools="functions that the model may call",
            tool_choice="none, auto, required, a function, or allowed_tools",
            parallel_tool_calls="whether an answer may have several calls", logprobs="log-probabilities of the tokens",
            top_logprobs="log-probabilities of so many of the likeliest tokens, too",
            reasoning_effort=f"none and minimal turn thoughts off; the others turn them on, {DEGREES}"),
    *obeyed("OpenAI", (TEXT,), prompt="texts, or lists of token ids and texts",
            logprobs="log-probabilities of the tokens and of so many of the likeliest"),
    *without_effect("OpenAI", BOTH, NO_ACCOUNTS, "user", "metadata", "service_tier", "safety_identifier"),
    *without_effect("OpenAI", BOTH, "answers to chats are not stored", "store"),
    *without_effect("OpenAI", BOTH, CACHE, "prompt_cache_key", "prompt_cache_retention",
                    "prompt_cache_options"),
    *without_effect("OpenAI", BOTH, NO_DRAFTS, "prediction"),
    *without_effect("OpenAI", (CHAT,), "a hint; the models know no degrees of it", "verbosity"),
    *refusals("OpenAI", (CHAT,), modalities=("answers are text", ["text"]), audio="answers are text",
              functions=("use 'tools'", []), function_call=("use 'tool_choice'", "none", "auto"),
              web_search_options="there is no search of the web", moderation="nothing is moderated"),
    *obeyed("OpenAI", (TEXT,), echo="the prompt stands before its continuation; with logprobs, its tokens are scored"),
    *without_effect("OpenAI", (TEXT,), "it must equal n: every answer that is generated is returned", "best_of"),
    *refusals("OpenAI", (TEXT,), suffix=("the models do not fill gaps", ""))]

OPENAI_RESPONSES = [
    *without_effect("OpenAI", (RESPONSES,), ANY_NAME, "model"),
    *(Field(name, "OpenAI" if name in ("temperature", "top_p") else "qengine", (RESPONSES,), OBEYED,
            SAMPLING[name][3] + OFF.get(name, "")) for name in SAMPLING if name != "max_tokens"),
    *obeyed("OpenAI", (RESPONSES,),
            input="a text, or items: messages with texts and images, thoughts, calls of functions and their outputs",
            instructions="what stands in front of the input; it holds for one response",
            previous_response_id="the conversation goes on with this response, if it is kept",
            store="whether the response is kept, true by default", stream="the response comes as events",
            max_output_tokens=SAMPLING["max_tokens"][3], tools="functions that the model may call",
            tool_choice="none, auto, required, a function, or allowed_tools",
            parallel_tool_calls="whether an answer may have several calls",
            text="format: the form of the text. verbosity: a hint without effect",
            reasoning=f"effort: none and minimal turn thoughts off; the others turn them on, {DEGREES}. summary: "
            "no effect, as the models write no summaries",
            truncation="auto: the oldest turns go where the conversation is too long",
            include="message.output_text.logprobs and reasoning.encrypted_content",
            top_logprobs="log-probabilities of so many of the likeliest tokens", metadata="the response repeats it"),
    *obeyed("qengine", (RESPONSES,), stop="texts that end the answer", logit_bias="added to the logits of tokens",
            stop_token_ids="tokens that end it", ignore_eos="the answer goes on behind the model's end"),
    *without_effect("OpenAI", (RESPONSES,), NO_ACCOUNTS, "user", "service_tier", "safety_identifier",
                    "access_programs"),
    *without_effect("OpenAI", (RESPONSES,), CACHE, "prompt_cache_key", "prompt_cache_retention",
                    "prompt_cache_options"),
    *without_effect("OpenAI", (RESPONSES,), "it counts calls of OpenAI's own tools", "max_tool_calls"),
    *without_effect("OpenAI", (RESPONSES,), "pieces come as the tokens do", "stream_options"),
    *without_effect("OpenAI", (RESPONSES,), "images of all turns stay in the context", "image"),
    *without_effect("vLLM", (RESPONSES,), "requests take turns by their age and length", "priority"),
    *without_effect("vLLM", (RESPONSES,), "the header X-Request-Id names a request", "request_id"),
    *without_effect("vLLM", (RESPONSES,), CACHE, "cache_salt"),
    *without_effect("vLLM", (RESPONSES,), PICTURES, "mm_processor_kwargs"),
    *refusals("OpenAI", (RESPONSES,), background=("a response is made while its client waits", False),
              conversation="conversations are not kept, and 'previous_response_id' goes on with a response",
              context_management=("the server does not shorten conversations by itself", []),
              prompt="no prompts are kept here, and 'instructions' and 'input' hold the prompt itself",
              moderation="nothing is moderated"),
    *refusals("vLLM", (RESPONSES,), enable_response_messages=("the output tells all that was said", False),
              previous_input_messages="'input' takes items of earlier turns")]

VLLM = [
    *obeyed("vLLM", BOTH, ignore_eos="the answer goes on behind the model's end",
            stop_token_ids="tokens that end the answer and are not part of it",
            min_tokens="the end cannot come before so many tokens; not beside a grammar or tools",
            skip_special_tokens="false: control tokens are part of the text",
            return_token_ids="token_ids beside each piece of an answer"),
    *obeyed("vLLM", (CHAT,), thinking_token_budget="the same as thinking_budget; -1: no limit",
            chat_template_kwargs=VARIABLES,
            documents="given to the chat template",
            add_generation_prompt="whether the template opens the assistant's message",
            continue_final_message="whether the last message, the assistant's, is continued"),
    *without_effect("vLLM", BOTH, SPARE, "length_penalty"),
    *without_effect("vLLM", BOTH, "requests take turns by their age and length", "priority"),
    *without_effect("vLLM", BOTH, "the header X-Request-Id names a request", "request_id", "session_id"),
    *without_effect("vLLM", BOTH, "pieces come as the tokens do", "stream_interval"),
    *without_effect("vLLM", BOTH, CACHE, "cache_salt"),
    *without_effect("vLLM", BOTH, "texts are decoded byte by byte", "spaces_between_special_tokens"),
    *without_effect("vLLM", BOTH, "one process does all of the work", "kv_transfer_params", "ec_transfer_params"),
    *without_effect("vLLM", BOTH, "there is one grammar library", "guided_decoding_backend"),
    *without_effect("vLLM", BOTH, "vLLM itself uses it only where nothing is generated", "return_token_offsets",
                    "return_mm_kwargs", "routed_experts_prompt_start"),
    *without_effect("vLLM", (CHAT,), PICTURES, "mm_processor_kwargs", "media_io_kwargs"),
    *refusals("OpenAI", (CHAT,), prompt="/v1/completions takes it"),
    *refusals("OpenAI", (TEXT,), messages="/v1/chat/completions takes them"),
    *refusals("vLLM", BOTH, use_beam_search=("answers are sampled", False),
              include_stop_str_in_output=("stop strings are not part of the text", False),
              truncate_prompt_tokens="prompts are not cut", truncation_side="prompts are not cut",
              prompt_logprobs="use 'echo' and 'logprobs' of /v1/completions",
              allowed_token_ids="use 'logit_bias', 'guided_choice' or 'guided_regex'",
              bad_words=("use 'logit_bias'", []), logprob_token_ids="use 'top_logprobs'",
              return_tokens_as_token_ids=("use 'return_token_ids'", False),
              guided_whitespace_pattern="the server chooses the white space in JSON",
              watermarking=("texts are not marked", False), vllm_xargs=("there are no extensions", {}),
              repetition_detection="the server's own guard ends answers that repeat themselves"),
    *refusals("vLLM", (CHAT,), echo=("messages are not repeated", False), best_of=("use 'n'", 1),
              add_special_tokens=("the chat template writes them", False),
              chat_template="a template is a program, and a request may not bring one",
              include_reasoning=("thoughts come as reasoning_content", True),
              return_prompt_text=("/apply-template tells it", False)),
    *refusals("vLLM", (TEXT,), thinking_token_budget=("a text has no thoughts", -1),
              add_special_tokens=("a prompt is taken as it is; use token ids", True),
              prompt_embeds="prompts are texts or token ids")]

LLAMA = [
    *obeyed("llama.cpp", BOTH, n_predict="the same as max_tokens", repeat_penalty="the same as repetition_penalty",
            repeat_last_n="0: no penalties; -1: penalties look at all tokens. Others only where no penalty is set"),
    *obeyed("llama.cpp", (CHAT,), thinking_budget_tokens="the same as thinking_budget; -1: no limit",
            reasoning_budget_tokens="the same as thinking_budget; -1: no limit"),
    *without_effect("llama.cpp", BOTH, CACHE, "cache_prompt", "id_slot", "n_cache_reuse"),
    *without_effect("llama.cpp", BOTH, SPARE, "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold",
                    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay"),
    *without_effect("llama.cpp", BOTH, MEASURED, "timings_per_token", "return_progress"),
    *without_effect("llama.cpp", BOTH, NO_DRAFTS, "speculative.n_max", "speculative.n_min", "speculative.p_min",
                    "speculative.type"),
    *without_effect("llama.cpp", BOTH, "a sign of life comes every 15 s", "sse_ping_interval"),
    *without_effect("llama.cpp", BOTH, "sampling always runs on the card", "backend_sampling"),
    *without_effect("llama.cpp", (CHAT,), "thoughts cannot be ended from outside", "reasoning_control"),
    *refusals("llama.cpp", BOTH, mirostat=("there is no such sampler", 0),
              dynatemp_range=("the temperature does not vary", 0), typical_p=("there is no such sampler", 1),
              typ_p=("there is no such sampler", 1), top_n_sigma=("there is no such sampler", -1, 0),
              xtc_probability=("there is no such sampler", 0), dry_multiplier=("there is no such sampler", 0),
              adaptive_target=("there is no such sampler", -1), samplers="samplers have one order",
              min_keep=("no sampler has a least number of tokens", 0, 1), n_probs=("use 'logprobs'", 0),
              post_sampling_probs=("log-probabilities are those of the model, before sampling", False),
              n_keep=("a context that is full ends the answer", 0, -1),
              n_discard=("a context that is full ends the answer", 0),
              n_indent=("the model chooses the indentation", 0),
              n_cmpl=("use 'n'", 1), t_max_predict_ms=("use 'timeout'", 0), lora=("there are no adapters", []),
              response_fields="answers have all of their fields", return_tokens=("use 'return_token_ids'", False),
              grammar_lazy=("use 'tools'", False), grammar_triggers=("use 'tools'", []),
              preserved_tokens=("use 'skip_special_tokens'", [])),
    *refusals("llama.cpp", (CHAT,), reasoning_format=("thoughts come as reasoning_content", "auto", "deepseek"),
              thinking_forced_open=("use 'reasoning_effort'", False), parse_tool_calls=("use 'tools'", True),
              reasoning_in_content=("thoughts come as reasoning_content", False))]

POOLING = [
    *without_effect("OpenAI", (EMBEDDINGS,), ANY_NAME, "model"),
    *without_effect("OpenAI", (EMBEDDINGS,), NO_ACCOUNTS, "user"),
    *obeyed("OpenAI", (EMBEDDINGS,), input="a text, token ids, or a list of such",
            encoding_format="float, or base64 of little-endian float32",
            dimensions="the first so many numbers, scaled to length 1"),
    *without_effect("Cohere, Jina", (RERANK,), ANY_NAME, "model"),
    *obeyed("Cohere, Jina", (RERANK,), query="what is looked for", documents="texts, or objects that have a text",
            top_n="so many of the most relevant; 0: all",
            return_documents="the documents beside their scores (default: false)"),
    *obeyed("vLLM", (RERANK,), instruction="what makes a document relevant, where the model's template has a place"),
    *refusals("Cohere", (RERANK,), rank_fields=("of an object 'text' is read", ["text"]),
              max_chunks_per_doc=("a document has one score", 1)),
    *obeyed("Cohere", (RERANK,), max_tokens_per_doc="a longer document is cut; `meta.warnings` says how many were"),
    *obeyed("Jina", (RERANK,), truncation="whether documents too long for the model's context are cut, as "
            "`meta.warnings` says then (default: false)"),
    *refusals("Jina", (RERANK,), return_embeddings=("a reranker makes scores only", False)),
    *without_effect("vLLM, Cohere", (EMBEDDINGS, RERANK), ORDER, "priority"),
    *without_effect("vLLM", (EMBEDDINGS, RERANK), "the header X-Request-Id names a request", "request_id"),
    *without_effect("vLLM", (EMBEDDINGS, RERANK), "there is no cache of texts", "cache_salt"),
    *without_effect("vLLM", (EMBEDDINGS, RERANK), "texts hold no images", "mm_processor_kwargs"),
    *refusals("vLLM", (EMBEDDINGS,), truncate_prompt_tokens="texts are not cut", truncation_side="texts are not cut"),
    *refusals("vLLM", (RERANK,), truncate_prompt_tokens="use 'max_tokens_per_doc' or 'truncation'",
              truncation_side=("documents are cut at their end", "right")),
    *refusals("vLLM", (EMBEDDINGS, RERANK),
              use_activation=("rows are always made embeddings or scores", True)),
    *refusals("vLLM", (EMBEDDINGS,), add_special_tokens=("for texts as they are there are token ids", True),
              normalize=("embeddings have length 1", True), embed_dtype=("numbers are float32", "float32"),
              endianness=("numbers are little-endian", "native", "little"), messages="texts have no turns"),
    *refusals("llama.cpp", (EMBEDDINGS,), embd_normalize=("embeddings have length 1", 2), content="use 'input'"),
    *refusals("llama.cpp", (RERANK,), texts="use 'documents'")]

QENGINE = [
    *obeyed("qengine", (EMBEDDINGS, RERANK), timeout="the answer has to come within so many seconds"),
    *obeyed("qengine", (*BOTH, RESPONSES, MESSAGES),
            timeout="the answer has to be complete within so many seconds",
            repetition_guard="whether an answer that repeats itself is ended",
            sparse="whether a long prompt leaves out keys of little weight, if the model was loaded with --sparse",
            draft=f"most drafts that are checked at once, 0 to {MOST_DRAFTS}; no answer depends on it"),
    *obeyed("qengine", (RESPONSES, MESSAGES), chat_template_kwargs=VARIABLES)]

ANTHROPIC = [
    *without_effect("Anthropic", (MESSAGES,), ANY_NAME, "model"),
    *(Field(name, "Anthropic" if name in ("max_tokens", "temperature", "top_k", "top_p") else "qengine", (MESSAGES,),
            OBEYED, SAMPLING[name][3]) for name in SAMPLING),
    *obeyed("Anthropic", (MESSAGES,), messages="the conversation, with texts and images; one that ends with the "
            "assistant's is continued",
            system="the system message", tools="functions that the model may call",
            tool_choice="auto, any, tool or none", thinking="whether the model thinks, and whether thoughts are shown",
            output_config="format: the text fits a schema. effort: how much to think, in the template's nearest word, "
            "or else a limit of thoughts",
            stop_sequences="texts that end the answer", stream="the answer comes as events"),
    *without_effect("Anthropic", (MESSAGES,), "the chat template decides which thoughts of earlier turns the model "
                    "sees, see chat_template_kwargs; no other edit is taken", "context_management"),
    *without_effect("Anthropic", (MESSAGES,), "create: no state is held; continue: answered thread_not_found, upon "
                    "which clients send the whole conversation", "thread"),
    *without_effect("Anthropic", (MESSAGES,), CACHE, "cache_control", "diagnostics"),
    *without_effect("Anthropic", (MESSAGES,), NO_ACCOUNTS, "metadata", "service_tier", "inference_geo", "speed",
                    "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token"),
    *without_effect("Anthropic", (MESSAGES,), "the model declines nothing for reasons of policy", "fallbacks"),
    *refusals("Anthropic", (MESSAGES,), container="there are no containers", compaction="nothing is summarized",
              mcp_servers=("the server calls no other servers", []))]

FIELDS = [*OPENAI, *OPENAI_RESPONSES, *SHAPES, *VLLM, *LLAMA, *POOLING, *QENGINE, *ANTHROPIC]


def fields_of(path: str, shapes: dict) -> dict:
    """The properties of a request's body: of every field of this path its description. shapes: those of the fields
    that are obeyed, and of others whose inside is checked. Raises ValueError where the two disagree."""
    rows = {row.name: row for row in FIELDS if path in row.paths}
    obeyed_names = {row.name for row in rows.values() if row.effect == OBEYED}
    if obeyed_names - shapes.keys() or shapes.keys() - rows.keys():
        raise ValueError(f"{path}: only one side has {obeyed_names ^ shapes.keys()}")
    described = {row.name: refused(row.says, *row.neutral) for row in rows.values() if row.effect == REFUSED}
    idle = {row.name: ANYTHING for row in rows.values() if row.effect == WITHOUT_EFFECT}
    return shapes | {name: one for name, one in (idle | described).items() if name not in shapes}


def page() -> str:
    """api/FIELDS.md."""
    lines = ["# Fields of requests", "",
             "What the server does with each field that the documents of OpenAI, vLLM, llama.cpp, Anthropic, Cohere",
             "and Jina have.",
             "Made by `python -m api.field_table` of the table that requests are checked with. A field that is in no",
             "row is refused as unknown. `null` is the same as leaving a field out.", ""]
    for path in CHAT, TEXT, RESPONSES, MESSAGES, EMBEDDINGS, RERANK:
        lines += [f"## {path}", ""]
        for effect in OBEYED, WITHOUT_EFFECT, REFUSED:
            rows = sorted((row for row in FIELDS if path in row.paths and row.effect == effect))
            head = {OBEYED: "what it does", WITHOUT_EFFECT: "why", REFUSED: "why"}[effect]
            lines += [f"### {effect.capitalize()}", "", f"| field | of | {head} |", "|---|---|---|"]
            lines += [f"| `{row.name}` | {row.documents} | {row.says}{neutral_of(row)} |" for row in rows] + [""]
    return "\n".join(lines)


def neutral_of(row: Field) -> str:
    values = " and ".join(f"`{json.dumps(value)}`" for value in row.neutral)
    return f"; {values} {'is' if len(row.neutral) == 1 else 'are'} taken" if values else ""


if __name__ == "__main__":
    print(page(), end="")
