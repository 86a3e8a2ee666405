"""A watched folder: which checkpoint becomes a version, and when."""

import json
import os
import threading
from pathlib import Path

import pytest
from front_cases import StandInPublisher, save_checkpoint

from rose.errors import ConfigError, NotAnnouncedError, RefusedError, UnavailableError
from rose.integrations.front.watch import LACKING_S, CheckpointWatcher
from rose.main.publish import _once


class WatchedFolder:
    """A folder whose files are as old as the test says, and whoever watches it."""

    def __init__(self, folder: Path, publisher: StandInPublisher) -> None:
        self.folder = folder / "saved"
        self.folder.mkdir(exist_ok=True)
        self.publisher = publisher
        self.now_s = 0.0
        self._state = folder / "published.watched.json"

    def watcher(self, **options: object) -> CheckpointWatcher:
        values: dict[str, object] = {"settled_s": 2.0, "clock": lambda: self.now_s} | options
        return CheckpointWatcher(self.publisher, self.folder, self._state, **values)  # type: ignore[arg-type]

    def save(self, name: str, at_s: int, inside: str = "") -> Path:
        folder = save_checkpoint(self.folder / name / inside, at_s)
        os.utime(folder / "model.safetensors", ns=(0, at_s * 10**9))
        return folder


@pytest.fixture
def watch(tmp_path: Path) -> WatchedFolder:
    return WatchedFolder(tmp_path, StandInPublisher())


def test_the_newest_of_several_is_published_once_it_has_settled(watch: WatchedFolder) -> None:
    watcher = watch.watcher()
    assert watcher.step() is None
    for number in (1, 2, 10):
        watch.save(f"checkpoint-{number}", number)
    assert watcher.step() is None
    assert watcher.waits
    watch.now_s = 3.0
    noted = watcher.step()
    assert noted is not None
    assert (noted.name, noted.version) == ("checkpoint-10", 1)
    assert (watcher.step(), watch.publisher.events) == (None, ["published 1", "served 1"])


def test_a_folder_that_is_still_written_starts_to_settle_anew(watch: WatchedFolder) -> None:
    watcher = watch.watcher()
    watch.save("step_1", 1)
    assert watcher.step() is None
    watch.now_s = 1.5
    watch.save("step_1", 2)
    assert watcher.step() is None
    watch.now_s = 3.0
    assert watcher.step() is None
    watch.now_s = 4.0
    assert watcher.step() is not None


def test_a_marker_is_waited_for_and_then_nothing_else(watch: WatchedFolder) -> None:
    watcher = watch.watcher(marker="STABLE", inside="actor/huggingface")
    watch.save("global_step_1", 1, "actor/huggingface")
    watch.now_s = 60.0
    assert watcher.step() is None
    (watch.folder / "global_step_1/STABLE").touch()
    assert watcher.step() is not None


def test_whoever_starts_again_goes_on_after_the_last(watch: WatchedFolder) -> None:
    watch.save("step_1", 1)
    assert watch.watcher(settled_s=0.0).step() is not None
    again = watch.watcher(settled_s=0.0)
    assert again.step() is None
    watch.save("step_2", 2)
    noted = again.step()
    assert noted is not None
    assert (noted.name, noted.version) == ("step_2", 2)


def test_a_trainer_that_goes_back_is_followed_and_later_steps_of_before_are_not(
    watch: WatchedFolder,
) -> None:
    for number in (1, 2, 3):
        watch.save(f"step_{number}", number)
    watcher = watch.watcher(settled_s=0.0)
    assert watcher.step() is not None
    watch.save("step_2", 10)
    noted = watcher.step()
    assert noted is not None
    assert noted.name == "step_2"
    assert watcher.step() is None


def test_one_that_does_not_fit_is_left_until_it_changes(watch: WatchedFolder) -> None:
    watcher = watch.watcher(settled_s=0.0)
    watch.save("step_1", 1)
    watch.publisher.fails = RefusedError("names do not fit")
    with pytest.raises(RefusedError, match="do not fit"):
        watcher.step()
    assert watcher.step() is None
    watch.save("step_1", 2)
    assert watcher.step() is not None


def test_an_outage_loses_no_checkpoint_and_doubles_none(watch: WatchedFolder) -> None:
    watcher = watch.watcher(settled_s=0.0)
    watch.save("step_1", 1)
    watch.publisher.fails = UnavailableError("no scheduler answers")
    with pytest.raises(UnavailableError):
        watcher.step()
    watch.publisher.unserved = UnavailableError("published and not served")
    with pytest.raises(UnavailableError):
        watcher.step()
    assert watcher.step() is None
    assert watch.publisher.events == ["published 1"]


def test_a_version_that_no_scheduler_knows_is_announced_and_not_published_twice(
    watch: WatchedFolder,
) -> None:
    watcher = watch.watcher(settled_s=0.0)
    watch.save("step_1", 1)
    watch.publisher.fails = NotAnnouncedError("published but not announced")
    watch.publisher.unserved = NotAnnouncedError("still not")
    for _ in range(2):
        with pytest.raises(NotAnnouncedError):
            watcher.step()
    assert watcher.step() == watcher.last
    assert watcher.step() is None
    assert watch.publisher.events == ["published 1", "served 1"]


def test_folders_of_another_make_are_passed_over(watch: WatchedFolder) -> None:
    for name in ("latest", "step_1.tmp", ".step_9", "logs"):
        watch.save(name, 1)
    (watch.folder / "step_3").write_text("a file")
    (watch.folder / "step_4").symlink_to("/")
    assert watch.watcher(settled_s=0.0).step() is None


def test_what_cannot_be_watched_is_one_line(watch: WatchedFolder, tmp_path: Path) -> None:
    (tmp_path / "published.watched.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it"):
        watch.watcher()
    with pytest.raises(ConfigError, match="within a step"):
        watch.watcher(inside="../other")
    with pytest.raises(ConfigError, match="no such folder"):
        CheckpointWatcher(watch.publisher, tmp_path / "none", tmp_path / "state")


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ((), "has no *.safetensors yet"),
        (("adapter_model.safetensors",), "holds an adapter; merge it"),
        (("pytorch_model.bin",), "has pytorch_model.bin and no *.safetensors yet; save it as"),
        ((ONE,), "has 1 of 2 files yet"),
        ((ONE, "model.safetensors.index.json"), f"{TWO} is not there yet"),
    ],
)
def test_what_a_folder_lacks_is_written_once_when_it_has_lacked_it_for_long(
    watch: WatchedFolder, files: tuple[str, ...], why: str
) -> None:
    folder, lines = watch.folder / "checkpoint-5", list[str]()
    folder.mkdir()
    for name in files:
        (folder / name).write_text(json.dumps({"weight_map": {"a": ONE, "b": TWO}}))
    watcher = watch.watcher(say=lines.append)
    for watch.now_s in (0.0, LACKING_S - 1):
        assert watcher.step() is None
    assert (why in watcher.lacks, lines) == (True, [])
    for watch.now_s in (LACKING_S, LACKING_S + 60.0):
        assert watcher.step() is None
    assert [line.startswith("checkpoint-5 is left out: ") and why in line for line in lines] == [
        True
    ]


def test_once_says_what_the_newest_step_lacks(watch: WatchedFolder) -> None:
    (watch.folder / "step_1").mkdir()
    (watch.folder / "step_2").mkdir()
    (watch.folder / "step_2/pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"within 0 s: .*step_2 has pytorch_model.bin"):
        _once(watch.watcher(), 0.0, threading.Event())


def test_what_was_published_is_durable_before_it_has_its_name(
    watch: WatchedFolder, synced: list[tuple[int, str]]
) -> None:
    watch.save("step_1", 1)
    assert watch.watcher(settled_s=0.0).step() is not None
    assert [Path(path).name for _, path in synced] == ["published.watched.json.part"]
