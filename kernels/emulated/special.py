"""Special registers: where a thread is in its block and grid, and the clocks."""

from .emit import WARP, const, vector_const
from .tensor import Tensor


class Special(Tensor):
    """The values of special registers, see `Operands`."""

    def special_scalar(self, name):
        """(value, type) of the scalar of a special register."""
        if name.startswith(("%ctaid.", "%nctaid.")):
            return self.let(f"load i32, ptr %{name[1:]}.place"), "i32"
        if name.startswith("%ntid."):
            return str(self.lanes.block["xyz".index(name[-1])]), "i32"
        if name.startswith("%tid."):
            return self._thread_index("xyz".index(name[-1]), 1, "%first_thread"), "i32"
        if name == "%laneid":
            return "0", "i32"
        if name == "WARP_SZ":
            return "32", "i32"
        if name == "%warpid":
            return "%warp", "i32"
        if name == "%nwarpid":
            x, y, z = self.lanes.block
            return str(-(-x * y * z // WARP)), "i32"
        if name in ("%clock", "%clock64"):
            counter = "readcyclecounter" if self.x86 else "readsteadycounter"
            clock = self.call(f"llvm.{counter}", "i64")
            return (clock, "i64") if name == "%clock64" else (self.resize("i64", "i32", 1, clock), "i32")
        if name == "%globaltimer":
            return self._nanoseconds(), "i64"
        if name == "%dynamic_smem_size":
            return self.let("load i32, ptr %dynamic.place"), "i32"
        raise self.instr.unsupported(f"special register `{name}`")

    def _nanoseconds(self):
        """The time of a clock that nobody sets, from C's struct timespec: seconds and nanoseconds."""
        clock = "6" if "darwin" in self.target.triple else "1"               # CLOCK_MONOTONIC
        self.call("clock_gettime", "i32", ("i32", clock), ("ptr", "%nowhere"))
        rest = self.let("load i64, ptr " + self.let("getelementptr i8, ptr %nowhere, i64 8"))
        seconds = self.op("mul", "i64", 1, self.let("load i64, ptr %nowhere"), "1000000000")
        return self.op("add", "i64", 1, seconds, rest)

    def special_vector(self, name):
        if name.startswith("%tid."):
            thread = self.spread("i32", "%first_thread", range(WARP))
            return self._thread_index("xyz".index(name[-1]), WARP, thread), "i32"
        if name.startswith("%lanemask_"):
            ones = {"eq": lambda i: 1 << i, "lt": lambda i: (1 << i) - 1, "le": lambda i: (2 << i) - 1,
                    "gt": lambda i: -(2 << i) % (1 << 32), "ge": lambda i: -(1 << i) % (1 << 32)}[name[10:]]
            return vector_const("i32", [ones(i) for i in range(WARP)]), "i32"
        raise self.instr.unsupported(f"special register `{name}`")

    def _thread_index(self, axis, w, thread):
        """Index along an axis of the thread with this number in the block."""
        x, y, z = self.lanes.block
        stride = (1, x, x * y)[axis]
        value = self.op("udiv", "i32", w, thread, const("i32", w, stride)) if stride > 1 else thread
        return self.op("urem", "i32", w, value, const("i32", w, (x, y, z)[axis]))
