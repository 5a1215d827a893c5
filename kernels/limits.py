"""Options of kernels that users may choose. The file imports nothing, so that the command line's help takes no time."""

CHECK_ROWS = 8              # most rows of an answer in a decode step: its latest token and up to 7 drafts
WISHES = "auto", "dp4a", "tensor"       # which kernels are to multiply several rows, see kernels/products.py
FLOAT16 = "float16"         # the KV cache's format if nobody asks for another one
KV_NAMES = FLOAT16, "q8", "q8+4", "q8+3", "q4", "q3"        # the formats of kernels/kv_formats.py
