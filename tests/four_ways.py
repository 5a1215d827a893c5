"""One answer asked for in four ways, at once and asynchronously, whole and streamed, which have to agree."""

import json


def chat_in_four_ways(client, run_async, **arguments):
    """What an answer says, at once and asynchronously, whole and streamed, which have to agree but for what the cache
    had: (choices, usage) as `told` gives them."""
    arguments = {"model": "m"} | arguments
    streamed = arguments | {"stream": True, "stream_options": {"include_usage": True}}

    async def asynchronously(client):
        whole = await client.chat.completions.create(**arguments)
        return whole, [chunk async for chunk in await client.chat.completions.create(**streamed)]

    answers = [told(client.chat.completions.create(**arguments)),
               put_together(client.chat.completions.create(**streamed))]
    whole, chunks = run_async(asynchronously)
    answers += [told(whole), put_together(chunks)]
    said = [(choices, usage | {"prompt_tokens_details": None}) for choices, usage in answers]
    assert said[1:] == said[:1] * 3
    return answers[0]


def told(whole):
    """What a whole answer says, but for the ids."""
    choices = []
    for choice in whole.choices:
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
        assert all(call.id and call.type == "function" for call in choice.message.tool_calls or [])
        choices.append((getattr(choice.message, "reasoning_content", None), choice.message.content or "", calls,
                        choice.finish_reason))
    return choices, whole.usage.model_dump()


def put_together(chunks):
    """What a stream says, in the same form."""
    said, ids, usage = {}, set(), None
    for chunk in chunks:
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            thought, text, calls, reason = said.get(choice.index, (None, "", [], None))
            assert reason is None               # nothing comes after the end
            if piece := getattr(choice.delta, "reasoning_content", None):
                thought = (thought or "") + piece
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.id and call.type == "function" and call.function.name
                    calls.append([call.function.name, ""])
                else:
                    assert call.index == len(calls) - 1 and call.id is call.type is call.function.name is None
                calls[-1][1] += call.function.arguments
            said[choice.index] = thought, text + (choice.delta.content or ""), calls, choice.finish_reason
    assert len(ids) == 1
    return [(thought, text, [(name, json.loads(arguments)) for name, arguments in calls], reason)
            for thought, text, calls, reason in (said[i] for i in range(len(said)))], usage.model_dump()


def message_in_four_ways(client, run_async, **arguments):
    """An answer, at once and asynchronously, whole and streamed, which have to agree but for what the cache had."""
    arguments = {"model": "m", "max_tokens": 500} | arguments

    async def asynchronously(client):
        whole = await client.messages.create(**arguments)
        async with client.messages.stream(**arguments) as stream:
            return whole, await stream.get_final_message()

    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop"
    said = [(blocks_of(message), message.stop_reason, message.stop_sequence, message.usage.output_tokens,
             message.usage.output_tokens_details, message.usage.input_tokens + message.usage.cache_read_input_tokens)
            for message in (whole, streamed, *run_async(asynchronously))]
    assert said[1:] == said[:1] * 3
    return whole


def blocks_of(message):
    """What a message says, but for the ids of calls."""
    kinds = {"text": lambda block: block.text, "thinking": lambda block: block.thinking,
             "tool_use": lambda block: (block.name, block.input)}
    return [(block.type, kinds[block.type](block)) for block in message.content]
