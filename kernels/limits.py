"""What users may choose of kernels. The file imports nothing, so that the help of the command line takes no time."""

CHECK_ROWS = 8              # most rows of an answer in a decode step: its latest token and up to 7 drafts
WISHES = "auto", "dp4a", "tensor"       # what is to multiply several rows, see kernels/products.py
FLOAT16 = "float16"         # how keys and values are kept if nobody asks for another format
KV_NAMES = FLOAT16, "q8", "q8+4", "q8+3", "q4", "q3"        # the formats of kernels/kv_formats.py
