from kernels.bench import main
from kernels.formats.checks import cases

main("Formats of weights", cases)
