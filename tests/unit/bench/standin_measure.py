"""In place of `rose.bench.gpu.measure`: behaves as the piece's name says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

name, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
sys.stdout.write(f"{name} on {os.environ['CUDA_VISIBLE_DEVICES']}\n")
sys.stdout.flush()
if name == "crashes":
    os.kill(os.getpid(), signal.SIGSEGV)
elif name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sys.stdout.write(f"child {child.pid}\n")
    sys.stdout.flush()
    time.sleep(60)
elif name == "fails":
    out.write_text(json.dumps({"failed": "one line"}))
    sys.exit(1)
elif name == "says nothing":
    sys.exit(3)
else:
    out.write_text(json.dumps({"measured": {"sizes": json.loads(sys.argv[3])}}))
