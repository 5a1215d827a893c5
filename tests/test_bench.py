"""The table of `python -m kernels.<name>`."""

from types import SimpleNamespace

import pytest
from numba import cuda, uint32

from kernels import bench
from kernels.bench import Case, Result
from kernels.emulated.cards import CMP_100_210, H100, V100

N = 100_000


@cuda.jit
def double(x, n):
    i = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < n:
        x[i] = x[i] + x[i]


def failing():
    assert 1 == 2, "error 3.0 of the largest value"


def test_table(card, capsys):
    x = card.zeros(N, "float32")

    def launch():
        card.launch(double, -(-N // 256), 256, x, N)

    cases = [Case("100000", lambda: 0.25, launch, n_bytes=8 * N), Case("only timed", None, launch),
             Case("only checked", lambda: 0.0), Case("wrong", failing, launch)]
    results = bench.bench(card, "double", cases)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"double on {card.describe()}"
    assert "2.50e-01" in lines[3] and "µs" in lines[3]
    assert "FAILED: error 3.0" in lines[6]
    assert 1e-7 < results[0].seconds < 0.1 and 1e-7 < results[1].seconds < 0.1
    assert results[2].seconds != results[2].seconds and results[3].failure


def test_time_is_of_one_call(card):
    x = card.zeros(N, "float32")
    long = bench.seconds_per_call(card, lambda: card.launch(double, 1, 256, x, N))
    both = bench.seconds_per_call(card, lambda: [card.launch(double, 1, 256, x, N) for _ in range(8)])
    assert both > 1.5 * long                             # 8 times; a busy machine blurs it


def test_peaks():
    case = Case("x", n_bytes=297_000_000, n_ops=133_824_000, pipe="dp4a")
    assert bench.fraction_of_peak(case, 1e-4, H100) == "100 % memory"
    case = Case("x", n_ops=10_000_000, n_bytes=1, pipe="dp4a")
    assert bench.fraction_of_peak(case, 1e-7, H100) == "75 % dp4a"
    assert bench.fraction_of_peak(case, 1e-7, None) == ""
    assert bench.fraction_of_peak(Case("x"), 1e-7, H100) == ""

    def model(name):
        return bench.model_of(SimpleNamespace(model=name))

    assert model("NVIDIA H100 80GB HBM3") is H100 and model("Tesla V100-PCIE-16GB") is V100
    assert model("NVIDIA CMP 100-210") is CMP_100_210 and model("NVIDIA A100") is None
    assert bench.model_of(SimpleNamespace()) is None


def test_main_reports_by_exit_code(monkeypatch, capsys):
    for arguments, cases, code in ((["x", "--card", "emulated"], [Case("a", lambda: 0.0)], 0),
                                   (["x", "--card", "emulated"], [Case("a", failing)], 1),
                                   (["x", "--card", "nothing"], [], "unknown card 'nothing'")):
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as end:
            bench.main("title", lambda card: cases)
        assert end.value.code == code or code in end.value.code


def test_numbers():
    shown = [bench.show_time(t) for t in (2.0, 0.5, 1.23e-5, 1e-8)]
    assert shown == ["  2.00 s ", "500.00 ms", " 12.30 µs", "  0.01 µs"]
    assert bench.line(Result(Case("a"), 0.5)) == "a" + " " * (bench.NAME_WIDTH + 2) + "5.00e-01"
