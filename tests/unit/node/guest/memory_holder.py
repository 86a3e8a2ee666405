"""MemoryHolder: a process of so many MiB that gives some back, or says so. argv: MiB, delay.

free N   gives N MiB back after `delay` seconds, and answers at once
lie N    answers the same, and gives nothing back
"""

import mmap
import sys
import threading
import time

MIB = 1 << 20
memory = mmap.mmap(-1, int(sys.argv[1]) * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
freed = 0


def free(size: int) -> None:
    global freed
    time.sleep(float(sys.argv[2]))
    memory.madvise(mmap.MADV_DONTNEED, freed, size)
    freed += size


sys.stdout.write("ready\n")
sys.stdout.flush()
for line in sys.stdin:
    word, size = line.split()
    if word == "free":
        threading.Thread(target=free, args=(int(size) * MIB,)).start()
    sys.stdout.write("done\n")
    sys.stdout.flush()
