"""The wire formats: what clients send and receive over HTTP, one protocol per file.

Each translates to and from qengine's Request, Event and messages, and knows nothing of cards or caches; qengine.py
knows of the protocols only which endpoints they have.

    openai.py      /v1/chat/completions, /v1/completions, /v1/models
    anthropic.py   /v1/messages, /v1/messages/count_tokens
    plain.py       /tokenize, /detokenize, /apply-template: what is behind the two
    openapi.py     /openapi.json: all of them described
    page.py        /, a chat page (page.html), and /pipes, what its live bar shows
    metrics.py     /metrics
    access.py      API keys, and pages of other origins
    log.py         a line for each request
    chat.py        a conversation, whatever its protocol: prompt, grammar, and how to read the answer
    reply.py       an answer's tokens, as they come, cut into thoughts, text and tool calls
    tools.py       the forms in which models call tools, and how they are read
    grammar.py     grammars that answers must obey: calls of tools, JSON of a schema
    strings.py     what a schema demands of a string, as regular expressions
    fields.py      what a request's body may hold: checked, and described for openapi.py
"""
