"""On the path of all that engine tests start: a process that becomes an engine is counted.

However it was started, by whom and from which command: one line with the test of that moment.
"""

import os
import sys

STARTS = "ROSE_TEST_ENGINE_STARTS"

if STARTS in os.environ and "vllm.entrypoints.openai.api_server" in sys.orig_argv:
    with open(os.environ[STARTS], "a", encoding="utf-8") as starts:
        starts.write(os.environ.get("PYTEST_CURRENT_TEST", "between tests") + "\n")
