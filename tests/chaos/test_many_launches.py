"""Many launches: one after the other, and at once in threads of two kernels."""

import trials
from conftest import REPOSITORY
from faults import ours, prepared
from kernels import Kernel

AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
tokens = range({first}, {first} + {threads})
with ThreadPoolExecutor({threads}) as pool:
    met = pool.map(lambda token: launch(meet, token, nprocs=2, timeout=300).rank0, tokens)
print(list(met) == [[token, token] for token in tokens])
"""


def test_the_usual_idiom_neither_hangs_nor_aborts(kernels):
    def trial(number: int) -> float:
        cell = kernels.get().check(f"list({ours('train_once', timeout=60)})")
        assert cell.result == "[0, 1]"
        return cell.seconds

    trials.run(
        "usual DDP idiom, model alive at the end: no hang, no abort",
        trial,
        short=2,
        share=2,
        after_failure=kernels.discard,
    )


def test_launches_at_once_do_not_mix(kernels):
    threads = 10 if trials.is_full() else 2
    other = prepared(Kernel(PYTHONPATH=str(REPOSITORY)))

    def trial(number: int) -> float:
        cells = [
            (kernel, kernel.send(AT_ONCE.format(threads=threads, first=first)))
            for first, kernel in ((0, kernels.get()), (1000, other))
        ]
        for kernel, cell in cells:
            kernel.wait(cell, timeout=400)
            assert cell.status == "ok", f"{cell.ename}: {cell.evalue}"
            assert cell.text.endswith("True\n")
        return max(cell.seconds for _, cell in cells)

    try:
        trials.run(
            f"{2 * threads} launches at once, in threads of two kernels: none meets another",
            trial,
            short=1,
            share=0.05,
        )
    finally:
        left = other.close()
    assert left == []
