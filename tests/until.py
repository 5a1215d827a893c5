"""How long tests wait."""

import time

# Seconds until what a test waits for has failed. It takes far less, also where a machine with much other work compiles
# kernels first.
PATIENCE = 300


def wait_until(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
