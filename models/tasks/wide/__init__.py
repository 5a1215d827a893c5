"""What only examples to train on have: more ways to ask (asking.py) and more tools (models/text/wide/).

None of it is in examples to judge by, which stay as they are whoever adds to it.
"""
