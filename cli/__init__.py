"""What `python qengine.py` does: cli/main.py reads the options, the other files do what they ask for.

    main.py         from words to an exit code
    options.py      the options, which go together, the help
    tasks.py        what is to be done
    named.py        how several models are written
    ending.py       exit codes, and sentences in place of tracebacks, for benchmarks/, too
    engines.py      what the options ask of the engines, and the files that they name
    models.py       the models of a server or a plan, where there may be several
    replicas.py     the models of a server on a cluster of Ray
    interrupts.py   Ctrl-C
    chat.py         one answer, or a conversation, on the terminal
    terminal.py     line editing and its history, wrapped words, thoughts in another style
    serve.py        the server
    perplexity.py   how well a model predicts a text
    bench.py        how fast a model runs
    checks.py       how much faster drafts make it

cli hands an engine to api/, and is the only room that imports qengine: as a module, whose names are looked up when they
are used.
"""
