"""A process that borrows pages of a real GPU: maps them, writes to them, returns one when told."""

import sys
from pathlib import Path

from cuda_cases import ZEROS, device_gpu

from executor.cuda.backing import VirtualMapping
from executor.cuda.page_pool import PageClient, PagePool


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(path: str, pages: int) -> None:
    gpu = device_gpu()
    own = PagePool(gpu.driver, gpu.page_bytes)
    borrower = PageClient(gpu.driver, gpu.page_bytes, Path(path), own)
    while borrower.borrowed < pages:
        borrower.step()
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, pages)
    mapping.back(range(pages), borrower.take(pages))
    for page in range(pages):
        assert gpu.read(mapping.address(page), len(ZEROS)) == ZEROS
        gpu.write(mapping.address(page), gpu.pattern(page))
    say("mapped")
    sys.stdin.readline()
    borrower.give(mapping.back([0], [mapping.alias]))
    say("returned")
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
