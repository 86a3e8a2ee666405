"""A batch whose gateway and scheduler are killed, as processes of their own."""

from pathlib import Path

from bench.micro.batch_kill import killed


async def test_each_request_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    found = await killed(tmp_path, requests=150, kills=2)
    assert (found["answered_once"], found["answered_twice"], found["whole"]) == (150, 0, 150)
    assert (found["status"], found["scheduler_kills"]) == ("completed", 1)
