"""Options of users, their limits and defaults. The file imports nothing that takes time, so that the help of the
command line is there at once."""

from pathlib import Path

from kernels.limits import CHECK_ROWS

VERSION = "0.1.0"

DEFAULT_CTX = 4096          # tokens of a slot, unless the caller names a number or the model was made for fewer

# The small model that comes with qengine, the file with its eyes, and a picture to show it.
DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "models" / "qengine-10m-Q8_0.gguf"
DEFAULT_EYES = DEFAULT_MODEL.with_name("qengine-10m-mmproj-Q8_0.gguf")
DEFAULT_PICTURE = DEFAULT_MODEL.with_name("shapes.png")

SPARSE = "off", "ask", "on"             # whether prompts leave out keys: never, where a request asks, unless it refuses

KEPT_CONTEXTS = 4           # contexts per slot that get pages, if memory suffices: the running one and earlier ones
MOST_REPLICAS = 1000        # of a model on a cluster of Ray
MOST_DRAFTS = CHECK_ROWS - 1            # of an answer in a check
IMAGE_TOKENS = 64, 4096     # of a picture: fewest and most. The least is the published one; engine/images.py says more
LONGEST_PERIOD = 64         # tokens of a repeated text; a longer one that comes again and again is not noticed
REPEATED_TOKENS = 512       # an answer that ends with so many tokens of repetitions of one period is ended

# The numbers by which a request controls sampling: type, lowest, highest, meaning (for --help).
SAMPLING = {
    "max_tokens": (int, 1, 2**31 - 1, "longest answer, in tokens (default: what the context holds)"),
    "temperature": (float, 0, 2, "0 takes the likeliest token, more is more varied (default: 0, --serve: 1)"),
    "top_k": (int, 0, 2**31 - 1, "choose among the K likeliest tokens (0: all)"),
    "top_p": (float, 0, 1, "choose among the likeliest tokens that together reach this probability (1: all)"),
    "min_p": (float, 0, 1, "leave out tokens less likely than this share of the likeliest one (0: none)"),
    "seed": (int, 0, 2**64 - 1, "the same seed and prompt give the same answer"),
    "repetition_penalty": (float, 0.01, 10, "divide the logits of tokens seen in prompt or answer by this (1: off)"),
    "frequency_penalty": (float, -2, 2, "take this from a token's logit for each time that the answer has it (0: off)"),
    "presence_penalty": (float, -2, 2, "take this from the logits of tokens that the answer has (0: off)"),
    "thinking_budget": (int, 0, 2**31 - 1, "most tokens of thoughts; the model then has to answer (default: no limit)"),
}

# What a template is given by the engine itself.
OWN_NAMES = {"messages", "tools", "add_generation_prompt", "enable_thinking", "bos_token", "eos_token",
             "raise_exception", "strftime_now"}
