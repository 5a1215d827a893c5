"""One answer asked for in four ways, at once and asynchronously, whole and streamed, which have to agree."""

import json


def chat_in_four_ways(client, run_async, **arguments):
    """What an answer says, at once and asynchronously, whole and streamed, which have to agree but for what the cache
    had and for drafts: (choices, usage) as `told` gives them."""
    arguments = {"model": "m"} | arguments
    streamed = arguments | {"stream": True, "stream_options": {"include_usage": True}}

    async def asynchronously(client):
        whole = await client.chat.completions.create(**arguments)
        return whole, [chunk async for chunk in await client.chat.completions.create(**streamed)]

    answers = [told(client.chat.completions.create(**arguments)),
               put_together(client.chat.completions.create(**streamed))]
    whole, chunks = run_async(asynchronously)
    answers += [told(whole), put_together(chunks)]
    own = {"prompt_tokens_details": None}, ("accepted_prediction_tokens", "rejected_prediction_tokens")
    said = [(choices, without(usage, *own)) for choices, usage in answers]
    assert said[1:] == said[:1] * 3
    return answers[0]


def without(usage, replaced, drafts):
    """A usage without what depends on the cache, and on how many drafts paid."""
    details = {name: n for name, n in usage["completion_tokens_details"].items() if name not in drafts}
    return usage | replaced | {"completion_tokens_details": details}


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


def respond_in_four_ways(client, run_async, **arguments):
    """A response, at once and asynchronously, whole and streamed, which have to agree but for ids, times and
    what the cache had."""
    arguments = {"model": "m"} | arguments

    async def asynchronously(client):
        whole = await client.responses.create(**arguments)
        return whole, [event async for event in await client.responses.create(stream=True, **arguments)]

    whole = client.responses.create(**arguments)
    streamed = check_events(list(client.responses.create(stream=True, **arguments)))
    async_whole, events = run_async(asynchronously)
    said = [unnamed(one) for one in (whole, streamed, async_whole, check_events(events))]
    assert said[1:] == said[:1] * 3
    return whole


def unnamed(response):
    """A response as a dict, without what differs between two that say the same."""
    said = response.to_dict()
    for item in said["output"]:
        assert len(item.pop("id")) > 32
        item.pop("call_id", None)
    times = said.pop("created_at"), said.pop("completed_at")
    assert times[1] is None or times[0] <= times[1]
    return said | {"id": None, "usage": said["usage"] | {"input_tokens_details": None}}


def check_events(events):
    """The response at the end of a stream of events, which have to come in OpenAI's order and tell what it holds."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert {event.response.id for event in (*events[:2], events[-1])} == {final.id}
    assert events[-1].type == f"response.{final.status}" and events[0].response.output == []
    rest = iter(events[2:-1])
    for index, item in enumerate(final.output):
        check_item(rest, index, item)
    assert next(rest, None) is None
    return final


def check_item(events, index: int, item):
    """Takes the events of an item from a stream: its beginning, its pieces and its end."""
    added = next(events)
    assert (added.type, added.output_index, added.item.id) == ("response.output_item.added", index, item.id)
    assert added.item.status == "in_progress"
    is_call = item.type == "function_call"
    assert not (added.item.arguments if is_call else added.item.content)
    kind = {"function_call": "function_call_arguments", "message": "output_text",
            "reasoning": "reasoning_text"}[item.type]
    if not is_call:
        assert next(events).type == "response.content_part.added"
    text = item.arguments if is_call else item.content[0].text
    pieces, logprobs = "", []
    while (event := next(events)).type == f"response.{kind}.delta":
        pieces += event.delta
        logprobs += getattr(event, "logprobs", [])
    assert event.type == f"response.{kind}.done" and event.item_id == item.id
    assert pieces == text == (event.arguments if is_call else event.text)
    if not is_call:
        done = next(events)
        assert done.type == "response.content_part.done" and done.part.to_dict() == item.content[0].to_dict()
    if item.type == "message":
        assert [one.logprob for one in logprobs] == [one.logprob for one in item.content[0].logprobs[:len(logprobs)]]
        assert [one.token for one in event.logprobs] == [one.token for one in item.content[0].logprobs]
    done = next(events)
    assert done.type == "response.output_item.done" and done.item.to_dict() == item.to_dict()
