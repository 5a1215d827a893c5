"""What only examples to train on have: more ways to ask (asking.py), more tools (models/text/wide/), and other
things than the picture in conversations with one (besides.py).

None of it is in examples to judge by, which stay as they are whoever adds to it.
"""
