"""Parts of the engine that the heart, qengine.py, uses and that know nothing of it: no file here imports qengine.

    request.py          a request and the answer on its way; the errors that leave an engine
    limits.py           options of users, their limits and defaults
    gguf.py             model files, checked before use
    hub.py              model files of the Hugging Face Hub, by a name
    hyperparameters.py  what the metadata of a model file says
    details.py          what a list of models says of each model
    weights.py          tensors from a file, or random ones, put on a card
    tokenizer.py        text to token ids and back
    template.py         messages to a prompt
    reply.py            an answer's tokens, as they come, cut into thoughts, text and tool calls
    talk.py             conversations with pictures, as the command line and notebooks hold them
    display.py          how a loaded model shows itself, and what its kernels did
    own_products.py     a reader's products in place of the engine's: checked, or compared
    look.py             hidden states, attention and logits of a text by name, and what changes if one is changed
    rendering.py        chat templates, run in a process of their own
    guard.py            which control tokens of a prompt are real
    sandbox.py          functions that run in a process of their own, with a limit of seconds and bytes
    images.py           pictures of a request, and their places in the prompt
    picture_files.py    picture files to pixels, in a process of their own
    constraints.py      grammars that answers obey
    trials.py           a process that tries grammars before they are used
    thinking.py         budgets of thoughts
    repetition.py       a guard against answers that repeat themselves for ever
    durations.py        durations as people write them
    sampler.py          the choice of tokens on the last card, and how they get to the host
    sequence.py         a generation that holds a slot
    speculate.py        how many drafts a check gets
    turns.py            which prompt gets the next pass, and when running answers come first
    prefix.py           the prefix tree: pages and checkpoints that later prompts may share
    scratch.py          the scratch memory of a pass
    micro_batches.py    passes in streams: what runs beside what
    recordings.py       the recordings of decode steps, and how many are kept
    worker.py           the thread of each card, and its tasks
    plan.py             what a model takes of the cards, which layers go where, how long passes take
    pipes.py            what the pipes of an emulated card do in a decode step
    text_engine.py      what an engine offers a server
    served.py           the models of a server: which one a request means, which are loaded, which make room
    replicas/           a model's engines on several machines, which a server sees as one
"""
