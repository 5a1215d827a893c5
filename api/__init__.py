"""The wire formats, what clients send and receive over HTTP, one protocol per file; and the server around them.

A protocol translates to and from Request, Delta and messages, and knows nothing of cards or caches. No file here
imports qengine or cli: a server is handed an engine, of which it uses what engine/text_engine.py names, or
engine/pooling.py where its model makes embeddings or scores.

    openai.py      /v1/chat/completions
    completions.py /v1/completions
    responses.py   /v1/responses: what clients send; responses_stream.py: what is written; stored.py: what is kept
    embeddings.py  /v1/embeddings
    rerank.py      /v1/rerank, /v2/rerank, /rerank
    models.py      /v1/models, /models, /props, /slots
    anthropic.py   /v1/messages, /v1/messages/count_tokens
    ollama.py      /api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/show, /api/ps, /api/version
    plain.py       /tokenize, /detokenize, /apply-template, /health
    openapi.py     /openapi.json: all endpoints described; the protocol of an error
    page.py        /, a chat page (the files of web/), and what it asks for: /pipes, /experts, /waiting
    metrics.py     /metrics
    endpoint.py    what an endpoint is, and what a protocol is to the server
    errors.py      what a client hears of an error
    service.py     models, open requests and their clients, and the Flask app over them
    http.py        the sockets under that app: who is let in, and who has to go where room is short
    connection.py  a client's connection: its deadlines, and what is answered to bytes that are no request
    heads.py       what counts as an HTTP request
    tls.py         certificates, and encrypted connections
    access.py      API keys, and pages of other origins
    log.py         a line for each request
    chat.py        a conversation, whatever its protocol: prompt, grammar, and how to read the answer
    streams.py     what the streams of all protocols have in common
    pictures.py    pictures of requests: from base64 and URLs to what the engine's eyes read
    fetch.py       pictures of the web, fetched from public addresses
    thinking.py    how long a model may think, as requests say it
    tools.py       the forms in which models call tools, and how they are read
    grammar.py     grammars that answers must obey: calls of tools, texts of a shape (a schema, a choice, ...)
    strings.py     what a schema demands of a string, as regular expressions
    body.py        a request's body, parsed if that takes no time that others would notice
    fields.py      what a request's body may hold: checked, and described for openapi.py
"""
