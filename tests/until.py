"""How long tests wait."""

import time

# Seconds until what a test waits for has failed. It takes far less, also where a machine with much other work compiles
# kernels first.
PATIENCE = 300


def wait_until(condition, seconds=PATIENCE, seen=lambda: ""):
    """seen(): what there is in place of what is waited for. It is asked for when the wait has failed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain {seen()}"
        time.sleep(0.01)
