"""What users may choose of kernels. The file imports nothing, so that the help of the command line takes no time."""

CHECK_ROWS = 8              # most rows of an answer in a decode step: its latest token and up to 7 drafts
WISHES = "auto", "dp4a", "tensor"       # what is to multiply several rows, see kernels/products.py
